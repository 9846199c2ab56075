"""What the package `flash_attn_interface` offers, in plain torch: its arguments and their meaning.

So that the calls of `octavo/attention/fa3.py` can be checked where the package is not. Not for:
speed. The arguments that the program does not give are left out but for their defaults.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def flash_attn_with_kvcache(
    q: Tensor,  # [T, Q, D]
    k_cache: Tensor,  # [N, P, K, D]
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: Tensor,  # i32[R]: keys, those of the queries included
    page_table: Tensor,  # i32[R, B]
    cu_seqlens_q: Tensor,  # i32[R+1]
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),  # keys before and after a query; -1: all
    softcap: float = 0.0,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    """[T, Q, D]. Queries are the last of a row's keys."""
    assert k is None
    assert v is None
    assert not return_softmax_lse
    assert num_splits == 0
    assert k_cache.stride(-1) == v_cache.stride(-1) == q.stride(-1) == 1
    assert all(x.dtype == torch.int32 for x in (cache_seqlens, page_table, cu_seqlens_q))
    page, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    ends = cu_seqlens_q.tolist()
    assert ends[0] == 0
    assert max(b - a for a, b in pairwise(ends)) <= max_seqlen_q
    out = torch.full_like(q, torch.nan)
    for row, length in enumerate(cache_seqlens.tolist()):
        count = ends[row + 1] - ends[row]
        at = torch.arange(length, device=q.device)
        where = page_table[row].long()[at // page]
        keys = k_cache[where, at % page].float().repeat_interleave(group, 1)
        values = v_cache[where, at % page].float().repeat_interleave(group, 1)
        score = torch.einsum("qhd,khd->hqk", q[ends[row] : ends[row + 1]].float(), keys)
        score = score * softmax_scale
        if softcap:
            score = torch.tanh(score / softcap) * softcap
        place = length - count + torch.arange(count, device=q.device)[:, None]
        before, after = window_size
        hidden = torch.zeros_like(score[0], dtype=torch.bool)
        if causal or after >= 0:
            hidden |= at > place + (0 if causal else after)
        if before >= 0:
            hidden |= at < place - before
        weight = score.masked_fill(hidden, -torch.inf).softmax(-1)
        out[ends[row] : ends[row + 1]] = torch.einsum("hqk,khd->qhd", weight, values).to(q.dtype)
    return out
