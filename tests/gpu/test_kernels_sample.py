"""Sampling on the GPU chooses what the definition chooses, row for row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.kernels.ops import SampleRows
from octavo.kernels.sample import sample as defined

pytest.importorskip("triton")

from octavo.kernels.triton.sample import sample, sample_checked


def make_rows(device: torch.device, count: int, **columns: object) -> SampleRows:
    """Random seeds and positions; other settings as given, a number or a list."""
    words = {
        "temperature": (1.0, torch.float32),
        "top_k": (0, torch.int32),
        "top_p": (1.0, torch.float32),
        "min_p": (0.0, torch.float32),
    }

    def column(name: str) -> Tensor:
        value, dtype = columns.get(name, words[name][0]), words[name][1]
        full = value if isinstance(value, list) else [value] * count
        return torch.tensor(full, dtype=dtype, device=device)

    return SampleRows(
        **{name: column(name) for name in words},
        seed=torch.randint(-(2**63), 2**63 - 1, (count,), device=device),
        position=torch.randint(0, 1 << 20, (count,), device=device),
        filtered=bool(columns.get("filtered", True)),
    )


def on_cpu(rows: SampleRows) -> SampleRows:
    return SampleRows(
        rows.temperature.cpu(),
        rows.top_k.cpu(),
        rows.top_p.cpu(),
        rows.min_p.cpu(),
        rows.seed.cpu(),
        rows.position.cpu(),
    )


def check(logits: Tensor, rows: SampleRows) -> None:
    before = logits.clone()
    found = sample(logits, rows)
    assert found.dtype == torch.int32
    assert found.tolist() == defined(logits.cpu(), on_cpu(rows)).tolist()
    assert torch.equal(logits.nan_to_num(7e7), before.nan_to_num(7e7))


@pytest.mark.parametrize("vocab", [1, 5, 4096, 9001])
def test_greedy_takes_the_first_of_the_greatest(device: torch.device, vocab: int) -> None:
    logits = torch.randint(0, 4, (6, vocab), device=device).float()
    for filtered in (True, False):
        check(logits, make_rows(device, 6, temperature=0.0, filtered=filtered))


@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_draws(device: torch.device, scale: float) -> None:
    logits = torch.randn(8, 9001, device=device) * scale
    temperature = [0.3, 1.0, 0.6, 2.0, 0.0, 1.0, 0.01, 100.0]
    for filtered in (True, False):
        check(logits, make_rows(device, 8, temperature=temperature, filtered=filtered))


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": [1, 2, 50, 8999, 9000, 9001, 20000, 3]},
        {"top_p": [0.1, 0.5, 0.9, 0.999, 1e-6, 1.0, 0.3, 0.7]},
        {"min_p": [0.1, 0.5, 1.0, 1e-4, 0.01, 0.9, 0.2, 0.0]},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.05},
        {"top_k": 3, "top_p": 0.6, "temperature": [0.2, 1.0, 5.0, 0.0, 1.0, 1.0, 1.0, 0.7]},
    ],
)
@pytest.mark.parametrize(("scale", "ties"), [(2.0, False), (2.0, True), (0.01, False)])
def test_filters(
    device: torch.device, settings: dict[str, object], scale: float, ties: bool
) -> None:
    """A flat row leaves more tokens than fit into a list of candidates."""
    logits = torch.randn(8, 9001, device=device) * scale
    if ties:
        logits = logits.round()
    check(logits, make_rows(device, 8, **settings))


def test_broken_rows_give_0_and_leave_others_alone(device: torch.device) -> None:
    logits = torch.randn(6, 5000, device=device)
    logits[0, 4500] = torch.nan
    logits[1] = -torch.inf
    logits[2, 17] = torch.inf
    logits[3, :4999] = -torch.inf
    logits[4, 0] = -torch.inf
    for settings in ({}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}):
        check(logits, make_rows(device, 6, **settings))


def test_a_row_does_not_depend_on_its_batch(device: torch.device) -> None:
    logits = torch.randn(9, 6000, device=device)
    rows = make_rows(device, 9, top_p=0.9)
    whole = sample(logits, rows)
    for row in range(9):
        part = slice(row, row + 1)
        alone = SampleRows(
            rows.temperature[part],
            rows.top_k[part],
            rows.top_p[part],
            rows.min_p[part],
            rows.seed[part],
            rows.position[part],
        )
        assert int(sample(logits[part], alone)) == int(whole[row])


@pytest.mark.parametrize("settings", [{"filtered": False}, {"temperature": 0.0}, {"top_k": 5}])
def test_rows_that_are_not_finite_are_flagged(
    device: torch.device, settings: dict[str, object]
) -> None:
    logits = torch.randn(6, 9001, device=device)
    logits[0, 9000] = torch.nan
    logits[2, 0] = torch.inf
    logits[3, 4096] = -torch.inf
    flags = torch.zeros(6, dtype=torch.int32, device=device)
    rows = make_rows(device, 6, **settings)
    found = sample_checked(logits, rows, flags)
    assert flags.tolist() == [1, 0, 1, 1, 0, 0]
    assert found.tolist() == sample(logits, rows).tolist()
