"""Runner: one plan in, one result out. Applies the plan, runs the model, samples, reports.

`submit` gives the device its work and returns; `StepHandle.result` waits for it. On the CPU all is
done when `submit` returns. Where inputs lie, how tokens are chosen and whether a step is replayed
from a graph are given objects (`Inputs`, `Chooser`, `Forward`), so that this file is the same for
every device. Never decides what to run; never fails a step because of one row: a row whose logits
are not finite, or that may choose no token, is reported as bad and its neighbours do not notice.
Not for: loading (`worker.py`) or threads and queues (`executor/`). Next file: `choose.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from octavo.forward import ForwardBatch
from octavo.types import POOL, PROMPT_LOGPROBS, StepPlan, StepResult, TokenLogprobs
from octavo.worker.buffers import Inputs, StepRows, StepSize, read_rows
from octavo.worker.choose import Choice, Chooser, Drawn, not_finite
from octavo.worker.slots import SlotTable

# Rows of logits that are held at once for prompt log-probs: a bound on memory, not on work.
_PROMPT_ROWS = 64


class Model(Protocol):
    """What the runner needs of a decoder."""

    def forward(self, input_ids: Tensor, batch: ForwardBatch) -> Tensor:
        """i32[T] -> logits f32[S, V] of `batch.sample_rows`; the caller may change them."""

    def hidden(self, input_ids: Tensor, batch: ForwardBatch, rows: Tensor | None = None) -> Tensor:
        """i32[T] -> [T, H] after the last norm; with `rows` i32[S] [S, H] of such tokens alone."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, H] -> f32[n, V]."""


class Forward(Protocol):
    """How a batch goes through the model: call by call, or replayed from a graph."""

    def size(self, rows: StepRows) -> StepSize:
        """What the batch must hold; what is not of the plan is idle."""

    def logits(
        self, input_ids: Tensor, batch: ForwardBatch, rows: StepRows
    ) -> Tensor | Drawn | None:
        """f32[S, V] of the sampled rows, None if there are none; the caller may change them."""

    def hidden(self, input_ids: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, H] after the last norm, of all tokens."""


@dataclass(slots=True)
class Extras:
    """What a step gives besides tokens, by row."""

    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    pooled: dict[int, bytes] = field(default_factory=dict)


class StepHandle:
    """A step that the device was given."""

    __slots__ = ("_choice", "_extras", "_forward_ms", "_step")

    def __init__(
        self,
        step: int,
        choice: Choice | None,
        extras: Extras,
        forward_ms: float,
    ) -> None:
        self._step = step
        self._choice = choice
        self._extras = extras
        self._forward_ms = forward_ms

    def done(self) -> bool:
        """True if `result` would not wait."""
        return self._choice is None or self._choice.done()

    def result(self) -> StepResult:
        """The step's result; waits for the device and raises what it failed with."""
        if self._choice is None:
            return StepResult(
                step=self._step,
                tokens=b"",
                prompt_logprobs=self._extras.prompt_logprobs,
                pooled=self._extras.pooled,
                forward_ms=self._forward_ms,
            )
        tokens, logprobs, bad = self._choice.result()
        return StepResult(
            step=self._step,
            tokens=tokens.tobytes(),
            logprobs=logprobs,
            prompt_logprobs=self._extras.prompt_logprobs,
            pooled=self._extras.pooled,
            bad=tuple(bad),
            forward_ms=self._forward_ms,
            bad_reasons=tuple(bad.values()),
        )


@dataclass(frozen=True, slots=True)
class _LaidOut:
    """A plan whose inputs are where the device will find them."""

    plan: StepPlan
    rows: StepRows
    input_ids: Tensor
    batch: ForwardBatch


