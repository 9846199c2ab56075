"""CC: caching and batching change nothing, and what was cached is told truly."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

from tests.cases.client import Box, fresh, random_ids, together

SHARED = (0, 1, 15, 16, 17, 31, 32, 33, 64)
TOKENS = 6


def family(dice: random.Random) -> list[list[int]]:
    """A prompt of 80 tokens, and others that share so many tokens with it and then differ."""
    base = random_ids(dice, 80)
    found = [base]
    for shared in SHARED:
        other = random_ids(dice, 80 - shared)
        other[0] = other[0] if other[0] != base[shared] else other[0] + 1
        found.append(base[:shared] + other)
    return found


def answer(box: Box, prompt: list[int]) -> tuple[list[int], list[float]]:
    fields: dict[str, Any] = {"ignore_eos": True, "return_token_ids": True, "logprobs": 0}
    made = box.complete(prompt, max_tokens=TOKENS, **fields)["choices"][0]
    return made["token_ids"], made["logprobs"]["token_logprobs"]


def check_same(
    mine: list[tuple[list[int], list[float]]],
    base: list[tuple[list[int], list[float]]],
    what: str,
) -> None:
    for place, ((ids, values), (ids_0, values_0)) in enumerate(zip(mine, base, strict=True)):
        assert ids == ids_0, f"prompt {place}, {what}"
        assert all(abs(a - b) < 1e-3 for a, b in zip(values, values_0, strict=True)), what


def test_cc_2_cache_and_batch_change_nothing(box: Box, edge: Box) -> None:
    """`edge` has no cache; there each prompt is alone for the base."""
    dice, seed = fresh()
    prompts = family(dice)
    base = [answer(edge, prompt) for prompt in prompts]
    order = list(range(len(prompts)))
    for round_, workers in (("first", 1), ("again, shuffled", 8)):
        mine = dict(
            zip(
                order,
                together([partial(answer, box, prompts[i]) for i in order], workers),
                strict=True,
            )
        )
        found = [mine[place] for place in range(len(prompts))]
        check_same(found, base, f"cache on, {round_}, seed {seed}")
        dice.shuffle(order)
    uncached = together([partial(answer, edge, prompt) for prompt in prompts], 8)
    check_same(uncached, base, f"cache off, 8 at a time, seed {seed}")


def test_cc_2_echoed_values_are_those_of_an_empty_cache(box: Box, edge: Box) -> None:
    dice, seed = fresh()
    for prompt in family(dice)[:4]:
        fields: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 1}
        found = []
        for one in (edge, box, box):
            lists = one.complete(prompt, **fields)["choices"][0]["logprobs"]
            found.append(lists["token_logprobs"][1:])
        for other in found[1:]:
            assert all(abs(a - b) < 1e-3 for a, b in zip(other, found[0], strict=True)), seed


def test_cc_3_cached_tokens_are_whole_blocks_below_the_last(box: Box) -> None:
    dice, seed = fresh()
    names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
    before = [box.metric(name) for name in names]
    asked, told = 0, 0
    for length in (100, 16, 17, 48, 49):
        prompt, expected = random_ids(dice, length), (length - 1) // 16 * 16
        for salt, cached in ((None, 0), (None, expected), (None, expected), (f"s{seed}", 0)):
            body: dict[str, Any] = {"max_tokens": 2, "ignore_eos": True}
            body |= {} if salt is None else {"cache_salt": salt}
            usage = box.complete(prompt, **body)["usage"]
            found = usage["prompt_tokens_details"]["cached_tokens"]
            assert found == cached, f"{length} tokens, salt {salt}, seed {seed}"
            asked, told = asked + length, told + found
    rose = [box.metric(name) - start for name, start in zip(names, before, strict=True)]
    assert rose == [asked, told], f"seed {seed}"


def test_cc_3_a_cache_that_is_off_is_never_used(edge: Box) -> None:
    dice, seed = fresh()
    prompt = random_ids(dice, 70)
    for _ in range(2):
        usage = edge.complete(prompt, max_tokens=1)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0, f"seed {seed}"
