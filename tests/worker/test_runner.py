"""Random plans on the fake model, against one sequence at a time computed naively."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from octavo.kernels.ops import SampleRows
from octavo.sampling.processors import NO_TOKEN
from octavo.types import (
    FROM_DEVICE,
    LAST_CHUNK,
    PROMPT_LOGPROBS,
    SAMPLE,
    Admit,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TokenParams,
    pack,
    unpack,
)
from octavo.worker.choose import NOT_FINITE, PROMPT_NOT_FINITE, not_finite
from octavo.worker.runner import Runner
from tests.worker import naive
from tests.worker.fakes import VOCAB, FakeModel, fake_sample, make_runner
from tests.worker.test_processors import random_params

BLOCKS, BLOCK_SIZE, SLOTS = 60, 4, 8


@dataclass
class Live:
    """A sequence as a core would keep it."""

    prompt: list[int]
    params: TokenParams
    tokens: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    computed: int = 0
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    fresh: bool = False  # admitted, not yet told to the worker
    bad: str = ""

    @property
    def finished(self) -> bool:
        return bool(self.bad) or len(self.tokens) >= len(self.prompt) + self.params.max_tokens


class Driver:
    """Makes valid random plans: chunks, mixed rows, preemption, shuffled slots and blocks."""

    def __init__(self, rng: random.Random, runner: Runner, sequences: list[Live]) -> None:
        self.rng, self.runner, self.sequences = rng, runner, sequences
        self.slots = rng.sample(range(SLOTS), SLOTS)
        self.blocks = rng.sample(range(BLOCKS), BLOCKS)
        self.number = 0

    def run(self) -> None:
        while any(not s.finished for s in self.sequences):
            self.step()

    def step(self) -> None:
        self._enter_or_leave()
        rows = [s for s in self.sequences if s.slot >= 0 and self.rng.random() < 0.8]
        lengths = {id(s): self._length(s) for s in rows}
        rows = [s for s in rows if self._grow(s, lengths[id(s)])]
        if not rows:
            return
        self.rng.shuffle(rows)
        rows.sort(key=lambda s: lengths[id(s)] != 1)
        plan = self._plan(rows, [lengths[id(s)] for s in rows])
        self._commit(plan, rows, self.runner.step(plan))

    def _enter_or_leave(self) -> None:
        for sequence in self.sequences:
            if sequence.slot < 0 and not sequence.finished and self.slots:
                if self.rng.random() < 0.7:
                    sequence.slot, sequence.fresh, sequence.computed = self.slots.pop(), True, 0
            elif sequence.slot >= 0 and (sequence.finished or self.rng.random() < 0.03):
                self._release(sequence)

    def _release(self, sequence: Live) -> None:
        self.slots.insert(self.rng.randint(0, len(self.slots)), sequence.slot)
        for block in sequence.blocks:
            self.blocks.insert(self.rng.randint(0, len(self.blocks)), block)
        sequence.slot, sequence.blocks, sequence.fresh = -1, [], False

    def _length(self, sequence: Live) -> int:
        left = len(sequence.tokens) - sequence.computed
        return left if self.rng.random() < 0.4 else self.rng.randint(1, min(left, 7))

    def _grow(self, sequence: Live, length: int) -> bool:
        needed = -(-(sequence.computed + length) // BLOCK_SIZE) - len(sequence.blocks)
        return length > 0 and needed <= len(self.blocks) - 10

    def _plan(self, rows: list[Live], lengths: list[int]) -> StepPlan:
        tokens: list[int] = []
        flags: list[int] = []
        attached: list[tuple[int, int, int]] = []
        admits: list[Admit] = []
        for row, (sequence, length) in enumerate(zip(rows, lengths, strict=True)):
            end = sequence.computed + length
            flag = SAMPLE if end == len(sequence.tokens) else 0
            # The slot knows its last token if that was sampled in this stay.
            decodes = length == 1 and end == len(sequence.tokens) > len(sequence.prompt)
            if decodes and not sequence.fresh and sequence.computed >= len(sequence.prompt):
                known = self.runner._slots.last_token[sequence.slot]
                if known == sequence.tokens[-1] and self.rng.random() < 0.5:
                    flag |= FROM_DEVICE
            if sequence.params.prompt_logprobs is not None:
                flag |= PROMPT_LOGPROBS if sequence.computed < len(sequence.prompt) else 0
            flag |= LAST_CHUNK if sequence.computed < len(sequence.prompt) <= end else 0
            flags.append(flag)
            if not flag & FROM_DEVICE:
                tokens += sequence.tokens[sequence.computed : end]
            while len(sequence.blocks) * BLOCK_SIZE < end:
                block = self.blocks.pop()
                attached.append((row, len(sequence.blocks), block))
                sequence.blocks.append(block)
            if sequence.fresh:
                history = pack(sequence.tokens) if sequence.params.needs_history else b""
                admits.append(Admit(sequence.slot, len(sequence.prompt), sequence.params, history))
                sequence.fresh = False
        self.number += 1
        return StepPlan(
            step=self.number,
            epoch=0,
            slots=pack(s.slot for s in rows),
            starts=pack(s.computed for s in rows),
            lengths=pack(lengths),
            flags=bytes(flags),
            tokens=pack(tokens),
            block_rows=pack(a[0] for a in attached),
            block_at=pack(a[1] for a in attached),
            block_ids=pack(a[2] for a in attached),
            admits=tuple(admits),
        )

    def _commit(self, plan: StepPlan, rows: list[Live], result: StepResult) -> None:
        assert result.step == plan.step
        sampled = list(unpack(result.tokens))
        bad = dict(zip(result.bad, result.bad_reasons, strict=True))
        index = 0
        for row, sequence in enumerate(rows):
            start = sequence.computed
            sequence.computed += unpack(plan.lengths)[row]
            for offset, value in enumerate(result.prompt_logprobs.get(row, [])):
                sequence.prompt_logprobs[start + 1 + offset] = value
            if not plan.flags[row] & SAMPLE:
                continue
            if index in bad:
                sequence.bad = bad[index]
                assert index not in result.logprobs
            else:
                sequence.tokens.append(sampled[index])
                if index in result.logprobs:
                    sequence.logprobs.append(result.logprobs[index])
            index += 1
        assert index == len(sampled)


def naive_tokens(model: FakeModel, sequence: Live) -> list[int]:
    """The tokens that the sequence must have got, one by one."""
    tokens = list(sequence.prompt)
    params = sequence.params
    while len(tokens) < len(sequence.prompt) + params.max_tokens:
        logits = naive.change(model.logits_of(tokens), params, tokens, len(sequence.prompt))
        settings = SampleRows(
            temperature=torch.tensor([params.temperature]),
            top_k=torch.tensor([0]),
            top_p=torch.tensor([1.0]),
            min_p=torch.tensor([0.0]),
            seed=torch.tensor([np.uint64(params.seed).astype(np.int64)]),
            position=torch.tensor([len(tokens)]),
        )
        tokens.append(int(fake_sample(torch.from_numpy(logits)[None], settings)[0]))
    return tokens


def random_sequence(rng: random.Random) -> Live:
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 25))]
    plain = TokenParams(
        max_tokens=rng.randint(1, 15),
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.getrandbits(64),
        logprobs=rng.choice([None, None, 0, 3, -1]),
        prompt_logprobs=rng.choice([None, None, 0, 2]),
        logprob_ids=rng.choice([(), (1, 2)]),
    )
    if rng.random() < 0.5:
        return Live(prompt, plain, list(prompt))
    rules = random_params(rng, prompt, VOCAB)
    params = TokenParams(
        max_tokens=plain.max_tokens,
        temperature=plain.temperature,
        seed=plain.seed,
        logprobs=plain.logprobs,
        min_tokens=rng.randint(0, 6),
        stop_ids=rules.stop_ids,
        presence_penalty=rules.presence_penalty,
        frequency_penalty=rules.frequency_penalty,
        repetition_penalty=rules.repetition_penalty,
        logit_bias=rules.logit_bias,
        bad_words=rules.bad_words,
        allowed_ids=tuple(rng.sample(range(VOCAB), 15)) if rng.random() < 0.3 else (),
    )
    return Live(prompt, params, list(prompt))


def check(model: FakeModel, sequence: Live) -> None:
    prompt, params = sequence.prompt, sequence.params
    assert sequence.tokens == naive_tokens(model, sequence)
    output = sequence.tokens[len(prompt) :]
    asked = params.logprobs is not None or params.logprob_ids
    assert len(sequence.logprobs) == (len(output) if asked else 0)
    for index, got in enumerate(sequence.logprobs):
        before = sequence.tokens[: len(prompt) + index]
        raw = model.logits_of(before)
        naive.check_logprobs(got, raw, output[index], params.logprobs or 0, params.logprob_ids)
    if params.prompt_logprobs is None:
        assert not sequence.prompt_logprobs
        return
    assert sorted(sequence.prompt_logprobs) == list(range(1, len(prompt)))
    for position, got in sequence.prompt_logprobs.items():
        raw = model.logits_of(prompt[:position])
        naive.check_logprobs(got, raw, prompt[position], params.prompt_logprobs)


@pytest.mark.parametrize("seed", range(25))
def test_random_plans_equal_one_sequence_at_a_time(seed: int) -> None:
    rng = random.Random(seed)
    model = FakeModel(seed)
    runner = make_runner(model, num_blocks=BLOCKS, block_size=BLOCK_SIZE, slots=SLOTS)
    sequences = [random_sequence(rng) for _ in range(rng.randint(1, 12))]
    Driver(rng, runner, sequences).run()
    for sequence in sequences:
        assert not sequence.bad, f"seed {seed}"
        check(model, sequence)


@pytest.mark.parametrize("seed", range(6))
def test_a_row_that_is_not_finite_harms_only_itself(seed: int) -> None:
    rng = random.Random(seed)
    model = FakeModel(seed)
    model.poison = {VOCAB - 1}
    sequences = [random_sequence(rng) for _ in range(8)]
    poisoned = sequences[: rng.randint(1, 3)]
    for sequence in sequences:
        sequence.prompt = [t % (VOCAB - 1) for t in sequence.prompt]
        if any(sequence is one for one in poisoned):
            sequence.prompt[rng.randrange(len(sequence.prompt))] = VOCAB - 1
        else:
            # Others must not draw the poisonous token themselves.
            sequence.params = _forbid(sequence.params, VOCAB - 1)
        sequence.tokens = list(sequence.prompt)
    runner = make_runner(model, num_blocks=BLOCKS, block_size=BLOCK_SIZE, slots=SLOTS)
    Driver(rng, runner, sequences).run()
    for sequence in sequences:
        if any(sequence is one for one in poisoned):
            assert sequence.bad in (NOT_FINITE, PROMPT_NOT_FINITE)
            assert sequence.tokens == sequence.prompt
        else:
            assert not sequence.bad
            check(model, sequence)


def _forbid(params: TokenParams, token: int) -> TokenParams:
    return TokenParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        seed=params.seed,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        bad_words=((token,),),
    )


def one_row(tokens: list[int], params: TokenParams, flags: int = SAMPLE) -> StepPlan:
    blocks = -(-len(tokens) // BLOCK_SIZE)
    return StepPlan(
        step=1,
        epoch=0,
        slots=pack([2]),
        starts=pack([0]),
        lengths=pack([len(tokens)]),
        flags=bytes([flags]),
        tokens=pack(tokens),
        block_rows=pack([0] * blocks),
        block_at=pack(range(blocks)),
        block_ids=pack(range(blocks)),
        admits=(Admit(2, len(tokens), params, pack(tokens)),),
    )


def test_a_row_that_may_choose_nothing_says_so() -> None:
    runner = make_runner(FakeModel(1), num_blocks=8, block_size=BLOCK_SIZE)
    params = TokenParams(max_tokens=4, allowed_ids=(3, 4), bad_words=((3,), (4,)), logprobs=2)
    result = runner.step(one_row([1, 2, 3], params))
    assert result.bad == (0,)
    assert result.bad_reasons == (NO_TOKEN,)
    assert result.logprobs == {}


def test_a_prompt_position_that_is_not_finite_makes_the_row_bad() -> None:
    """Even where the sampled position itself is finite."""
    model = FakeModel(1)
    model.poison_head = {9}
    runner = make_runner(model, num_blocks=8, block_size=BLOCK_SIZE)
    params = TokenParams(max_tokens=4, prompt_logprobs=1)
    result = runner.step(one_row([1, 9, 3], params, SAMPLE | PROMPT_LOGPROBS))
    assert result.bad_reasons == (PROMPT_NOT_FINITE,)
    assert all(np.isfinite(got.values).all() for got in result.prompt_logprobs[0])


def test_an_infinite_logit_is_found_and_a_large_finite_one_is_not_mistaken() -> None:
    logits = torch.zeros(5, 100)
    logits[1, 7] = torch.inf
    logits[2, 3], logits[2, 4] = torch.inf, -torch.inf
    logits[3, :] = 3e38  # the sum overflows
    logits[4, 99] = torch.nan
    assert not_finite(logits) == [1, 2, 4]


def test_cached_settings_follow_a_new_sequence_in_the_slot() -> None:
    runner = make_runner(FakeModel(1), num_blocks=8, block_size=BLOCK_SIZE)
    slots = runner._slots
    at, position = np.array([2], np.int32), np.array([5], np.int64)
    for temperature, seed in ((0.5, 2**64 - 1), (1.5, 7)):
        slots.admit(Admit(2, 1, TokenParams(max_tokens=1, temperature=temperature, seed=seed)))
        for _ in range(2):
            got = slots.settings(at, position)
            assert got.temperature.tolist() == [temperature]
            assert got.seed.numpy().view(np.uint64).tolist() == [seed]
            assert got.position.tolist() == [5]
