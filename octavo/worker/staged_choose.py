"""From logits to tokens on a device with memory of its own, without waiting for it.

The plain path is three kernels and one copy to the host; `StagedChoice.result` waits for the event
after it. Rules and log-probs are given to the device the same way. The one thing that the host must
know before it can go on is the history of sequences with penalties, bad words or grammars: then
the tokens of the step before are waited for, while the device computes this one.
Not for: the CPU (`choose.py`). Next file: `graphs.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.device.base import Device, Event
from octavo.kernels import slots as slots_kernels
from octavo.kernels.ops import SampleRows
from octavo.kernels.slots import SlotOps
from octavo.sampling.logprobs import LogprobTensors, Want, launch_logprobs, read_logprobs
from octavo.sampling.masks import apply_masks
from octavo.sampling.processors import NO_TOKEN, RowRules, process
from octavo.types import TokenLogprobs
from octavo.worker.buffers import StepRows
from octavo.worker.choose import (
    NOT_FINITE,
    PROMPT_NOT_FINITE,
    Chosen,
    Drawn,
    Sample,
    tell_ends,
)
from octavo.worker.slots import LOGPROBS, POISONED, RULES, Ints, SlotTable
from octavo.worker.staged import StagedInputs, Staging

SampleChecked = Callable[[Tensor, SampleRows, Tensor], Tensor]
TURNS = 4  # choices whose tokens may lie in staging memory at once


class StagedChoice:
    """Tokens on their way from the device, and what is to be done once they are here."""

    __slots__ = (
        *("_chosen", "_count", "_event", "_failed", "_poisoned", "_ruled", "_values", "_words"),
    )

    def __init__(self, event: Event, words: Ints, count: int) -> None:
        self._event = event
        self._words = words  # what the device writes: see `StepTensors.out`
        self._count = count
        self._poisoned: list[int] = []
        self._failed: dict[int, str] = {}
        self._ruled: list[tuple[int, RowRules]] = []
        self._values: tuple[list[int], LogprobTensors] | None = None
        self._chosen: Chosen | None = None

    def with_extras(
        self,
        poisoned: list[int],
        ruled: list[tuple[int, RowRules]],
        values: tuple[list[int], LogprobTensors] | None,
        failed: dict[int, str],
    ) -> StagedChoice:
        """This choice, told about rows that are poisoned, have rules, want log-probs, or failed."""
        self._poisoned, self._ruled, self._values = poisoned, ruled, values
        self._failed = failed
        return self

    @property
    def remembers(self) -> bool:
        """True if a history waits for these tokens."""
        return self._chosen is None and any(rule.remembers for _, rule in self._ruled)

    def done(self) -> bool:
        """True if `result` would not wait."""
        return self._chosen is not None or self._event.query()

    def result(self) -> Chosen:
        """The tokens; the first call waits and adds them to histories."""
        if self._chosen is None:
            self._event.synchronize()
            self._chosen = self._read()
        return self._chosen

    def _read(self) -> Chosen:
        parts = self._words[:, : self._count]
        tokens: Ints = parts[0].copy()
        bad: dict[int, str] = {}
        if parts[1:].any() or self._poisoned or self._failed:
            broken = np.flatnonzero(parts[slots_kernels.NOT_FINITE]).tolist()
            empty = np.flatnonzero(parts[slots_kernels.NO_TOKEN]).tolist()
            bad = dict.fromkeys(broken, NOT_FINITE)
            for index in self._poisoned:
                bad.setdefault(index, PROMPT_NOT_FINITE)
            for index, reason in self._failed.items():
                bad.setdefault(index, reason)
            for index in empty:
                bad.setdefault(index, NO_TOKEN)
        for index, rule in self._ruled:
            if rule.remembers and index not in bad:
                rule.note(int(tokens[index]))
        if self._values is None:
            return tokens, {}, bad
        asking, found = self._values
        logprobs = dict(zip(asking, read_logprobs(found), strict=True))
        return tokens, {i: value for i, value in logprobs.items() if i not in bad}, bad


class StagedChooser:
    """Chooses on a device; see `Chooser`."""

    def __init__(
        self,
        sample: Sample,
        *,
        device: Device,
        ops: SlotOps,
        inputs: StagedInputs,
        slots: SlotTable,
        sample_checked: SampleChecked | None = None,
    ) -> None:
        """`sample_checked` looks for broken rows and samples in one, see `Ops`."""
        self._sample = sample
        self._sample_checked = sample_checked
        self._device = device
        self._ops = ops
        self._inputs = inputs
        self._slots = slots
        shape = inputs.tensors.out.shape
        self._staging = [device.staging(shape.numel()).view(shape) for _ in range(TURNS)]
        self._arrays: list[Ints] = [staging.numpy() for staging in self._staging]
        self._events: list[Event | None] = [None] * TURNS
        self._turn = 0
        self._mask_staging: list[Staging | None] = [None, None]  # taken when first wanted
        self._mask_turn = 0
        self._open: deque[StagedChoice] = deque()  # one for each turn that may still be read

    def begin(self, rows: StepRows) -> None:
        """Nothing: the tokens that masks depend on are still being computed."""

    def choose(self, logits: Tensor | Drawn, rows: StepRows) -> StagedChoice:
        """See `Chooser`. Returns when the device has been given its work."""
        special = self._slots.special[rows.slots[rows.sampled]]
        filtered = self._inputs.filtered(rows)
        if isinstance(logits, Drawn):
            if not filtered and not special.any():
                return self._send(len(rows.sampled))
            logits = logits.logits
        if special.any():
            return self._choose_slowly(logits, rows, special)
        self.draw(logits, filtered=filtered)
        return self._send(len(rows.sampled))

    def prompt_logprobs(
        self, logits: Tensor, targets: list[int], want: Want
    ) -> tuple[list[TokenLogprobs], bool]:
        """See `Chooser`. All but the records is made on the device."""
        broken = torch.isfinite(logits).all(dim=1).logical_not_()
        logits.masked_fill_(broken.unsqueeze(1), 0.0)
        tokens = torch.tensor(targets, dtype=torch.int32, device=logits.device)
        found = launch_logprobs(logits, tokens, [want] * len(targets)).fetched(Tensor.cpu)
        return read_logprobs(found), bool(broken.any())

    def draw(self, logits: Tensor, *, filtered: bool = False) -> Tensor:
        """Tokens of f32[n, V], by the settings of the first n sampled rows; notes them."""
        tensors, count = self._inputs.tensors, logits.shape[0]
        if self._sample_checked is None:
            self._ops.check(logits, tensors)
            return self._draw(logits, filtered)
        flags = tensors.out[slots_kernels.NOT_FINITE, :count]
        settings = self._inputs.settings(count, filtered=filtered)
        return self._noted(self._sample_checked(logits, settings, flags))

    def _draw(self, logits: Tensor, filtered: bool) -> Tensor:
        settings = self._inputs.settings(logits.shape[0], filtered=filtered)
        return self._noted(self._sample(logits, settings))

    def _noted(self, tokens: Tensor) -> Tensor:
        self._ops.note(tokens, self._inputs.tensors, self._inputs.slots)
        return tokens

    def _send(self, count: int) -> StagedChoice:
        """Gives the copy of tokens and flags to the device."""
        if len(self._open) == TURNS:
            self._open.popleft().result()  # its staging memory is the next to be written
        self._device.copy(self._staging[self._turn], self._inputs.tensors.out)
        # Of the choice that had this turn before, which has been waited for.
        event = self._events[self._turn] = self._device.mark(self._events[self._turn])
        choice = StagedChoice(event, self._arrays[self._turn], count)
        self._turn = (self._turn + 1) % TURNS
        self._open.append(choice)
        return choice

    def _choose_slowly(
        self, logits: Tensor, rows: StepRows, special: NDArray[np.uint8]
    ) -> StagedChoice:
        """The same where a row asks for more than sampling."""
        slots, chosen = self._slots, rows.slots[rows.sampled]
        self._ops.check(logits, self._inputs.tensors)
        poisoned = np.flatnonzero(special & POISONED).tolist()
        ruled = [
            (index, slots.rules[int(chosen[index])])
            for index in np.flatnonzero(special & RULES).tolist()
        ]
        asking: list[int] = np.flatnonzero(special & LOGPROBS).tolist()
        # Log-probs are of the model's own logits, which rules are about to change.
        raw = logits[asking] if asking else logits
        failed = self._apply_rules(logits, rows, ruled)
        tokens = self._draw(logits, self._inputs.filtered(rows))
        values = None
        if asking:
            wants = [slots.wants[int(chosen[index])] for index in asking]
            found = launch_logprobs(raw, tokens[asking], wants)
            values = (asking, found.fetched(self._device.fetch))
        return self._send(len(chosen)).with_extras(poisoned, ruled, values, failed)

    def _apply_rules(
        self, logits: Tensor, rows: StepRows, ruled: Sequence[tuple[int, RowRules]]
    ) -> dict[int, str]:
        """Changes the logits of rows with rules, and flags those that can choose no token.

        Returns reasons of rows whose grammar failed.
        """
        if not ruled:
            return {}
        if any(rule.remembers for _, rule in ruled):
            for choice in self._open:
                if choice.remembers:
                    choice.result()
        at = [index for index, _ in ruled]
        positions = rows.ends[rows.sampled]
        num_output = positions - self._slots.num_prompt[rows.slots[rows.sampled]]
        failed = self._apply_masks(logits, rows, dict(ruled))
        process(logits, at, [rule for _, rule in ruled], num_output[at].tolist())
        # NaN and both infinities fail: a bias may overflow as well as leave nothing.
        empty = self._inputs.tensors.out[slots_kernels.NO_TOKEN]
        index = torch.tensor(at, device=logits.device)
        empty[index] = (~torch.isfinite(torch.amax(logits[index], dim=1))).int()
        return failed

    def _apply_masks(
        self, logits: Tensor, rows: StepRows, rules: dict[int, RowRules]
    ) -> dict[int, str]:
        """Computes masks of grammars, beside the forward pass that the device is busy with."""
        grammars = self._slots.grammars
        masked, followers = self._slots.followers(rows.slots[rows.sampled])
        if grammars is None or not followers:
            return {}
        words, failed = grammars.masks(followers)
        tell_ends([rules[row] for row in masked], words)
        staging = self._mask_staging[self._mask_turn]
        if staging is None:
            count = self._slots.num_slots * words.shape[1]
            staging = self._mask_staging[self._mask_turn] = Staging(self._device, count)
        self._mask_turn = (self._mask_turn + 1) % len(self._mask_staging)
        if staging.event is not None:
            staging.event.synchronize()
        staging.array[: words.size] = words.reshape(-1)
        on_device = torch.empty(words.size, dtype=torch.int32, device=logits.device)
        self._device.copy(on_device, staging.tensor[: words.size])
        staging.event = self._device.mark(staging.event)
        apply_masks(logits, masked, on_device.view(words.shape))
        return {masked[index]: reason for index, reason in failed.items()}
