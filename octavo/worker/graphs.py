"""How a batch goes through the model: call by call, or replayed from a captured graph.

Steps of few tokens are many small kernels, which a host cannot launch as fast as a GPU runs them.
A graph holds the launches of one size; a smaller step is filled up with idle rows and tokens,
which write to a block that nobody owns. A decode step is captured from ids to sampled tokens; if a
row asks for more than that, all are drawn anew from its logits. A step with prompts is captured up
to the last norm. Steps of many prompt tokens keep the GPU busy and go call by call.
Not for: inputs (`staged.py`), whose addresses a
graph keeps. Next file: `worker.py`.
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
from octavo.types import POOL, PROMPT_LOGPROBS
from octavo.worker.buffers import StepRows, StepSize
from octavo.worker.choose import Drawn
from octavo.worker.runner import Model
from octavo.worker.staged import StagedInputs


class Eager:
    """Call by call; see `Forward`."""

    def __init__(self, model: Model, attention: AttentionBackend) -> None:
        self._model = model
        self._attention = attention

    def size(self, rows: StepRows) -> StepSize:
        """The plan's own."""
        return StepSize(len(rows.slots), rows.num_tokens)

    def logits(self, input_ids: Tensor, batch: ForwardBatch, rows: StepRows) -> Tensor | None:
        """See `Forward`."""
        batch = replace(batch, attn=self._attention.plan(batch))
        if len(rows.sampled) == 0:
            # One token, as none cannot be asked for.
            self._model.hidden(input_ids, batch, batch.q_indptr[:1])
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


Captured = tuple[Callable[[], None], Tensor]  # replay, and what then holds the result
MIXED_ROWS = 64  # of a captured step with prompts; one at least is idle
LONG_CONTEXT = 2048  # of a decode row, from which it should be split


