"""Rules, penalties and log-probs against plain loops, over random rows."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from octavo.sampling.history import TokenHistory
from octavo.sampling.logprobs import Want, token_logprobs
from octavo.sampling.processors import RowRules, process
from octavo.types import TokenParams
from tests.worker import naive

VOCAB = 40


def random_params(rng: random.Random, output: list[int], vocab: int = VOCAB) -> TokenParams:
    """Each rule is on with even odds; bad words often match the end of `output`."""

    def some(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.sample(range(vocab), rng.randint(low, high)))

    words: list[tuple[int, ...]] = []
    for _ in range(rng.randint(0, 4)):
        tail = tuple(output[-rng.randint(1, 3) :]) if output and rng.random() < 0.6 else some(0, 2)
        words.append((*tail, rng.randrange(vocab)))
    return TokenParams(
        max_tokens=100,
        min_tokens=rng.choice([0, len(output), len(output) + 1]),
        stop_ids=some(0, 3),
        presence_penalty=rng.choice([0.0, rng.uniform(-2, 2)]),
        frequency_penalty=rng.choice([0.0, rng.uniform(-2, 2)]),
        repetition_penalty=rng.choice([1.0, rng.uniform(0.5, 2)]),
        logit_bias=tuple((t, rng.uniform(-5, 5)) for t in some(0, 4)),
        allowed_ids=some(5, vocab) if rng.random() < 0.5 else (),
        bad_words=tuple(words) if rng.random() < 0.7 else (),
    )


def random_case(rng: random.Random) -> tuple[TokenParams, list[int], int]:
    num_prompt = rng.randint(1, 30)
    output = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 30))]
    tokens = [rng.randrange(VOCAB) for _ in range(num_prompt)] + output
    return random_params(rng, output), tokens, num_prompt


def rules_of(params: TokenParams, tokens: list[int], num_prompt: int) -> RowRules:
    return RowRules(params, tokens, num_prompt=num_prompt, vocab=VOCAB)


@pytest.mark.parametrize("seed", range(40))
def test_rules_equal_plain_loops_bit_for_bit(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(1, 12)
    logits = torch.randn(size, VOCAB, generator=torch.Generator().manual_seed(seed)) * 5
    before = logits.clone()
    rows = sorted(rng.sample(range(size), rng.randint(1, size)))
    cases = [random_case(rng) for _ in rows]
    process(
        logits,
        rows,
        [rules_of(*case) for case in cases],
        [len(tokens) - num_prompt for _, tokens, num_prompt in cases],
    )
    for row in range(size):
        expected = before[row].numpy()
        if row in rows:
            expected = naive.change(expected, *cases[rows.index(row)])
        assert np.array_equal(logits[row].numpy(), expected), f"seed {seed} row {row}"


@pytest.mark.parametrize("seed", range(10))
def test_a_row_with_rules_is_the_same_alone(seed: int) -> None:
    rng = random.Random(1000 + seed)
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(seed))
    cases = [random_case(rng) for _ in range(8)]
    counts = [len(tokens) - num_prompt for _, tokens, num_prompt in cases]
    alone = [logits[row : row + 1].clone() for row in range(8)]
    process(logits, range(8), [rules_of(*case) for case in cases], counts)
    for row in range(8):
        process(alone[row], [0], [rules_of(*cases[row])], [counts[row]])
        assert torch.equal(alone[row][0], logits[row])


def test_history_grows_as_if_made_at_once() -> None:
    rng = random.Random(5)
    tokens = [rng.randrange(200) for _ in range(300)]
    grown = TokenHistory(tokens[:20], 20)
    for token in tokens[20:]:
        grown.append(token)
    made = TokenHistory(tokens, 20)
    assert grown.output == made.output == tokens[20:]
    for history in (grown, made):
        found = dict(zip(history.ids.tolist(), history.counts.tolist(), strict=True))
        assert found == {token: tokens[20:].count(token) for token in set(tokens)}


def test_ids_outside_the_vocabulary_have_no_effect() -> None:
    params = TokenParams(
        max_tokens=5,
        min_tokens=3,
        stop_ids=(VOCAB, -1),
        logit_bias=((VOCAB + 3, 1.0),),
        bad_words=((VOCAB,), (-2,), ()),
    )
    logits = torch.randn(1, VOCAB)
    before = logits.clone()
    process(logits, [0], [rules_of(params, [1, 2], 2)], [0])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("_", range(20))
def test_logprobs_equal_plain_loops(_: int) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    size = rng.randint(1, 9)
    logits = torch.randn(size, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    logits = torch.where(torch.rand(size, VOCAB) < 0.3, logits.round(), logits)  # ties
    tokens = [rng.randrange(VOCAB) for _ in range(size)]
    wants = [
        Want(
            rng.choice([-1, 0, 1, 5, VOCAB + 1]), tuple(rng.sample(range(VOCAB), rng.randint(0, 3)))
        )
        for _ in range(size)
    ]
    for row, got in enumerate(token_logprobs(logits, tokens, wants)):
        count = min(wants[row].count, VOCAB)
        naive.check_logprobs(got, logits[row].numpy(), tokens[row], count, wants[row].ids)


@pytest.mark.parametrize("threads", [1, 2])
def test_logprobs_are_the_same_alone(threads: int) -> None:
    """At a vocabulary large enough for torch to split a row between threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        logits = torch.randn(5, 49_152, generator=torch.Generator().manual_seed(3))
        tokens, wants = [7, 8, 9, 10, 11], [Want(20)] * 5
        together = token_logprobs(logits, tokens, wants)
        for row in range(5):
            alone = token_logprobs(logits[row : row + 1], tokens[row : row + 1], wants[:1])
            assert alone == together[row : row + 1]
    finally:
        torch.set_num_threads(before)


def test_penalties_keep_masked_tokens_masked() -> None:
    params = TokenParams(
        max_tokens=5, bad_words=((3,),), repetition_penalty=1.7, logit_bias=((3, 100.0),)
    )
    logits = torch.ones(1, VOCAB)
    process(logits, [0], [rules_of(params, [3, 3], 1)], [1])
    assert logits[0, 3] == -math.inf
