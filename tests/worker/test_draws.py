"""Draws follow the distribution that the settings describe, and no neighbour changes one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.ops import SampleRows
from octavo.kernels.select import select

DRAWS = 20_000
VOCAB = 50
SEEDS = (0, 1, 2**63 + 5, 2**64 - 1)

Sample = Callable[[Tensor, SampleRows], Tensor]


def sample_of(kernels: str) -> Sample:
    try:
        return select(torch.float32, kernels)[0].sample
    except ConfigError as error:
        pytest.skip(f"no such kernels here: {error}")


@pytest.fixture(params=["reference", "native"])
def sample(request: pytest.FixtureRequest) -> Sample:
    return sample_of(request.param)


def settings(
    size: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
) -> SampleRows:
    return SampleRows(
        temperature=torch.full((size,), temperature),
        top_k=torch.full((size,), top_k, dtype=torch.int32),
        top_p=torch.full((size,), top_p),
        min_p=torch.full((size,), min_p),
        seed=torch.from_numpy(np.full(size, seed, np.uint64).view(np.int64)),
        position=torch.arange(size),
    )


def expected(
    logits: np.ndarray, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:  # fmt: skip
    """Temperature, then min-p, then top-k, then top-p over what is left, in 64 bits."""
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    weights[weights < min_p * weights.max()] = 0
    order = np.argsort(-weights, kind="stable")
    if top_k:
        weights[order[top_k:]] = 0
    shares = weights / weights.sum()
    before = np.cumsum(shares[order]) - shares[order]
    shares[order[before >= top_p]] = 0
    return shares / shares.sum()


def chi_square(counts: np.ndarray, shares: np.ndarray) -> float:
    """How many standard deviations the statistic lies above its mean (Wilson and Hilferty)."""
    common = shares * counts.sum() >= 5
    assert counts[shares == 0].sum() == 0, "a token that was filtered out was drawn"
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(shares[common], shares[~common].sum()) * counts.sum()
    keep = wanted > 0
    statistic = ((observed[keep] - wanted[keep]) ** 2 / wanted[keep]).sum()
    degrees = int(keep.sum()) - 1
    if degrees == 0:
        return 0.0
    spread = 2 / (9 * degrees)
    return float(((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))


CASES: list[dict[str, float]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.6},
    {"top_p": 0.01},
    {"min_p": 0.2},
    {"temperature": 1.4, "top_k": 12, "top_p": 0.8},
    {"temperature": 0.8, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.1},
]


@pytest.mark.parametrize(
    ("kernels", "seed", "case"),
    [
        # The reference takes seconds a case; native kernels are held to its tokens elsewhere.
        *(("reference", 4, case) for case in (CASES[2], CASES[-1])),
        *(("native", seed, case) for seed in SEEDS for case in CASES),
    ],
    ids=str,
)
def test_draws_over_positions_follow_the_settings(
    kernels: str, seed: int, case: dict[str, float]
) -> None:
    sample = sample_of(kernels)
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed % 1000)) * 2
    rows = logits.expand(DRAWS, VOCAB).contiguous()
    drawn = sample(rows, settings(DRAWS, seed=seed, **case))  # type: ignore[arg-type]
    counts = np.bincount(drawn.numpy(), minlength=VOCAB)
    shares = expected(logits.numpy(), **case)  # type: ignore[arg-type]
    assert chi_square(counts, shares) < 4.5  # one in 300,000


def test_draws_over_seeds_follow_the_settings(sample: Sample) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 2
    rows = logits.expand(DRAWS, VOCAB).contiguous()
    base = settings(DRAWS)
    drawn = sample(rows, replace(base, seed=base.position, position=torch.full((DRAWS,), 17)))
    counts = np.bincount(drawn.numpy(), minlength=VOCAB)
    assert chi_square(counts, expected(logits.numpy())) < 4.5


def test_neighbouring_positions_are_independent(sample: Sample) -> None:
    """Pairs of draws of one sequence, over four equally likely tokens."""
    drawn = sample(torch.zeros(DRAWS, 4), settings(DRAWS, seed=9)).numpy()
    pairs = np.bincount(drawn[:-1] * 4 + drawn[1:], minlength=16)
    assert chi_square(pairs, np.full(16, 1 / 16)) < 4.5


@pytest.mark.parametrize("threads", [1, 2])
def test_a_draw_is_the_same_alone_and_logits_are_left_as_they_are(
    sample: Sample, threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        generator = torch.Generator().manual_seed(5)
        logits = torch.randn(24, 4099, generator=generator) * 3
        logits[3, 100:] = -torch.inf
        given = logits.clone()
        rows = settings(24)
        rows = replace(
            rows,
            temperature=torch.rand(24, generator=generator) * 2 * (torch.arange(24) % 4 > 0),
            top_k=torch.randint(0, 30, (24,), generator=generator, dtype=torch.int32),
            top_p=torch.rand(24, generator=generator) * 0.9 + 0.1,
            min_p=torch.rand(24, generator=generator) * 0.1,
            seed=torch.randint(-(2**62), 2**62, (24,), generator=generator),
        )
        together = sample(logits, rows)
        assert torch.equal(logits, given)
        assert together.dtype == torch.int32
        for row in range(24):
            at = slice(row, row + 1)
            one = SampleRows(
                temperature=rows.temperature[at],
                top_k=rows.top_k[at],
                top_p=rows.top_p[at],
                min_p=rows.min_p[at],
                seed=rows.seed[at],
                position=rows.position[at],
            )
            assert sample(logits[at].clone(), one).item() == together[row].item()
        greedy = rows.temperature == 0
        assert torch.equal(together[greedy].long(), logits[greedy].argmax(dim=1))
    finally:
        torch.set_num_threads(before)
