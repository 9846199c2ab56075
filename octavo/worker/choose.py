"""From logits to tokens: finite or not, rules, sampling, log-probs. This file: in host memory.

Not for: the arithmetic of any of these (`sampling/`, `kernels/`), or a device with memory of its
own (`staged_choose.py`). Next file: `graphs.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from math import isfinite
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.grammar.matcher import Words
from octavo.kernels.ops import SampleRows
from octavo.sampling.logprobs import Want, token_logprobs
from octavo.sampling.masks import allows_only, apply_masks
from octavo.sampling.processors import NO_TOKEN, RowRules, process
from octavo.types import TokenLogprobs
from octavo.worker.buffers import StepRows
from octavo.worker.slots import LOGPROBS, POISONED, RULES, HostSlots, Ints

NOT_FINITE = "the model's logits are not finite (NaN or infinity)"
PROMPT_NOT_FINITE = "the model's logits at a prompt position are not finite (NaN or infinity)"

Masks = tuple[Words, dict[int, str]]  # and why there is none, by index
Sample = Callable[[Tensor, SampleRows], Tensor]
# Tokens i32[S], and by index into them: log-probs that were asked for, reasons of bad rows.
Chosen = tuple[Ints, dict[int, TokenLogprobs], dict[int, str]]


class Choice(Protocol):
    """Tokens on their way."""

    def done(self) -> bool:
        """True if `result` would not wait."""

    def result(self) -> Chosen:
        """The tokens; raises what the device failed with."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens that a graph has drawn already, if no row has filters or asks for more."""

    logits: Tensor  # f32[S, V] for rows that do


class Chooser(Protocol):
    """Chooses a token for each sampled row, and notes it as its slot's last one."""

    def begin(self, rows: StepRows) -> None:
        """Before a plan's forward pass: starts what can go on beside it."""

    def choose(self, logits: Tensor | Drawn, rows: StepRows) -> Choice:
        """Logits f32[S, V], which may be changed, of a plan's sampled rows."""

    def prompt_logprobs(
        self, logits: Tensor, targets: list[int], want: Want
    ) -> tuple[list[TokenLogprobs], bool]:
        """Log-probs of `targets` at the positions of f32[n, V]; True if logits were not finite.

        Writes zeros over those that were not.
        """


class Made:
    """A Choice that was made at once."""

    __slots__ = ("_chosen",)

    def __init__(self, chosen: Chosen) -> None:
        self._chosen = chosen

    def done(self) -> bool:
        """True."""
        return True

    def result(self) -> Chosen:
        """The tokens."""
        return self._chosen


class NoChooser:
    """Chooses nothing: another rank does, and later plans carry the tokens."""

    def begin(self, rows: StepRows) -> None:
        """Nothing."""

    def choose(self, logits: Tensor | Drawn, rows: StepRows) -> Made:
        """No tokens."""
        return Made((np.zeros(0, np.int32), {}, {}))

    def prompt_logprobs(
        self, logits: Tensor, targets: list[int], want: Want
    ) -> tuple[list[TokenLogprobs], bool]:
        """None."""
        return [], False


