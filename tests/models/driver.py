"""Drives a Decoder the way the worker does, from plain Python: pages, chunks, shared prefixes.

The cache starts as NaN, and pages are handed out in random order, so a cell that is read before it
was written, or out of place, shows in the logits.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from octavo.attention.base import AttentionBackend, AttentionNeed
from octavo.attention.mla_sdpa import LatentSdpaAttention
from octavo.attention.native import NativeAttention
from octavo.attention.sdpa import SdpaAttention
from octavo.forward import ForwardBatch, KVCache
from octavo.kernels.cpu.binding import Library
from octavo.kernels.cpu.binding import load as load_library
from octavo.kernels.cpu.native import NativeOps
from octavo.kernels.cpu.onednn import onednn_ops
from octavo.kernels.ops import Ops
from octavo.kernels.reference import reference_ops
from octavo.layers.build import Build
from octavo.models.decoder import Decoder
from octavo.models.fused import FusedDecoder, fuse
from octavo.models.load import attention_need, build_model
from octavo.models.registry import family_of
from octavo.models.spec import ModelSpec
from octavo.parallel.mesh import Mesh
from octavo.quant.none import Unquantized
from octavo.weights.spec import ParamSpec

NUM_BLOCKS = 500
KERNELS = ("reference", "onednn", "native", "fused")


@dataclass
class Row:
    """A sequence: its tokens, how many are computed, and its pages."""

    tokens: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)


class Driver:
    """A decoder with a cache of its own."""

    def __init__(
        self, model: Decoder | FusedDecoder, build: Build, *, num_blocks: int, seed: int
    ) -> None:
        layout = build.attention.layout(build.need, num_blocks)
        layers = model.spec.num_layers

        def pages(shape: tuple[int, ...]) -> tuple[Tensor, ...]:
            empty = torch.full(shape, torch.nan, dtype=torch.float32, device=build.device)
            return tuple(empty.to(layout.dtype, copy=True) for _ in range(layers))

        self.model = model
        self.device = build.device
        self.attention = build.attention
        self.block_size = build.need.block_size
        self.kv = KVCache(pages(layout.key), pages(layout.value), self.block_size)
        self.random = random.Random(seed)
        self.free = list(range(num_blocks))
        self.random.shuffle(self.free)

    def step(self, work: Sequence[tuple[Row, int]], *, every: bool = False) -> list[Tensor]:
        """Computes the next n tokens of each row; logits [1, V] of each row's last token.

        With `every`, [n, V] of all its tokens. The results stand in the order of `work`.
        """
        decodes = [item for item in work if self._decodes(*item)]
        prefills = [item for item in work if not self._decodes(*item)]
        batch, ids = self._batch(decodes, prefills, every)
        logits = self.model.forward(ids, batch)
        parts = iter(logits.split([n if every else 1 for _, n in decodes + prefills]))
        found = {id(row): next(parts) for row, _ in decodes + prefills}
        for row, n in work:
            row.computed += n
        return [found[id(row)] for row, _ in work]

    def run(self, row: Row, *, chunk: int = 0) -> Tensor:
        """Logits [n, V] of all tokens not yet computed, in random chunks of at most `chunk`."""
        parts = []
        while row.computed < len(row.tokens):
            left = len(row.tokens) - row.computed
            size = min(left, self.random.randint(1, chunk)) if chunk else left
            parts += self.step([(row, size)], every=True)
        return torch.cat(parts)

    def greedy(self, rows: Sequence[Row], count: int, *, budget: int = 10**9) -> list[list[int]]:
        """`count` greedy tokens of each row, all rows in one batch, `budget` tokens a step.

        Rows enter at random steps; prompts are cut where the budget ends, and decode rows stand
        beside them.
        """
        waiting, running = list(rows), []
        out: dict[int, list[int]] = {id(row): [] for row in rows}
        while waiting or running:
            while waiting and (not running or self.random.random() < 0.5):
                running.append(waiting.pop(0))
            work, left = [], budget
            for row in running:
                size = min(left, len(row.tokens) - row.computed)
                if size > 0:
                    work.append((row, size))
                    left -= size
            for (row, _), logits in zip(work, self.step(work), strict=True):
                if row.computed == len(row.tokens):
                    token = int(logits[-1].argmax())
                    row.tokens.append(token)
                    out[id(row)].append(token)
            running = [row for row in running if len(out[id(row)]) < count]
        return [out[id(row)] for row in rows]

    def share(self, source: Row, tokens: list[int]) -> Row:
        """A row whose first whole pages are `source`'s: the two must begin alike."""
        same = 0
        limit = min(source.computed, len(tokens) - 1)
        while same < limit and tokens[same] == source.tokens[same]:
            same += 1
        pages = same // self.block_size
        return Row(tokens, pages * self.block_size, source.blocks[:pages])

    def _decodes(self, row: Row, size: int) -> bool:
        return size == 1 and row.computed > 0

    def _batch(
        self, decodes: list[tuple[Row, int]], prefills: list[tuple[Row, int]], every: bool
    ) -> tuple[ForwardBatch, Tensor]:
        size = self.block_size
        ids, positions, slots, indptr, lens, sampled = [], [], [], [0], [], []
        work = decodes + prefills
        for row, n in work:
            stop = row.computed + n
            while len(row.blocks) * size < stop:
                row.blocks.append(self.free.pop())
            span = range(row.computed, stop)
            ids += row.tokens[row.computed : stop]
            positions += span
            slots += [row.blocks[p // size] * size + p % size for p in span]
            indptr.append(len(ids))
            lens.append(stop)
            sampled += range(indptr[-2], indptr[-1]) if every else [indptr[-1] - 1]
        width = max(len(row.blocks) for row, _ in work) + 1
        table = [row.blocks + [0] * (width - len(row.blocks)) for row, _ in work]
        here = functools.partial(torch.tensor, dtype=torch.int32, device=self.device)
        batch = ForwardBatch(
            num_rows=len(work),
            num_tokens=len(ids),
            num_decodes=len(decodes),
            positions=here(positions),
            slot_map=here(slots),
            q_indptr=here(indptr),
            kv_lens=here(lens),
            block_table=here(table),
            sample_rows=here(sampled),
            max_q=max(n for _, n in work),
            max_kv=max(lens),
            kv=self.kv,
        )
        return replace(batch, attn=self.attention.plan(batch)), here(ids)


def i32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@functools.cache
def native_library() -> Library | str:
    """One for all tests; one thread, since threads are tested with the kernels."""
    return load_library(threads=1)


def parts_of(kernels: str, need: AttentionNeed) -> tuple[Ops, AttentionBackend]:
    """The kernels of that name ("fused" are native ones); skips the test if they cannot be had."""
    plain: AttentionBackend = LatentSdpaAttention() if need.latent else SdpaAttention()
    if kernels == "reference":
        return reference_ops(need.dtype), plain
    if kernels == "triton":
        return triton_parts(need)
    if kernels == "onednn":
        table = onednn_ops(need.dtype)
        if isinstance(table, str):
            pytest.skip(f"no oneDNN kernels: {table}")
        return table, plain
    library = native_library()
    if isinstance(library, str):
        pytest.skip(f"no native kernels: {library}")
    if library.refuse(need.dtype):
        pytest.skip(library.refuse(need.dtype))
    native = NativeAttention(library)
    attention = plain if need.latent or native.supports(need) else native
    return NativeOps(library, need.dtype).table("for tests"), attention


def triton_parts(need: AttentionNeed) -> tuple[Ops, AttentionBackend]:
    """What serves a model on a GPU; under Triton's interpreter the same kernels on the CPU."""
    from octavo.attention.select import select
    from octavo.kernels.gpu import table_of, triton_ops

    attention, notes = select(need)
    if need.device == "cpu":
        attention, notes = select(need, "mla_triton" if need.latent else "triton")
    print(notes)
    if need.device == "cpu":
        return table_of(need.dtype, (8, 0)), attention
    ops = triton_ops(need.dtype, torch.device(need.device))
    assert isinstance(ops, Ops), ops
    return ops, attention


def start(
    spec: ModelSpec,
    state: dict[str, Tensor],
    kernels: str = "reference",
    *,
    seed: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    cache_dtype: torch.dtype | None = None,
) -> Driver:
    """A driver over the kernels of that name: reference, onednn, native, fused, or triton."""
    need = attention_need(
        spec,
        mesh=Mesh.single(),
        device=device,
        block_size=block_size,
        dtype=dtype,
        cache_dtype=cache_dtype,
    )
    ops, attention = parts_of(kernels, need)
    build = make_build(spec, dtype=dtype, block_size=block_size, ops=ops, attention=attention)
    build = replace(build, device=device, need=need)
    decoder = fill(build_model(spec, build), state, device)
    if kernels != "fused":
        return Driver(decoder, build, num_blocks=NUM_BLOCKS, seed=seed)
    fused = fuse(decoder, ops)
    if isinstance(fused, str):
        pytest.skip(f"cannot be fused: {fused}")
    return Driver(fused, build, num_blocks=NUM_BLOCKS, seed=seed)


def make_build(
    spec: ModelSpec,
    *,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    ops: Ops | None = None,
    attention: AttentionBackend | None = None,
    mesh: Mesh | None = None,
) -> Build:
    """A build on the CPU, of the reference parts unless others are given."""
    mesh = mesh or Mesh.single()
    ops = ops or reference_ops(dtype)
    need = attention_need(spec, mesh=mesh, device="cpu", block_size=block_size, dtype=dtype)
    return Build(
        mesh=mesh,
        device="cpu",
        dtype=dtype,
        ops=ops,
        quant=Unquantized(ops, dtype),
        attention=attention or (LatentSdpaAttention() if need.latent else SdpaAttention()),
        need=need,
    )


def fill(decoder: Decoder, state: dict[str, Tensor], device: str = "cpu") -> Decoder:
    """Sets every parameter from checkpoint tensors by name, and finishes the decoder."""
    names = family_of(decoder.spec.architecture).names
    for layer_name, layer in decoder.named_layers():
        for name, spec in layer.param_specs().items():
            parts = [
                cut(state[names(f"{layer_name}.{name}", part.name)], spec, index)
                for index, part in enumerate(spec.parts)
            ]
            tensor = torch.cat(parts, dim=spec.out_dim or 0)
            layer.set_param(name, tensor.to(device, spec.dtype))
    decoder.finish()
    return decoder


def cut(tensor: Tensor, spec: ParamSpec, index: int) -> Tensor:
    """This rank's slice of one checkpoint tensor."""
    part = spec.parts[index]
    if spec.out_dim is not None:
        assert tensor.shape[spec.out_dim] == part.full
        tensor = tensor.narrow(spec.out_dim, part.start, part.size)
    if spec.in_dim is not None:
        assert tensor.shape[spec.in_dim] == spec.in_full
        tensor = tensor.narrow(spec.in_dim, spec.in_start, spec.shape[spec.in_dim])
    return tensor


def make_driver(spec: ModelSpec, state: dict[str, Tensor], build: Build, *, seed: int) -> Driver:
    """A filled decoder with its cache."""
    return Driver(fill(build_model(spec, build), state), build, num_blocks=NUM_BLOCKS, seed=seed)
