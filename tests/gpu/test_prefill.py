"""The seam for rows of many queries: a library's kernel is tried before it is trusted."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from octavo.attention.base import AttentionNeed
from octavo.attention.fa3 import INTERFACE, Fa3Prefill
from octavo.attention.prefill import Prefill, TritonPrefill, trial
from octavo.attention.triton import TritonAttention
from octavo.forward import ForwardBatch
from octavo.kernels.triton.attention_decode import Heads
from tests.gpu import flash_attention_3
from tests.gpu.measure import bound, distance
from tests.gpu.test_kernels_attention import dense, make_batch, make_need


class Library(TritonPrefill):
    """Takes all rows of a step with prompts; may be a little wrong, or fail."""

    name = "library"
    takes_all = True

    def __init__(self, factor: float = 1.0, problem: str = "") -> None:
        super().__init__()
        self.factor, self.problem, self.firsts = factor, problem, list[int]()

    def plan(self, need: AttentionNeed, batch: ForwardBatch, first: int) -> object:
        self.firsts.append(first)
        return super().plan(need, batch, first)

    def run(
        self, q: Tensor, keys: Tensor, values: Tensor, heads: Heads, planned: object, out: Tensor
    ) -> None:
        if self.problem:
            raise RuntimeError(self.problem)
        super().run(q, keys, values, heads, planned, out)
        out *= self.factor


@pytest.mark.parametrize("changes", [{}, {"window": 9}, {"soft_cap": 2.0, "block_size": 32}])
def test_a_trial_passes_what_is_right(device: torch.device, changes: dict[str, object]) -> None:
    assert trial(TritonPrefill(), make_need(device, **changes)) is None


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        (Library(factor=1.03), "off by 3.0e-02"),
        (Library(factor=float("nan")), "off by nan"),
        (Library(problem="no kernel image\nmore"), "a trial failed: no kernel image"),
    ],
)
def test_a_trial_refuses_what_is_not(device: torch.device, library: Prefill, reason: str) -> None:
    found = trial(library, make_need(device))
    assert found is not None
    assert reason in found
    assert "more" not in found.replace("more than", "")


@pytest.mark.parametrize("q_lens", [[1, 1, 40, 5], [1, 1, 1, 1]])
def test_a_library_takes_mixed_steps_whole(device: torch.device, q_lens: list[int]) -> None:
    library, need = Library(), make_need(device)
    backend = TritonAttention(library)
    assert backend.name == "library"
    batch = make_batch(need, backend, q_lens, [70, 9, 45, 20])
    q = torch.randn(batch.num_tokens, need.num_heads, need.head_dim, device=device).to(need.dtype)
    shape = (2, batch.num_tokens, need.num_kv_heads, need.head_dim)
    k, v = torch.randn(shape, device=device).to(need.dtype)
    batch = replace(batch, attn=backend.plan(batch))
    found = backend.forward(q, k, v, 0, need, batch)
    assert distance(found, dense(q, need, batch)) < bound(device, need.dtype)
    assert library.firsts == ([0] if 40 in q_lens else [])


@pytest.mark.parametrize(
    "changes", [{}, {"head_dim": 80, "block_size": 32}, {"window": 9}, {"soft_cap": 2.0}]
)
def test_flash_attention_3_is_asked_as_its_package_says(
    device: torch.device, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its interface, with a package in its place that does the same in plain torch."""
    monkeypatch.setitem(sys.modules, INTERFACE, flash_attention_3)
    need = make_need(device, **changes)
    backend = TritonAttention(Fa3Prefill())
    assert backend.name == "fa3"
    assert trial(Fa3Prefill(), need) is None
    for q_lens, kv_lens in (([1, 1, 40, 5], [70, 9, 45, 20]), ([33, 2], [33, 60])):
        batch = make_batch(need, backend, q_lens, kv_lens)
        q = torch.randn(batch.num_tokens, need.num_heads, need.head_dim, device=device)
        shape = (2, batch.num_tokens, need.num_kv_heads, need.head_dim)
        k, v = torch.randn(shape, device=device).to(need.dtype)
        batch = replace(batch, attn=backend.plan(batch))
        found = backend.forward(q.to(need.dtype), k, v, 0, need, batch)
        assert distance(found, dense(q.to(need.dtype), need, batch)) < bound(device, need.dtype)