class HostChooser:
    """Chooses in host memory."""

    def __init__(self, sample: Sample, slots: HostSlots) -> None:
        self._sample = sample
        self._slots = slots
        self._masks: Future[Masks] | None = None  # of the plan that began last
        self._masked: list[int] = []  # which of its sampled rows they are of

    def begin(self, rows: StepRows) -> None:
        """Masks of grammars are computed beside the forward pass."""
        grammars = self._slots.grammars
        self._masks = None
        if grammars is None:
            return
        self._masked, followers = self._slots.followers(rows.slots[rows.sampled])
        if followers:
            self._masks = grammars.begin(followers)

    def choose(self, logits: Tensor | Drawn, rows: StepRows) -> Made:
        """See `Chooser`."""
        assert isinstance(logits, Tensor), "nothing is captured on the CPU"
        slots = self._slots
        chosen = rows.slots[rows.sampled]
        positions = rows.ends[rows.sampled].astype(np.int64)
        bad = dict.fromkeys(not_finite(logits), NOT_FINITE)
        special = slots.special[chosen]
        if bad or special.any():
            return Made(self._choose_slowly(logits, chosen, positions, bad))
        tokens = self._sample(logits, slots.settings(chosen, positions)).numpy()
        slots.sampled(chosen, tokens)
        return Made((tokens, {}, bad))

    def prompt_logprobs(
        self, logits: Tensor, targets: list[int], want: Want
    ) -> tuple[list[TokenLogprobs], bool]:
        """See `Chooser`."""
        broken = not_finite(logits)
        if broken:
            logits[broken] = 0.0
        return token_logprobs(logits, targets, [want] * len(targets)), bool(broken)

    def _choose_slowly(
        self, logits: Tensor, chosen: Ints, positions: NDArray[np.int64], bad: dict[int, str]
    ) -> Chosen:
        """The same where a row is bad or asks for more than sampling."""
        slots = self._slots
        special = slots.special[chosen]
        for index in np.flatnonzero(special & POISONED).tolist():
            bad.setdefault(index, PROMPT_NOT_FINITE)
        if bad:
            logits[list(bad)] = 0.0  # whatever is drawn for them is not used
        asking = [i for i in np.flatnonzero(special & LOGPROBS).tolist() if i not in bad]
        # Log-probs are of the model's own logits, which rules are about to change.
        raw = {i: logits[i].clone() if special[i] & RULES else logits[i] for i in asking}
        ruled = [i for i in np.flatnonzero(special & RULES).tolist() if i not in bad]
        rules = [slots.rules[int(chosen[index])] for index in ruled]
        self._apply_rules(logits, ruled, rules, chosen=chosen, positions=positions, bad=bad)

        tokens = self._sample(logits, slots.settings(chosen, positions)).numpy()
        slots.sampled(chosen, tokens)
        for index, rule in zip(ruled, rules, strict=True):
            if rule.remembers and index not in bad:
                rule.note(int(tokens[index]))
        asking = [index for index in asking if index not in bad]
        wants = [slots.wants[int(chosen[index])] for index in asking]
        values = token_logprobs([raw[i] for i in asking], tokens[asking].tolist(), wants)
        return tokens, dict(zip(asking, values, strict=True)), bad

    def _apply_rules(
        self,
        logits: Tensor,
        ruled: list[int],
        rules: list[RowRules],
        *,
        chosen: Ints,
        positions: NDArray[np.int64],
        bad: dict[int, str],
    ) -> None:
        """Changes the logits of rows with rules; adds to `bad` those that can choose no token."""
        if not ruled:
            return
        num_output = (positions - self._slots.num_prompt[chosen])[ruled].tolist()
        if self._masks is not None:
            self._apply_masks(logits, dict(zip(ruled, rules, strict=True)), bad)
        process(logits, ruled, rules, num_output)
        # NaN and both infinities fail: a bias may overflow as well as leave nothing.
        best = torch.amax(logits, dim=1).tolist()
        for index in ruled:
            if index in bad or not isfinite(best[index]):
                bad.setdefault(index, NO_TOKEN)
                logits[index] = 0.0

    def _apply_masks(self, logits: Tensor, rules: dict[int, RowRules], bad: dict[int, str]) -> None:
        assert self._masks is not None
        words, failed = self._masks.result()
        for place, reason in failed.items():
            bad.setdefault(self._masked[place], reason)
            logits[self._masked[place]] = 0.0
        good = [i for i, row in enumerate(self._masked) if i not in failed and row in rules]
        tell_ends([rules[self._masked[i]] for i in good], words[good])
        apply_masks(logits, [self._masked[i] for i in good], torch.from_numpy(words[good]))


def tell_ends(rules: Sequence[RowRules], words: Words) -> None:
    """Tells each rule whether its grammar's mask leaves nothing but its stop ids."""
    for rule, mask in zip(rules, words, strict=True):
        rule.must_end = rule.min_tokens > 0 and allows_only(mask, rule.stop_ids)


def not_finite(logits: Tensor) -> list[int]:
    """Rows of f32[n, V] in host memory with a value that is not finite.

    A sum is many times cheaper than a test of each value and misses none; as a sum of finite values
    may overflow, rows that look wrong are looked at again.
    """
    suspects = np.flatnonzero(~np.isfinite(logits.sum(dim=1).numpy())).tolist()
    return [row for row in suspects if not bool(torch.isfinite(logits[row]).all())]
