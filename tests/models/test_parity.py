"""Each family equals transformers: logits in f32, and greedy tokens however they are computed."""

from __future__ import annotations

import pytest
import torch

from octavo.models.registry import read_spec
from tests.models.driver import Driver, Row, make_build, make_driver
from tests.models.twins import CASES, Twin, make_twin

COUNT = 32
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def start(twin: Twin, block_size: int) -> Driver:
    spec = read_spec(twin.config)
    return make_driver(spec, twin.state, make_build(spec, block_size=block_size), seed=twin.seed)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_logits_equal_whole_and_in_chunks(case: str, block_size: int) -> None:
    twin = make_twin(case)
    driver = start(twin, block_size)
    prompt = twin.prompt(75)
    expected = twin.logits(prompt)
    torch.testing.assert_close(driver.run(Row(list(prompt))), expected, **TOLERANCE)
    torch.testing.assert_close(driver.run(Row(list(prompt)), chunk=9), expected, **TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_equal(case: str) -> None:
    """Alone, after a prefix hit, and in one batch with others whose prompts are cut anywhere."""
    twin = make_twin(case)
    driver = start(twin, block_size=7)
    prompt = twin.prompt(41)
    expected = twin.greedy(prompt, COUNT)
    first = Row(list(prompt))
    assert driver.greedy([first], COUNT) == [expected]

    longer = prompt[:30] + twin.prompt(11)
    hit = driver.share(first, list(longer))
    assert hit.computed == 28
    assert driver.greedy([hit], COUNT) == [twin.greedy(longer, COUNT)]

    prompts = [prompt, longer, *(twin.prompt(length) for length in (1, 2, 7, 23, 60))]
    wanted = [twin.greedy(one, COUNT) for one in prompts]
    assert driver.greedy([Row(list(one)) for one in prompts], COUNT, budget=13) == wanted


@pytest.mark.parametrize("case", ["llama", "qwen3", "mistral-window"])
def test_prefix_filled_in_the_same_step(case: str) -> None:
    """A row may read pages that another row of the same batch writes."""
    twin = make_twin(case)
    driver = start(twin, block_size=4)
    prompt = twin.prompt(24)
    first = Row(list(prompt), 0, [driver.free.pop() for _ in range(6)])
    second = Row(prompt[:20] + twin.prompt(6), 20, first.blocks[:5])
    found = driver.step([(second, 6), (first, 24)], every=True)
    torch.testing.assert_close(found[0], twin.logits(second.tokens)[20:], **TOLERANCE)
    torch.testing.assert_close(found[1], twin.logits(prompt), **TOLERANCE)


@pytest.mark.parametrize("case", ["llama", "qwen2-window", "qwen3"])
def test_long_prompts_cross_query_blocks(case: str) -> None:
    """Prompts longer than the reference backend's query block, whole and in two chunks."""
    twin = make_twin(case)
    driver = start(twin, block_size=16)
    prompt = twin.prompt(256)
    expected = twin.logits(prompt)
    torch.testing.assert_close(driver.run(Row(list(prompt))), expected, **TOLERANCE)
    row = Row(list(prompt))
    parts = driver.step([(row, 100)], every=True) + driver.step([(row, 156)], every=True)
    torch.testing.assert_close(torch.cat(parts), expected, **TOLERANCE)
