"""Products by chosen algorithms: what they give, and what a file keeps of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from octavo.kernels import cublaslt
from octavo.kernels.cublaslt import Products
from tests.gpu.measure import bound, distance, poison_allocator


def weights_of(device: torch.device, dtype: torch.dtype, rows: int, columns: int) -> list[Tensor]:
    return [torch.randn(rows, columns, device=device).to(dtype) / columns**0.5 for _ in range(2)]


def test_what_was_learned_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "products.json"
    known = {(560, 28672, 4096, "bfloat16"): "00ff" * 16, (7, 8, 9, "float16"): ""}
    cublaslt._write(path, known)
    assert cublaslt._read(path) == known
    assert [one.name for one in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("text", ["", "{", "[[1, 2]]", "[1]", '[["a", 1, 2, "x", ""]]', "null"])
def test_a_file_that_is_broken_is_no_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "products.json"
    path.write_text(text)
    assert cublaslt._read(path) == {}
    assert cublaslt._read(tmp_path / "none.json") == {}


def test_small_weights_are_not_timed() -> None:
    products = Products(torch.device("cpu"))
    products.see(torch.zeros(64, 64, dtype=torch.bfloat16))
    assert products.learn([1, 2], None) == "products: all are small"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_any_algorithm_gives_the_product(
    device: torch.device, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that are slower; in a graph, from a file, and beside odd strides."""
    if device.type != "cuda":
        pytest.skip("no CUDA device")
    monkeypatch.setattr(cublaslt, "GAIN", 100.0)
    monkeypatch.setattr(cublaslt, "LEAST", 0)
    shapes = [(4096, 4096), (1000, 4104), (136, 264)]
    held = {shape: weights_of(device, dtype, *shape) for shape in shapes}
    sizes = [65, 128, 560]
    products = Products(device)
    for weights in held.values():
        for weight in weights:
            products.see(weight)
    assert f" of {len(shapes) * len(sizes)} by another" in products.learn(sizes, tmp_path)
    again = Products(device)
    for weights in held.values():
        again.see(weights[0])
    assert ", 0 timed now" in again.learn(sizes, tmp_path)
    tried = 0
    for rows in sizes:
        for (_, columns), weights in held.items():
            x = torch.randn(rows, columns, device=device).to(dtype)
            plan = again.find(x, weights[1])
            if plan is None:  # the library had one algorithm only
                continue
            tried += 1
            expected = x.float() @ weights[1].float().t()
            poison_allocator(device)
            assert distance(plan.run(x, weights[1]), expected) < bound(device, dtype)
            wide = torch.randn(rows, 2 * columns, device=device).to(dtype)
            assert again.find(wide[:, :columns], weights[1]) is None
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = plan.run(x, weights[1])
            x.normal_()
            graph.replay()
            assert distance(found, x.float() @ weights[1].float().t()) < bound(device, dtype)
    assert tried > len(sizes)