class Runner:
    """Runs plans in order on one model with one cache."""

    def __init__(
        self,
        *,
        model: Model,
        forward: Forward,
        slots: SlotTable,
        inputs: Inputs,
        chooser: Chooser,
        last_stage: bool = True,
    ) -> None:
        """A runner of a stage that is not the last hands hidden states on, and has no results."""
        self._last_stage = last_stage
        self._model = model
        self._forward = forward
        self._slots = slots
        self._inputs = inputs
        self._chooser = chooser
        self._laid_out: _LaidOut | None = None

    @torch.inference_mode()
    def prepare(self, plan: StepPlan) -> None:
        """Lays out the inputs of a plan without new sequences, which may or may not be submitted.

        On the device they lie where others' do, but its work is done in order: what it was given
        before still finds its own.
        """
        assert not plan.admits, "slots are changed by what is submitted alone"
        self._laid_out = None
        rows = read_rows(plan)
        self._laid_out = _LaidOut(plan, rows, *self._fill(plan, rows))

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> StepHandle:
        """Starts one plan. An exception leaves slots as they are: the core admits anew."""
        slots = self._slots
        for admit in plan.admits:
            slots.admit(admit)
        prepared, self._laid_out = self._laid_out, None
        started = perf_counter()
        if prepared is not None and prepared.plan is plan:
            rows, input_ids, batch = prepared.rows, prepared.input_ids, prepared.batch
        else:
            rows = read_rows(plan)
            input_ids, batch = self._fill(plan, rows)
        self._chooser.begin(rows)
        logits: Tensor | Drawn | None
        extras = Extras()
        if not self._last_stage:
            self._forward.hidden(input_ids, batch)
            logits = None
        elif (rows.flags & (PROMPT_LOGPROBS | POOL)).any():
            logits = self._with_prompts(input_ids, batch, rows, extras)
        else:
            logits = self._forward.logits(input_ids, batch, rows)
        forward_ms = (perf_counter() - started) * 1e3
        slots.computed[rows.slots] = rows.ends
        choice = None if logits is None else self._chooser.choose(logits, rows)
        return StepHandle(plan.step, choice, extras, forward_ms)

    def _fill(self, plan: StepPlan, rows: StepRows) -> tuple[Tensor, ForwardBatch]:
        return self._inputs.fill(plan, rows, self._forward.size(rows))

    def step(self, plan: StepPlan) -> StepResult:
        """Runs one plan to its end."""
        return self.submit(plan).result()

    def _with_prompts(
        self, input_ids: Tensor, batch: ForwardBatch, rows: StepRows, extras: Extras
    ) -> Tensor | None:
        """Logits of the sampled rows, None if there are none; fills `extras`."""
        hidden = self._forward.hidden(input_ids, batch)
        firsts = np.cumsum(rows.lengths) - rows.lengths
        for row in np.flatnonzero(rows.flags & PROMPT_LOGPROBS).tolist():
            start = hidden[int(firsts[row]) :]
            extras.prompt_logprobs[row] = self._prompt_logprobs(start, rows, row)
        for row in np.flatnonzero(rows.flags & POOL).tolist():
            own = hidden[int(firsts[row]) : int(firsts[row] + rows.lengths[row])]
            extras.pooled[row] = self._pooled(own, int(rows.slots[row]))
        if len(rows.sampled) == 0:
            return None
        return self._model.logits(hidden[batch.sample_rows.long()])

    def _pooled(self, hidden: Tensor, slot: int) -> bytes:
        """f32[H] of a row's [T, H]: the sum if its sequence wants the mean, else the last one."""
        wants_mean = self._slots.poolings[slot] == "mean"
        found = (hidden.float().sum(0) if wants_mean else hidden[-1].float()).cpu()
        if not_finite(found[None]):
            self._slots.poison(slot)
            found = torch.zeros_like(found)
        return bytes(found.numpy().tobytes())

    def _prompt_logprobs(self, hidden: Tensor, rows: StepRows, row: int) -> list[TokenLogprobs]:
        """Log-probs of the row's prompt tokens at start + 1 .. start + length.

        The last one may belong to the next chunk: its logits are here, and here alone.
        """
        slot = int(rows.slots[row])
        asked = self._slots.prompt_wants[slot]
        start = int(rows.starts[row])
        targets = asked.prompt[start + 1 : int(rows.ends[row]) + 1]
        results: list[TokenLogprobs] = []
        for low in range(0, len(targets), _PROMPT_ROWS):
            part = targets[low : low + _PROMPT_ROWS]
            logits = self._model.logits(hidden[low : low + len(part)])
            found, broken = self._chooser.prompt_logprobs(logits, part, asked.want)
            if broken:
                self._slots.poison(slot)
            results += found
        return results