class Graphs:
    """Replays decode steps and small steps with prompts, hands others to `Eager`; see `Forward`."""

    def __init__(
        self,
        model: Model,
        attention: CapturableAttention,
        eager: Eager,
        inputs: StagedInputs,
        device: Device,
        draw: Callable[[Tensor], Tensor],
    ) -> None:
        """`draw` samples the first rows of a step from logits f32[n, V], all on the device."""
        self._draw = draw
        self._model = model
        self._attention = attention
        self._eager = eager
        self._inputs = inputs
        self._device = device
        self._rows: list[int] = []  # of decode steps
        self._tokens: list[int] = []  # of steps with prompts
        self._decode: dict[tuple[int, str], Captured] = {}
        self._mixed: dict[int, Captured] = {}
        self._mixed_rows = 0

    @torch.inference_mode()
    def capture(self, rows: list[int], tokens: list[int]) -> int:
        """Captures decode steps of so many rows in each form, and others of so many tokens.

        The largest first: smaller ones then fit into the memory that it took. Returns the number
        of graphs.
        """
        self._attention.reserve(max(rows))
        self._mixed_rows = min(max(rows), MIXED_ROWS)
        for count in sorted(tokens, reverse=True):
            idle = self._inputs.idle(StepSize(self._mixed_rows, count), decode=False)
            self._mixed[count] = self._capture(*idle, None, draw=False)
        for count in sorted(rows, reverse=True):
            idle = self._inputs.idle(StepSize(count, count), decode=True)
            for form in self._attention.forms:
                self._decode[count, form] = self._capture(*idle, form, draw=True)
        self._rows, self._tokens = sorted(rows), sorted(tokens)
        return len(self._decode) + len(self._mixed)

    @torch.inference_mode()
    def rehearse(self, rows: list[int], tokens: list[int]) -> None:
        """Does once, without capturing, what steps of so many decode rows, or tokens, do."""
        self._attention.reserve(max(rows))
        for count in tokens:
            idle = self._inputs.idle(StepSize(min(max(rows), MIXED_ROWS), count), decode=False)
            self._work(*idle, None, draw=False)
        for count in rows:
            idle = self._inputs.idle(StepSize(count, count), decode=True)
            for form in self._attention.forms:
                self._work(*idle, form, draw=True)

    def size(self, rows: StepRows) -> StepSize:
        """The next size that is captured, or the plan's own if the step is not replayed."""
        number = len(rows.slots)
        match self._kind(rows):
            case "decode":
                number = self._rows[bisect_left(self._rows, number)]
                return StepSize(number, number)
            case "mixed":
                tokens = self._tokens[bisect_left(self._tokens, rows.num_tokens)]
                return StepSize(self._mixed_rows, tokens)
            case _:
                return StepSize(number, rows.num_tokens)

    def logits(
        self, input_ids: Tensor, batch: ForwardBatch, rows: StepRows
    ) -> Tensor | Drawn | None:
        """See `Forward`."""
        number = len(rows.slots)
        match self._kind(rows):
            case "decode":
                lens = batch.kv_lens_host
                assert lens is not None
                form = self._attention.choose(lens[:number])
                replay, found = self._decode[batch.num_rows, form]
            case "mixed":
                replay, found = self._mixed[batch.num_tokens]
            case _:
                return self._eager.logits(input_ids, batch, rows)
        replay()
        if len(rows.sampled) == 0:
            return None
        if rows.longest > 1:
            return self._model.logits(found[: len(rows.sampled)])
        if len(rows.sampled) == number:
            return Drawn(found[:number])
        return found.index_select(0, batch.sample_rows)

    def hidden(self, input_ids: Tensor, batch: ForwardBatch) -> Tensor:
        """See `Forward`."""
        return self._eager.hidden(input_ids, batch)

    def _kind(self, rows: StepRows) -> str:
        """Which graphs serve a plan, if any."""
        number = len(rows.slots)
        if not self._rows or (rows.flags & (PROMPT_LOGPROBS | POOL)).any():
            return "eager"
        if rows.longest == 1:
            return "decode" if number <= self._rows[-1] else "eager"
        if not self._tokens or rows.num_tokens > self._tokens[-1] or number >= self._mixed_rows:
            return "eager"
        # In these graphs decode rows are served as prompts of one token are: not split.
        long = rows.ends[rows.lengths == 1]
        return "eager" if len(long) and int(long.max()) > LONG_CONTEXT else "mixed"

    def _capture(
        self, ids: Tensor, batch: ForwardBatch, form: str | None, *, draw: bool
    ) -> Captured:
        # The step has been rehearsed: no kernel of it is loaded only now.
        return self._device.record(lambda: self._work(ids, batch, form, draw=draw))

    def _work(self, ids: Tensor, batch: ForwardBatch, form: str | None, *, draw: bool) -> Tensor:
        """Logits if tokens are drawn, else hidden states of the first sampled rows."""
        batch = replace(batch, attn=self._attention.plan(batch, form))
        if not draw:
            return self._model.hidden(ids, batch, batch.sample_rows)
        hidden = self._model.hidden(ids, batch)
        logits = self._model.logits(hidden)
        self._draw(logits)
        return logits


# Sizes between which others are no faster: those of the library's tiles. Of an 8B model on an H200
# a step of 448 rows takes a third longer than one of 456, and 448 tokens 30 % longer than 480.
_ROWS = (
    *(1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 200, 216, 256),
    *(296, 328, 368, 408, 432, 456, 480, 512),
)
_TOKENS = (64, 128, 192, 256, 320, 368, 432, 480, 512, 536, 568, 608, 640, 672, 800, 864, 928, 1024)


def ladder(largest: int) -> list[int]:
    """Batch sizes to capture up to `largest`, in steps of an eighth to a quarter."""
    sizes = {*_ROWS, *range(_ROWS[-1], largest, 64), largest}
    return sorted(size for size in sizes if size <= largest)


def token_ladder(largest: int) -> list[int]:
    """Tokens of steps with prompts to capture, within `largest` and what graphs are worth.

    The steps are small because idle tokens cost what others do. 536 and 568 are for a prompt of
    512 tokens, a size that people like, with decode rows beside it.
    """
    return [size for size in _TOKENS if size <= largest]
