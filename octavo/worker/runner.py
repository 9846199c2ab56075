"""Runner: one plan in, one result out. Applies the plan, runs the model, samples, reports.

Never decides what to run; never fails a step because of one row: a row whose logits are not finite,
or that may choose no token, is reported as bad and its neighbours do not notice. Not for: loading
(`worker.py`) or threads and queues (`executor/`). Next file: `models/decoder.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from time import perf_counter
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.attention.base import AttentionBackend
from octavo.forward import ForwardBatch, KVCache
from octavo.kernels.ops import SampleRows
from octavo.sampling.logprobs import token_logprobs
from octavo.sampling.processors import NO_TOKEN, RowRules, process
from octavo.types import PROMPT_LOGPROBS, StepPlan, StepResult, TokenLogprobs
from octavo.worker.buffers import InputBuffers, StepRows, read_rows
from octavo.worker.slots import LOGPROBS, POISONED, RULES, Ints, SlotTable

NOT_FINITE = "the model's logits are not finite (NaN or infinity)"
PROMPT_NOT_FINITE = "the model's logits at a prompt position are not finite (NaN or infinity)"

# Rows of logits that are held at once for prompt log-probs: a bound on memory, not on work.
_PROMPT_ROWS = 64


class Model(Protocol):
    """What the runner needs of a decoder."""

    def forward(self, input_ids: Tensor, batch: ForwardBatch) -> Tensor:
        """i32[T] -> logits f32[S, V] of `batch.sample_rows`; the caller may change them."""

    def hidden(self, input_ids: Tensor, batch: ForwardBatch) -> Tensor:
        """i32[T] -> [T, H] after the last norm."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, H] -> f32[n, V]."""


class Runner:
    """Runs plans in order on one model with one cache."""

    def __init__(
        self,
        *,
        model: Model,
        sample: Callable[[Tensor, SampleRows], Tensor],
        attention: AttentionBackend,
        kv: KVCache,
        slots: SlotTable,
        buffers: InputBuffers,
    ) -> None:
        self._model = model
        self._sample = sample
        self._attention = attention
        self._kv = kv
        self._slots = slots
        self._buffers = buffers

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult:
        """Runs one plan. An exception leaves slots as they are: the core admits anew."""
        slots = self._slots
        for admit in plan.admits:
            slots.admit(admit)
        rows = read_rows(plan)
        if plan.block_ids:
            slots.attach(
                rows.slots[np.frombuffer(plan.block_rows, np.int32)],
                np.frombuffer(plan.block_at, np.int32),
                np.frombuffer(plan.block_ids, np.int32),
            )
        started = perf_counter()
        input_ids, batch = self._buffers.fill(plan, rows, slots, self._kv)
        batch = replace(batch, attn=self._attention.plan(batch))
        logits, prompt_logprobs = self._forward(input_ids, batch, rows)
        forward_ms = (perf_counter() - started) * 1e3
        slots.computed[rows.slots] = rows.ends
        if logits is None:
            return StepResult(
                step=plan.step, tokens=b"", prompt_logprobs=prompt_logprobs, forward_ms=forward_ms
            )
        tokens, logprobs, bad = self._choose(logits, rows)
        return StepResult(
            step=plan.step,
            tokens=tokens.tobytes(),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            bad=tuple(bad),
            forward_ms=forward_ms,
            bad_reasons=tuple(bad.values()),
        )

    def _forward(
        self, input_ids: Tensor, batch: ForwardBatch, rows: StepRows
    ) -> tuple[Tensor | None, dict[int, list[TokenLogprobs]]]:
        """Logits of the sampled rows, None if there are none, and log-probs of prompts."""
        asking = np.flatnonzero(rows.flags & PROMPT_LOGPROBS)
        if len(asking) == 0:
            logits = self._model.forward(input_ids, batch)
            return (logits if len(rows.sampled) else None), {}
        hidden = self._model.hidden(input_ids, batch)
        found = {}
        for row in asking.tolist():
            first = int(batch.q_indptr[row])
            found[row] = self._prompt_logprobs(hidden[first:], rows, row)
        if len(rows.sampled) == 0:
            return None, found
        return self._model.logits(hidden[batch.sample_rows.long()]), found

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
            broken = _not_finite(logits)
            if broken:
                self._slots.poison(slot)
                logits[broken] = 0.0
            results += token_logprobs(logits, part, [asked.want] * len(part))
        return results

    def _choose(
        self, logits: Tensor, rows: StepRows
    ) -> tuple[Ints, dict[int, TokenLogprobs], dict[int, str]]:
        """Tokens i32[S], log-probs and reasons of bad rows, by index into the tokens."""
        slots = self._slots
        chosen = rows.slots[rows.sampled]
        positions = rows.ends[rows.sampled].astype(np.int64)
        bad = dict.fromkeys(_not_finite(logits), NOT_FINITE)
        special = slots.special[chosen]
        if bad or special.any():
            return self._choose_slowly(logits, chosen, positions, bad)
        tokens = self._sample(logits, slots.settings(chosen, positions)).numpy()
        slots.sampled(chosen, tokens)
        return tokens, {}, bad

    def _choose_slowly(
        self, logits: Tensor, chosen: Ints, positions: NDArray[np.int64], bad: dict[int, str]
    ) -> tuple[Ints, dict[int, TokenLogprobs], dict[int, str]]:
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
            if rule.history is not None and index not in bad:
                rule.history.append(int(tokens[index]))
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
        process(logits, ruled, rules, num_output)
        # NaN and both infinities fail: a bias may overflow as well as leave nothing.
        best = torch.amax(logits, dim=1).tolist()
        for index in ruled:
            if not isfinite(best[index]):
                bad[index] = NO_TOKEN
                logits[index] = 0.0


def _not_finite(logits: Tensor) -> list[int]:
    """Rows of f32[n, V] with a value that is not finite.

    A sum is many times cheaper than a test of each value and misses none; as a sum of finite values
    may overflow, rows that look wrong are looked at again.
    """
    suspects = np.flatnonzero(~np.isfinite(logits.sum(dim=1).numpy())).tolist()
    return [row for row in suspects if not bool(torch.isfinite(logits[row]).all())]
