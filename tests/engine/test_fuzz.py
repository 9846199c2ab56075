"""Random workloads in every mode: each sequence as if alone, everything comes home."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.engine.workload import run_seed


@pytest.mark.timeout(7200)  # thousands of seeds take minutes
def test_random_workloads(pytestconfig: pytest.Config) -> None:
    first = pytestconfig.getoption("--first-seed", 0)
    count = pytestconfig.getoption("--seeds", 200)
    sums: Counter[str] = Counter()
    for seed in range(first, first + count):
        sums += run_seed(seed).sums
    if count >= 200:  # the workloads are no test if nothing happens in them
        for name in ("preemptions", "prefix_hits", "recoveries", "sampled_tokens", "prepared"):
            assert sums[name] > count / 4, f"too few {name}: {sums}"
