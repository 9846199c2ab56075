"""Log-probs of tokens and of their best alternatives, of logits as the model gave them.

Works on logits in host memory. Not for: the logits that were sampled from, which penalties, masks
and temperature have changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.types import TokenLogprobs, TokenParams

WHOLE_VOCABULARY = -1
_DEPTH = 64  # values a column in `_border`


@dataclass(frozen=True, slots=True)
class Want:
    """Which log-probs a sequence asks for beside those of its tokens."""

    count: int  # best alternatives, or WHOLE_VOCABULARY
    ids: tuple[int, ...] = ()  # always these too


def sample_want(params: TokenParams) -> Want | None:
    """What is wanted at sampled positions, None if nothing."""
    if params.logprobs is None and not params.logprob_ids:
        return None
    return Want(params.logprobs or 0, params.logprob_ids)


def prompt_want(params: TokenParams) -> Want | None:
    """What is wanted at positions of the prompt, None if nothing."""
    return None if params.prompt_logprobs is None else Want(params.prompt_logprobs)


def token_logprobs(
    rows: Iterable[Tensor], tokens: Sequence[int], wants: Sequence[Want]
) -> list[TokenLogprobs]:
    """For each row of finite logits f32[V]: log-probs of its token and of what is wanted there.

    Row by row, so that no value depends on the other rows. Equal ones are listed by rising id.
    """
    results: list[TokenLogprobs] = []
    for row, token, want in zip(rows, tokens, wants, strict=True):
        logits, logprobs = row.numpy(), torch.log_softmax(row, dim=0).numpy()
        ids = [token, *best_ids(logits, want.count), *want.ids]
        rank = int(np.count_nonzero(logits > logits[token])) + 1
        results.append(TokenLogprobs(ids=ids, values=logprobs[ids].tolist(), rank=rank))
    return results


def best_ids(values: NDArray[np.float32], count: int) -> list[int]:
    """Ids of the `count` largest of f32[V]; ties, at the border too, go to the lower id.

    numpy and not torch: on one row of 49,152 values this takes 30 us, `torch.topk` alone 110 us.
    """
    if count == 0:
        return []
    if count == WHOLE_VOCABULARY or count >= len(values):
        ids = np.arange(len(values))
    else:
        ids = np.flatnonzero(values >= _border(values, count))
    order = np.lexsort((ids, -values[ids]))[:count] if count > 0 else np.lexsort((ids, -values))
    best: list[int] = ids[order].tolist()
    return best


def _border(values: NDArray[np.float32], count: int) -> np.float32:
    """A value that at least `count` of `values` reach, and not many more.

    With the row dealt out over many short columns, the `count` largest column maxima are that many
    values, so the smallest of these is a border; finding it takes one pass.
    """
    columns = len(values) // _DEPTH
    maxima = values
    if count <= columns:
        maxima = values[: columns * _DEPTH].reshape(_DEPTH, columns).max(axis=0)
    border: np.float32 = np.partition(maxima, -count)[-count]
    return border
