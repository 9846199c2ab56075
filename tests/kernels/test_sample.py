"""The definition of sampling against itself written plainly, and native code against it."""

from __future__ import annotations

import math
import random
import secrets
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from octavo.kernels.ops import SampleRows
from octavo.kernels.sample import sample, uniform
from tests.kernels.native_parts import native_ops


@pytest.fixture(autouse=True)
def seed() -> None:
    value = secrets.randbits(31)
    print(f"seed {value}")
    torch.manual_seed(value)
    random.seed(value)


def random_rows(count: int, vocabulary: int) -> SampleRows:
    """Every combination of filters on and off, with settings from harsh to nothing."""

    def some(values: Tensor, off: float) -> Tensor:
        return torch.where(torch.rand(count) < 0.5, values, torch.full((count,), off))

    return SampleRows(
        temperature=some(torch.rand(count) * 2, 0.7) * (torch.rand(count) < 0.9),
        top_k=some(torch.rand(count).pow(3) * vocabulary * 1.2, 0.0).int(),
        top_p=some(torch.rand(count).clamp(min=1e-3), 1.0),
        min_p=some(torch.rand(count).pow(3), 0.0),
        seed=torch.randint(-(2**63), 2**63 - 1, (count,)),
        position=torch.randint(0, 2**20, (count,)),
    )


def fixed_rows(count: int, **settings: float) -> SampleRows:
    return SampleRows(
        temperature=torch.full((count,), settings.get("temperature", 1.0)),
        top_k=torch.full((count,), int(settings.get("top_k", 0)), dtype=torch.int32),
        top_p=torch.full((count,), settings.get("top_p", 1.0)),
        min_p=torch.full((count,), settings.get("min_p", 0.0)),
        seed=torch.full((count,), secrets.randbits(62)),
        position=torch.arange(count),
    )


def plainly(logits: list[float], rows: SampleRows, row: int) -> int:
    """The definition, token by token. Settings and temperature are rounded to f32 first."""
    temperature = rows.temperature[row].item()
    if temperature == 0:
        return logits.index(max(logits))
    z = (torch.tensor(logits) / rows.temperature[row]).tolist()
    weights = {i: math.exp(value - max(z)) for i, value in enumerate(z)}
    kept = {i for i in weights if weights[i] >= rows.min_p[row].item()}
    top_k = int(rows.top_k[row])
    if top_k:
        least = sorted((z[i] for i in kept), reverse=True)[:top_k][-1]
        kept = {i for i in kept if z[i] >= least}
    top_p = rows.top_p[row].item()
    if top_p < 1:
        wanted = Fraction(top_p) * sum(Fraction(weights[i]) for i in kept)
        above = {i: sum(Fraction(weights[j]) for j in kept if z[j] > z[i]) for i in kept}
        kept = {i for i in kept if above[i] < wanted}
    total = math.fsum(weights[i] for i in kept)
    target = uniform(int(rows.seed[row]), int(rows.position[row])) * total
    passed = 0.0
    for i in sorted(kept):
        passed += weights[i]
        if passed > target:
            return i
    raise AssertionError("nothing was drawn")


def test_the_reference_is_the_definition() -> None:
    count = 300
    logits = torch.randn(count, 23) * torch.rand(count, 1) * 6
    logits[::3] = (logits[::3] * 2).round() / 2  # with equals
    rows = random_rows(count, 23)
    wanted = [plainly(logits[row].tolist(), rows, row) for row in range(count)]
    assert sample(logits, rows).tolist() == wanted


@pytest.mark.parametrize("vocabulary", [1, 5, 16, 100, 4097, 49152])
@pytest.mark.parametrize("kind", ["smooth", "equals", "masked", "flat"])
def test_native_draws_what_the_reference_draws(vocabulary: int, kind: str) -> None:
    count = 60
    logits = torch.randn(count, vocabulary) * torch.rand(count, 1) * 8
    if kind == "equals":
        logits = (logits * 2).round() / 2
    elif kind == "masked":
        masked = torch.rand(count, vocabulary) < torch.rand(count, 1)
        masked[:, random.randrange(vocabulary)] = False
        logits = logits.masked_fill(masked, -torch.inf)
    elif kind == "flat":
        logits = torch.full_like(logits, 3.0)
    rows = random_rows(count, vocabulary)
    found = native_ops(torch.float32).sample(logits, rows)
    assert found.dtype == torch.int32
    assert found.tolist() == sample(logits, rows).tolist()


@pytest.mark.parametrize("native", [False, True])
def test_rows_that_cannot_be_sampled_give_token_0(native: bool) -> None:
    run = native_ops(torch.float32).sample if native else sample
    logits = torch.randn(6, 40)
    logits[0, 7] = torch.nan
    logits[1, :] = -torch.inf
    logits[2, 9] = torch.inf
    logits[3, 39] = torch.nan
    for temperature in (0.0, 1.0):
        tokens = run(logits, fixed_rows(6, temperature=temperature, top_k=3, top_p=0.9))
        assert tokens[:4].tolist() == [0, 0, 0, 0]
    assert run(logits[4:], fixed_rows(2, temperature=0.0)).tolist() == logits[4:].argmax(1).tolist()


@pytest.mark.parametrize("native", [False, True])
def test_a_row_is_drawn_alike_alone_and_in_any_company(native: bool) -> None:
    run = native_ops(torch.float32).sample if native else sample
    logits = torch.randn(20, 333) * 3
    before = logits.clone()
    rows = random_rows(20, 333)
    together = run(logits, rows)
    assert torch.equal(logits, before)
    for row in range(20):
        alone = SampleRows(
            rows.temperature[row : row + 1],
            rows.top_k[row : row + 1],
            rows.top_p[row : row + 1],
            rows.min_p[row : row + 1],
            rows.seed[row : row + 1],
            rows.position[row : row + 1],
        )
        assert run(logits[row : row + 1], alone).item() == together[row].item()


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(3, 50)
    logits[1, [20, 30, 49]] = 1.0
    logits[2, 49] = 1.0
    rows = fixed_rows(3, temperature=0.0)
    assert sample(logits, rows).tolist() == [0, 20, 49]
    assert native_ops(torch.float32).sample(logits, rows).tolist() == [0, 20, 49]


def test_uniform_is_what_it_was_and_is_uniform() -> None:
    """Recorded draws must not change from release to release; the values are of this version."""
    draws = [uniform(seed, position) for seed in range(40) for position in range(500)]
    assert all(0 <= draw < 1 for draw in draws)
    counts = torch.histc(torch.tensor(draws), bins=20, min=0, max=1)
    expected = len(draws) / 20
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < 55  # 19 degrees of freedom: the draws are fixed, so is the statistic
    assert uniform(-1, 3) == uniform(2**64 - 1, 3)


def test_draws_follow_the_weights() -> None:
    count = 40_000
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).expand(count, 4).contiguous()
    tokens = native_ops(torch.float32).sample(logits, fixed_rows(count))
    wanted = logits[0].softmax(0) * count
    found = torch.bincount(tokens, minlength=4)
    # Six standard deviations.
    assert ((found - wanted).abs() < 6 * wanted.sqrt()).all(), (found, wanted)
