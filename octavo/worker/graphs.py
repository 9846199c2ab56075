"""How a batch goes through the model: call by call, or replayed from a captured graph.

Decode steps of few rows are many small kernels, which a host cannot launch as fast as a GPU runs
them. A graph holds the launches of one batch size; a step of fewer rows is filled up with idle
ones, which write to a block that nobody owns. Captured is all from ids to the last norm; the head
follows outside, for the plan's own rows alone, so that no graph keeps logits. Steps with prompts
go call by call. Not for: inputs (`staged.py`), whose addresses a graph keeps.
Next file: `worker.py`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.attention.base import AttentionBackend
from octavo.device.base import Device
from octavo.forward import ForwardBatch
from octavo.types import PROMPT_LOGPROBS
from octavo.worker.buffers import StepRows
from octavo.worker.runner import Model
from octavo.worker.staged import StagedInputs


class Eager:
    """Call by call; see `Forward`."""

    def __init__(self, model: Model, attention: AttentionBackend) -> None:
        self._model = model
        self._attention = attention

    def size(self, rows: StepRows) -> int:
        """The plan's own rows."""
        return len(rows.slots)

    def logits(self, input_ids: Tensor, batch: ForwardBatch, rows: StepRows) -> Tensor | None:
        """See `Forward`."""
        batch = replace(batch, attn=self._attention.plan(batch))
        if len(rows.sampled) == 0:
            self._model.hidden(input_ids, batch)
            return None
        return self._model.forward(input_ids, batch)

    def hidden(self, input_ids: Tensor, batch: ForwardBatch) -> Tensor:
        """See `Forward`."""
        return self._model.hidden(input_ids, replace(batch, attn=self._attention.plan(batch)))


@runtime_checkable
class CapturableAttention(Protocol):
    """An AttentionBackend whose plan and forward can be captured, for each of its forms."""

    forms: tuple[str, ...]  # of a decode step

    def reserve(self, max_rows: int) -> None:
        """Takes all memory that plans of up to `max_rows` rows need; before any capture."""

    def choose(self, lens: NDArray[np.int32]) -> str:
        """The form for decode rows that attend to `lens` i32[R] positions."""

    def plan(self, batch: ForwardBatch, form: str | None = None) -> object:
        """As AttentionBackend's, in a given form; reads lengths on the device alone."""


Replay = Callable[[], None]


class DecodeGraphs:
    """Replays decode steps, and hands all others to `Eager`; see `Forward`."""

    def __init__(
        self,
        model: Model,
        attention: CapturableAttention,
        eager: Eager,
        inputs: StagedInputs,
        device: Device,
    ) -> None:
        self._model = model
        self._attention = attention
        self._eager = eager
        self._inputs = inputs
        self._device = device
        self._sizes: list[int] = []
        self._graphs: dict[tuple[int, str], tuple[Replay, Tensor]] = {}

    @torch.inference_mode()
    def capture(self, sizes: list[int]) -> int:
        """Captures a graph for each size and form, the largest first; how many there are.

        Smaller ones then fit into the memory that the largest took.
        """
        self._attention.reserve(max(sizes))
        for size in sorted(sizes, reverse=True):
            ids, batch = self._inputs.idle(size)
            for form in self._attention.forms:
                self._graphs[size, form] = self._capture(ids, batch, form)
        self._sizes = sorted(sizes)
        return len(self._graphs)

    def size(self, rows: StepRows) -> int:
        """The next size that is captured, or the plan's own rows if the step is not replayed."""
        number = len(rows.slots)
        return self._sizes[bisect_left(self._sizes, number)] if self._replayed(rows) else number

    def logits(self, input_ids: Tensor, batch: ForwardBatch, rows: StepRows) -> Tensor | None:
        """See `Forward`."""
        if not self._replayed(rows):
            return self._eager.logits(input_ids, batch, rows)
        number = len(rows.slots)
        lens = batch.kv_lens_host
        assert lens is not None
        replay, hidden = self._graphs[batch.num_rows, self._attention.choose(lens[:number])]
        replay()
        if len(rows.sampled) == 0:
            return None
        if len(rows.sampled) == number:
            return self._model.logits(hidden[:number])
        return self._model.logits(hidden.index_select(0, batch.sample_rows))

    def hidden(self, input_ids: Tensor, batch: ForwardBatch) -> Tensor:
        """See `Forward`."""
        return self._eager.hidden(input_ids, batch)

    def _replayed(self, rows: StepRows) -> bool:
        return (
            rows.longest == 1
            and len(self._sizes) > 0
            and len(rows.slots) <= self._sizes[-1]
            and not (rows.flags & PROMPT_LOGPROBS).any()
        )

    def _capture(self, ids: Tensor, batch: ForwardBatch, form: str) -> tuple[Replay, Tensor]:
        def work() -> Tensor:
            return self._model.hidden(ids, replace(batch, attn=self._attention.plan(batch, form)))

        work()
        return self._device.record(work)


def ladder(largest: int) -> list[int]:
    """Batch sizes to capture up to `largest`, in steps of an eighth to a quarter."""
    sizes = {1, 2, 4, largest}
    for low, high, step in ((8, 64, 8), (64, 256, 16), (256, 512, 32), (512, largest, 64)):
        sizes.update(range(low, high + 1, step))
    return sorted(size for size in sizes if size <= largest)
