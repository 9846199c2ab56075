"""Log-probs of tokens and of their best alternatives, of logits as the model gave them.

Not for: the logits that were sampled from, which penalties, masks and temperature have changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.types import TokenLogprobs, TokenParams

WHOLE_VOCABULARY = -1


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
    logits: Tensor, tokens: Sequence[int], wants: Sequence[Want]
) -> list[TokenLogprobs]:
    """logits f32[n, V], finite; item i of the sequences belongs to row i.

    A row's values depend on that row alone. Equal ones are listed by rising id.
    """
    chosen = torch.tensor(tokens, dtype=torch.int64)
    logprobs = torch.log_softmax(logits, dim=-1)
    ranks = (torch.count_nonzero(logits > logits.gather(1, chosen[:, None]), dim=1) + 1).tolist()
    results: list[TokenLogprobs] = []
    for row, want in enumerate(wants):
        ids = [tokens[row], *_best(logits[row], want.count), *want.ids]
        values = logprobs[row, torch.tensor(ids)].tolist()
        results.append(TokenLogprobs(ids=ids, values=values, rank=ranks[row]))
    return results


def _best(logits: Tensor, count: int) -> list[int]:
    """Ids of the `count` best of one row f32[V]; ties, at the border too, go to the lower id."""
    if count == 0:
        return []
    if count == WHOLE_VOCABULARY or count >= logits.shape[0]:
        return torch.argsort(logits, descending=True, stable=True).tolist()
    border = torch.topk(logits, count).values[-1]
    # All that reach the border: more than `count` if several tie there.
    ids = torch.nonzero(logits >= border)[:, 0].numpy()
    order = np.lexsort((ids, -logits.numpy()[ids]))[:count]
    best: list[int] = ids[order].tolist()
    return best
