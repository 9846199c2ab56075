"""Each family equals transformers on each set of kernels, however its tokens are computed.

Logits in f32 within 1e-4 each and 1e-5 by norm, and 32 greedy tokens. Each is compared plain, in
chunks, from the prefix cache and in a batch with others; `test_parallel.py` has tensor parallelism.
"""

from __future__ import annotations

import functools

import pytest
import torch

from octavo.models.registry import read_spec
from tests.models.driver import KERNELS, Driver, Row, start
from tests.models.twins import CASES, Twin, shared_twin

COUNT = 32
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
BY_NORM = 1e-5


pytestmark = pytest.mark.parametrize("kernels", KERNELS)


def begin(case: str, kernels: str, block_size: int) -> tuple[Twin, Driver]:
    twin = shared_twin(case)
    spec = read_spec(twin.config)
    return twin, start(spec, twin.state, kernels, seed=twin.seed, block_size=block_size)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_logits_equal_whole_and_in_chunks(case: str, kernels: str, block_size: int) -> None:
    twin, driver = begin(case, kernels, block_size)
    prompt = twin.prompt(75)
    expected = twin.logits(prompt)
    whole, chunked = driver.run(Row(list(prompt))), driver.run(Row(list(prompt)), chunk=7)
    for found in (whole, chunked):
        torch.testing.assert_close(found, expected, **TOLERANCE)
        assert float((found - expected).norm() / expected.norm()) < BY_NORM


@functools.cache
def greedy_tokens(case: str) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, the first two alike for 30 tokens, and what transformers adds to each."""
    twin = shared_twin(case)
    first = twin.prompt(41)
    prompts = [first, first[:30] + twin.prompt(11)]
    prompts += [twin.prompt(length) for length in (1, 2, 7, 23, 60)]
    return prompts, [twin.greedy(prompt, COUNT) for prompt in prompts]


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_equal(case: str, kernels: str) -> None:
    """Alone, after a prefix hit, and in one batch with others whose prompts are cut anywhere."""
    _, driver = begin(case, kernels, 7)
    prompts, wanted = greedy_tokens(case)
    first = Row(list(prompts[0]))
    assert driver.greedy([first], COUNT) == wanted[:1]
    hit = driver.share(first, list(prompts[1]))
    assert hit.computed == 28
    assert driver.greedy([hit], COUNT) == wanted[1:2]
    assert driver.greedy([Row(list(one)) for one in prompts], COUNT, budget=13) == wanted


@pytest.mark.parametrize("case", ["llama", "qwen3", "mistral-window"])
def test_prefix_filled_in_the_same_step(case: str, kernels: str) -> None:
    """A row may read pages that another row of the same batch writes."""
    twin, driver = begin(case, kernels, 4)
    prompt = twin.prompt(24)
    first = Row(list(prompt), 0, [driver.free.pop() for _ in range(6)])
    second = Row(prompt[:20] + twin.prompt(6), 20, first.blocks[:5])
    found = driver.step([(second, 6), (first, 24)], every=True)
    torch.testing.assert_close(found[0], twin.logits(second.tokens)[20:], **TOLERANCE)
    torch.testing.assert_close(found[1], twin.logits(prompt), **TOLERANCE)


@pytest.mark.parametrize("case", ["llama", "qwen2-window", "qwen3"])
def test_long_prompts_cross_query_blocks(case: str, kernels: str) -> None:
    """Prompts longer than the reference backend's query block, whole and in two chunks."""
    twin, driver = begin(case, kernels, 16)
    prompt = twin.prompt(256)
    expected = twin.logits(prompt)
    torch.testing.assert_close(driver.run(Row(list(prompt))), expected, **TOLERANCE)
    row = Row(list(prompt))
    parts = driver.step([(row, 100)], every=True) + driver.step([(row, 156)], every=True)
    torch.testing.assert_close(torch.cat(parts), expected, **TOLERANCE)
