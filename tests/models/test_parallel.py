"""Tensor parallelism over two ranks: slices that sum and concatenate to the whole."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from torch import Tensor, distributed

from octavo.layers import embedding, experts, linear
from octavo.layers.embedding import Head, VocabEmbedding
from octavo.layers.linear import QKV, Column, GateUp, Linear, Replicated, Row, share_kv_heads
from octavo.layers.parameters import Layer
from octavo.models.registry import read_spec
from octavo.parallel.collectives import all_gather, all_reduce
from octavo.parallel.mesh import Axis, Mesh
from tests.models.driver import Driver, cut, make_build, make_driver
from tests.models.driver import Row as Sequence
from tests.models.twins import make_twin

TIMEOUT = 60.0


class Ranks:
    """Two ranks as threads that meet at each collective."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=TIMEOUT)
        self.values: list[Tensor] = [torch.empty(0)] * size

    def exchange(self, x: Tensor, rank: int) -> list[Tensor]:
        self.values[rank] = x.clone()
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values

    def run(self, work: Callable[[int], Tensor]) -> list[Tensor]:
        """work(rank) on every rank at once."""
        results: list[Tensor] = [torch.empty(0)] * self.size
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


@contextmanager
def ranks_of(size: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    ranks = Ranks(size)

    def all_reduce(x: Tensor, axis: Axis) -> Tensor:
        return torch.stack(ranks.exchange(x, axis.rank)).sum(0) if axis.size > 1 else x

    def all_gather(x: Tensor, axis: Axis) -> Tensor:
        return torch.cat(ranks.exchange(x, axis.rank), dim=-1) if axis.size > 1 else x

    for module in (linear, embedding, experts):
        monkeypatch.setattr(module, "all_reduce", all_reduce)
    monkeypatch.setattr(embedding, "all_gather", all_gather)
    yield ranks


def set_all(layer: Layer, whole: dict[str, dict[str, Tensor]]) -> None:
    """Fills a layer from whole tensors, by parameter and part."""
    for name, spec in layer.param_specs().items():
        parts = [cut(whole[name][part.name], spec, i) for i, part in enumerate(spec.parts)]
        layer.set_param(name, torch.cat(parts, dim=spec.out_dim or 0))
    layer.finish()


def whole_tensors(layer: Layer) -> dict[str, dict[str, Tensor]]:
    """Random checkpoint tensors for a layer."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, spec in layer.param_specs().items():
        found[name] = {}
        for part in spec.parts:
            shape = list(spec.shape)
            shape[0] = part.full
            if spec.in_dim is not None:
                shape[spec.in_dim] = spec.in_full
            found[name][part.name] = torch.randn(shape)
    return found


def builds(size: int) -> list:
    spec = replace(read_spec(make_twin("llama").config), num_kv_heads=4)
    return [make_build(spec, mesh=Mesh(tp=Axis(rank, size))) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [Replicated, Column, Row])
def test_columns_concatenate_and_rows_sum(
    kind: type[Replicated | Column | Row], bias: bool, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = kind(builds(1)[0], 24, 32, bias=bias)
    whole = whole_tensors(one)
    set_all(one, whole)
    x = torch.randn(5, 24)
    parts: list[Linear] = [kind(build, 24, 32, bias=bias) for build in builds(size)]
    for part in parts:
        set_all(part, whole)
    inputs = x.chunk(size, dim=1) if kind is Row else [x] * size
    with ranks_of(size, monkeypatch) as ranks:
        found = ranks.run(lambda rank: parts[rank](inputs[rank]))
    if kind is Column:
        found = [torch.cat(found, dim=1)]
    for y in found:
        torch.testing.assert_close(y, one(x))


def test_qkv_and_gate_up_cut_each_part() -> None:
    alone, *_ = builds(1)
    x = torch.randn(3, 24)
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "bias": True}
    one = QKV(alone, 24, **sizes)
    whole = whole_tensors(one)
    set_all(one, whole)
    halves = [QKV(build, 24, **sizes) for build in builds(2)]
    for half in halves:
        set_all(half, whole)
    found = zip(*(half.split(half(x)) for half in halves), strict=True)
    for parts, expected in zip(found, one.split(one(x)), strict=True):
        torch.testing.assert_close(torch.cat(parts, dim=1), expected)

    one = QKV(alone, 24, **sizes, joined=True)
    whole = whole_tensors(one)
    joined = torch.randn(48, 24), torch.randn(48)
    whole["weight"] = dict.fromkeys("qkv", joined[0])
    whole["bias"] = dict.fromkeys("qkv", joined[1])
    set_all(one, whole)
    torch.testing.assert_close(one(x), x @ joined[0].T + joined[1])
    halves = [QKV(build, 24, **sizes, joined=True) for build in builds(2)]
    for half in halves:
        set_all(half, whole)
    found = zip(*(half.split(half(x)) for half in halves), strict=True)
    for parts, expected in zip(found, one.split(one(x)), strict=True):
        torch.testing.assert_close(torch.cat(parts, dim=1), expected)

    gate_up = GateUp(alone, 24, 10, bias=False)
    whole = whole_tensors(gate_up)
    set_all(gate_up, whole)
    pairs = [GateUp(build, 24, 10, bias=False) for build in builds(2)]
    for pair in pairs:
        set_all(pair, whole)
    gates, ups = zip(*(pair(x).chunk(2, dim=1) for pair in pairs), strict=True)
    torch.testing.assert_close(torch.cat((*gates, *ups), dim=1), gate_up(x))


def test_key_value_heads_are_copied_when_ranks_outnumber_them() -> None:
    assert [share_kv_heads(2, Axis(rank, 4)) for rank in range(4)] == [
        (0, 1),
        (0, 1),
        (1, 1),
        (1, 1),
    ]
    assert [share_kv_heads(4, Axis(rank, 2)) for rank in range(2)] == [(0, 2), (2, 2)]
    with pytest.raises(ValueError, match="evenly"):
        share_kv_heads(2, Axis(0, 3))
    with pytest.raises(ValueError, match="divided"):
        share_kv_heads(3, Axis(0, 2))


@pytest.mark.parametrize("size", [2, 3])
def test_vocabulary_is_padded_and_its_padding_hidden(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab, hidden = 2 * size + 5, 8
    meshes = [make_build(read_spec(make_twin("llama-all-kv-heads").config))]
    meshes += [replace(meshes[0], mesh=Mesh(tp=Axis(rank, size))) for rank in range(size)]
    pairs = [
        (embed, Head(build, vocab, hidden, tied=embed if tied else None))
        for tied in (False, True)
        for build in meshes
        for embed in [VocabEmbedding(build, vocab, hidden)]
    ]
    ids = torch.arange(vocab, dtype=torch.int32)
    x = torch.randn(4, hidden)
    whole = {"weight": {"": torch.randn(vocab, hidden)}}
    for embed, head in pairs:
        set_all(embed, whole)
        set_all(head, whole)
    for start in (0, size + 1):
        group = pairs[start + 1 : start + 1 + size]
        with ranks_of(size, monkeypatch) as ranks:
            vectors = ranks.run(lambda rank, group=group: group[rank][0](ids))
            logits = ranks.run(lambda rank, group=group: group[rank][1](x))
        for found in vectors:
            assert torch.equal(found, whole["weight"][""])
        for found in logits:
            assert found.shape == (4, vocab)
            torch.testing.assert_close(found, x @ whole["weight"][""].T)


@pytest.mark.parametrize(
    ("case", "size"),
    [
        ("llama", 2),
        ("llama-one-kv-head", 2),
        ("llama-biases", 2),
        ("llama-all-kv-heads", 4),
        ("qwen3-biases-window", 4),
        ("qwen2-moe", 2),
        ("deepseek-v2", 2),
        ("deepseek-v3-halves", 4),
    ],
)
def test_decoder_over_ranks_equals_one(
    case: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = make_twin(case)
    spec = read_spec(twin.config)
    drivers: list[Driver] = [
        make_driver(
            spec,
            twin.state,
            make_build(spec, mesh=Mesh(tp=Axis(rank, size))),
            seed=twin.seed,
        )
        for rank in range(size)
    ]
    prompt = twin.prompt(40)
    with ranks_of(size, monkeypatch) as ranks:
        found = ranks.run(lambda rank: drivers[rank].run(Sequence(list(prompt)), chunk=9))
    for logits in found:
        torch.testing.assert_close(logits, twin.logits(prompt), rtol=1e-4, atol=1e-4)


def gloo_group(store: distributed.Store, rank: int, size: int) -> distributed.ProcessGroup:
    group = distributed.ProcessGroup(store, rank, size)
    backend = distributed.ProcessGroupGloo(store, rank, size, timedelta(seconds=TIMEOUT))
    kind = distributed.ProcessGroup.BackendType.GLOO
    group._register_backend(torch.device("cpu"), kind, backend)
    return group


@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives_run_in_the_group_that_the_axis_carries(size: int) -> None:
    """Real gloo groups; the ranks are threads, which share a store."""
    store = distributed.HashStore()

    def work(rank: int) -> Tensor:
        axis = Axis(rank, size, gloo_group(store, rank, size) if size > 1 else None)
        x = torch.full((2, 3), float(rank + 1))
        gathered = all_gather(x, axis)
        return torch.cat((gathered, all_reduce(x, axis)), dim=1)

    gathered = [float(rank + 1) for rank in range(size) for _ in range(3)]
    expected = torch.tensor([gathered + [sum(range(size + 1))] * 3] * 2)
    for found in Ranks(size).run(work):
        assert torch.equal(found, expected)
