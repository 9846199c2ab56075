"""What a runner is made of on a device: cache, slots, inputs, chooser, and the way forward.

The one place that asks whether a device works while the host goes on. Not for: how large the cache
is (`memory.py`). Next file: `worker.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config import WorkerConfig
from octavo.device.base import Device
from octavo.grammar.matcher import Grammars
from octavo.kernels.slots import slot_ops
from octavo.parallel.mesh import Mesh
from octavo.worker.assemble import Choices
from octavo.worker.buffers import HostInputs
from octavo.worker.cache import allocate_cache
from octavo.worker.choose import HostChooser, NoChooser
from octavo.worker.graphs import CapturableAttention, Eager, Graphs, ladder, token_ladder
from octavo.worker.runner import Model, Runner
from octavo.worker.slots import HostSlots, SlotTable
from octavo.worker.staged import Limits, StagedInputs
from octavo.worker.staged_choose import StagedChooser


@dataclass(frozen=True, slots=True)
class Parts:
    """A runner, and graphs that are still to be captured."""

    runner: Runner
    limits: Limits
    graphs: Graphs | None
    note: str  # why there are no graphs, or how many can be

    def rehearse(self) -> None:
        """Does once what the steps do that `capture` captures."""
        if self.graphs is not None:
            self.graphs.rehearse(*self._sizes())

    def _sizes(self) -> tuple[list[int], list[int]]:
        """Rows of decode steps, and tokens of others."""
        limits = self.limits
        # An idle row of a whole step's tokens must have a place in the block table.
        longest = min(limits.max_tokens, limits.max_length)
        return ladder(limits.max_rows), token_ladder(longest)

    def capture(self) -> str:
        """Captures graphs of steps within the limits; a line that says so."""
        if self.graphs is None:
            return self.note
        rows, tokens = self._sizes()
        count = self.graphs.capture(rows, tokens)
        more = f", and with prompts of up to {tokens[-1]} tokens" if tokens else ""
        return f"graphs: {count}, of decode steps of up to {rows[-1]} rows{more}"


def make_parts(
    model: Model,
    choices: Choices,
    config: WorkerConfig,
    device: Device,
    *,
    num_blocks: int,
    max_model_len: int,
    mesh: Mesh | None = None,
    grammars: Grammars | None = None,
) -> Parts:
    """Takes the cache and all memory that steps are given by."""
    mesh = mesh or Mesh.single()
    make = _staged if device.asynchronous else _on_host
    limits = Limits(
        max_tokens=config.max_num_batched_tokens,
        max_rows=config.max_num_seqs,
        max_blocks=-(-max_model_len // choices.need.block_size),
        max_length=max_model_len,
        num_slots=config.max_num_seqs,
    )
    return make(model, choices, config, device, num_blocks, limits, mesh, grammars)


def _on_host(
    model: Model,
    choices: Choices,
    _: WorkerConfig,
    device: Device,
    num_blocks: int,
    limits: Limits,
    mesh: Mesh,
    grammars: Grammars | None,
) -> Parts:
    block_size = choices.need.block_size
    kv = allocate_cache(
        choices.attention.layout(choices.need, num_blocks),
        num_layers=len(mesh.pp.stretch(choices.spec.num_layers)),
        block_size=block_size,
        device=device,
    )
    slots = HostSlots(
        num_slots=limits.num_slots,
        max_blocks=limits.max_blocks,
        vocab_size=choices.spec.vocab_size,
        grammars=grammars,
        draws=mesh.samples,
    )
    runner = Runner(
        model=model,
        forward=Eager(model, choices.attention),
        slots=slots,
        inputs=HostInputs(
            slots,
            kv,
            max_tokens=limits.max_tokens,
            max_rows=limits.max_rows,
            max_blocks=limits.max_blocks,
        ),
        chooser=HostChooser(choices.ops.sample, slots) if mesh.samples else NoChooser(),
        last_stage=mesh.pp.last,
    )
    return Parts(runner, limits, None, "")


def _staged(
    model: Model,
    choices: Choices,
    config: WorkerConfig,
    device: Device,
    num_blocks: int,
    limits: Limits,
    mesh: Mesh,
    grammars: Grammars | None,
) -> Parts:
    kv = allocate_cache(
        choices.attention.layout(choices.need, num_blocks + 1),  # one for idle rows
        num_layers=len(mesh.pp.stretch(choices.spec.num_layers)),
        block_size=choices.need.block_size,
        device=device,
    )
    ops = slot_ops(device.name)
    inputs = StagedInputs(device, ops, kv, limits)
    slots = SlotTable(
        num_slots=limits.num_slots,
        vocab_size=choices.spec.vocab_size,
        grammars=grammars,
        draws=mesh.samples,
    )
    chooser = StagedChooser(
        choices.ops.sample,
        device=device,
        ops=ops,
        inputs=inputs,
        slots=slots,
        sample_checked=choices.ops.sample_checked,
    )
    eager = Eager(model, choices.attention)
    graphs: Graphs | None = None
    note = "graphs: none, as asked"
    if isinstance(choices.attention, CapturableAttention):
        choices.attention.reserve(limits.max_rows)
        if not config.enforce_eager and mesh.pp.size == 1:
            graphs = Graphs(model, choices.attention, eager, inputs, device, chooser.draw)
    elif not config.enforce_eager:
        note = f"graphs: none, {choices.attention.name} attention cannot be captured"
    runner = Runner(
        model=model,
        forward=graphs or eager,
        slots=slots,
        inputs=inputs,
        chooser=chooser if mesh.samples else NoChooser(),
        last_stage=mesh.pp.last,
    )
    return Parts(runner, limits, graphs, note)
