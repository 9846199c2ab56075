"""What a request may ask to be done to its logits before a token is drawn.

Order: the grammar (`masks.py`), allowed ids, bad words, stop ids before `min_tokens`, bias,
penalties. Temperature, top-k, top-p and min-p follow in `Ops.sample`. Each row is changed by its
own rules alone, so that its neighbours in a batch do not matter. Not for: log-probs, which are of
the logits before all this.
Next file: `penalties.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.errors import NO_TOKEN
from octavo.grammar.matcher import Follower
from octavo.sampling.history import TokenHistory
from octavo.sampling.penalties import Penalties, apply_penalties
from octavo.types import TokenParams

__all__ = ["NO_TOKEN", "RowRules", "process"]


class RowRules:
    """The rules of one sequence and what they must remember.

    Ids outside the vocabulary name no token, so they have no effect.
    """

    __slots__ = (
        *("allowed", "bad_words", "bias", "follower", "history", "min_tokens", "must_end"),
        *("penalties", "stop_ids"),
    )

    def __init__(
        self,
        params: TokenParams,
        tokens: Sequence[int],
        *,
        num_prompt: int,
        vocab: int,
        follower: Follower | None = None,
    ) -> None:
        """`tokens` are all known tokens if `params.needs_history`, else it may be empty.

        `follower` is the sequence's place in its grammar.
        """
        self.follower = follower
        self.must_end = False  # the grammar allows nothing but stop ids, whatever min_tokens says
        self.allowed = _ids(params.allowed_ids, vocab) if params.allowed_ids else None
        self.bad_words = [word for word in params.bad_words if word and 0 <= word[-1] < vocab]
        self.min_tokens = params.min_tokens
        self.stop_ids = [token for token in params.stop_ids if 0 <= token < vocab]
        self.bias = [(token, value) for token, value in params.logit_bias if 0 <= token < vocab]
        self.penalties = penalties_of(params)
        remember = self.penalties is not None or bool(self.bad_words)
        self.history = TokenHistory(tokens, num_prompt) if remember else None

    @staticmethod
    def wanted(params: TokenParams) -> bool:
        """True if a sequence with these settings has rules at all."""
        return bool(
            params.grammar is not None
            or params.allowed_ids
            or params.bad_words
            or (params.min_tokens > 0 and params.stop_ids)
            or params.logit_bias
            or penalties_of(params)
        )

    def masked(self, num_output: int) -> list[int]:
        """Ids that may not be the next token, after `num_output` tokens of output."""
        too_short = num_output < self.min_tokens and not self.must_end
        ids = list(self.stop_ids) if too_short else []
        if self.history is not None:
            ids += [word[-1] for word in self.bad_words if ends_with(self.history.output, word)]
        return ids

    @property
    def remembers(self) -> bool:
        """True if it must be told each token that is chosen."""
        return self.history is not None or self.follower is not None

    def note(self, token: int) -> None:
        """A token has been chosen."""
        if self.history is not None:
            self.history.append(token)
        if self.follower is not None:
            self.follower.append(token)


def penalties_of(params: TokenParams) -> Penalties | None:
    """The penalties asked for, None if all are off."""
    if (
        not params.presence_penalty
        and not params.frequency_penalty
        and params.repetition_penalty == 1.0
    ):
        return None
    return Penalties(params.presence_penalty, params.frequency_penalty, params.repetition_penalty)


def ends_with(output: Sequence[int], word: Sequence[int]) -> bool:
    """True if the output ends with all of `word` but its last token, which would complete it."""
    head = len(word) - 1
    return head == 0 or (len(output) >= head and tuple(output[-head:]) == tuple(word[:-1]))


def process(
    logits: Tensor, rows: Sequence[int], rules: Sequence[RowRules], num_output: Sequence[int]
) -> None:
    """Changes logits f32[S, V] in place; item i of the sequences belongs to row `rows[i]`."""
    for row, rule in zip(rows, rules, strict=True):
        if rule.allowed is not None:
            allowed = rule.allowed.to(logits.device)
            kept = logits[row, allowed]
            logits[row].fill_(-torch.inf)
            logits[row, allowed] = kept
    masks = [
        (row, token)
        for row, rule, count in zip(rows, rules, num_output, strict=True)
        for token in rule.masked(count)
    ]
    if masks:
        at, ids = torch.tensor(masks, device=logits.device).unbind(1)
        logits[at, ids] = -torch.inf
    _bias(logits, rows, rules)
    _penalties(logits, rows, rules)


def _bias(logits: Tensor, rows: Sequence[int], rules: Sequence[RowRules]) -> None:
    where = [(row, item[0]) for row, rule in zip(rows, rules, strict=True) for item in rule.bias]
    if where:
        biases = [item[1] for rule in rules for item in rule.bias]
        values = torch.tensor(biases, dtype=torch.float32, device=logits.device)
        at, ids = torch.tensor(where, device=logits.device).unbind(1)
        logits.index_put_((at, ids), values, accumulate=True)


def _penalties(logits: Tensor, rows: Sequence[int], rules: Sequence[RowRules]) -> None:
    at: list[int] = []
    settings: list[Penalties] = []
    seen: list[TokenHistory] = []
    for row, rule in zip(rows, rules, strict=True):
        if rule.penalties is not None and rule.history is not None:
            at.append(row)
            settings.append(rule.penalties)
            seen.append(rule.history)
    if at:
        apply_penalties(logits, at, settings, seen)


def _ids(values: Sequence[int], vocab: int) -> Tensor:
    return torch.tensor(sorted({v for v in values if 0 <= v < vocab}), dtype=torch.int64)
