"""Log-probs of tokens and of their best alternatives, of logits as the model gave them.

`token_logprobs` works on logits in host memory. On a device `launch_logprobs` finds the same there
and `read_logprobs` makes records of it when it has come to the host. Not for: the logits that
were sampled from, which penalties, masks and temperature have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.types import TokenLogprobs, TokenParams

WHOLE_VOCABULARY = -1
_ROWS = 64  # whose order is found at once on a device: a bound on memory
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


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log-probs of n rows on their way to the host. Row i: token, best ones, wanted ids."""

    ids: Tensor  # i64[n, 1 + k + m]
    values: Tensor  # f32[n, 1 + k + m]
    rank: Tensor  # i64[n]
    wants: tuple[Want, ...]
    best: int  # k, the most that any row wants

    def fetched(self, fetch: Callable[[Tensor], Tensor]) -> LogprobTensors:
        """The same in host memory, as `fetch` puts it there."""
        return LogprobTensors(
            fetch(self.ids), fetch(self.values), fetch(self.rank), self.wants, self.best
        )


def launch_logprobs(logits: Tensor, tokens: Tensor, wants: Sequence[Want]) -> LogprobTensors:
    """As `token_logprobs` of f32[n, V] and i32[n] on a device, which is not waited for."""
    vocab = logits.shape[1]
    counts = [vocab if want.count == WHOLE_VOCABULARY else min(want.count, vocab) for want in wants]
    best = max(counts)
    most = max(len(want.ids) for want in wants)
    extra = torch.tensor([[*want.ids, *[0] * (most - len(want.ids))] for want in wants])
    own = tokens.long().unsqueeze(1)
    ids = torch.cat(
        (own, _device_best(logits, best), extra.long().view(len(wants), most).to(logits.device)),
        dim=1,
    )
    values = torch.log_softmax(logits, dim=1).gather(1, ids)
    rank = (logits > logits.gather(1, own)).sum(dim=1) + 1
    return LogprobTensors(ids, values, rank, tuple(wants), best)


def read_logprobs(found: LogprobTensors) -> list[TokenLogprobs]:
    """Records of what has come to host memory."""
    results: list[TokenLogprobs] = []
    rows = zip(found.ids.tolist(), found.values.tolist(), found.rank.tolist(), strict=True)
    for want, (ids, values, rank) in zip(found.wants, rows, strict=True):
        count = found.best if want.count == WHOLE_VOCABULARY else min(want.count, found.best)
        kept = [*range(1 + count), *range(1 + found.best, 1 + found.best + len(want.ids))]
        results.append(TokenLogprobs([ids[i] for i in kept], [values[i] for i in kept], rank))
    return results


def _device_best(logits: Tensor, count: int) -> Tensor:
    """i64[n, count] ids of the largest of f32[n, V] in falling order, equal ones by rising id.

    Value and id are one integer, so that their order is the whole order: the bits of a float, the
    lower 31 turned over if it is negative, rise with it; zeros of both signs are made equal first.
    """
    vocab = logits.shape[1]
    if count == 0:
        return torch.empty((logits.shape[0], 0), dtype=torch.int64, device=logits.device)
    falling = torch.arange(vocab - 1, -1, -1, device=logits.device)
    found = []
    for part in torch.split(logits, _ROWS):
        bits = (part + 0.0).view(torch.int32)
        order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
        keys = (order << 32) + falling
        best = torch.topk(keys, count, dim=1).values
        found.append(vocab - 1 - (best & 0xFFFFFFFF))
    return torch.cat(found)
