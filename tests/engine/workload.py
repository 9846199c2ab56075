"""Random workloads, run against the oracle with every invariant checked after every step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import numpy as np

from octavo.config import SchedulerConfig
from octavo.engine.core import EngineCore
from octavo.engine.invariants import check
from octavo.engine.scheduler import Scheduler
from octavo.engine.trace import LACKS, Tracer
from octavo.types import (
    AddRequest,
    SequenceOutput,
    StepOutputs,
    TokenLogprobs,
    TokenParams,
    TraceEvent,
)
from tests.engine.machine import VOCAB, Behaviour, Machine, random_behaviour
from tests.engine.oracle import ContentOracle, Expected, expect

MODES = [(1, 0), (2, 1), (2, 0), (4, 0), (4, 1), (3, 2)]
MAX_TURNS = 4000


def random_config(random: Random, seed: int) -> SchedulerConfig:
    depth, lookahead = MODES[seed % len(MODES)]

    def between(low: int, high: int) -> int:  # each octave as likely as the next
        return round(low * (high / low) ** random.random())

    block_size, max_model_len = between(1, 32), between(8, 160)
    budget = between(8, 512)
    if random.random() < 0.3:  # prompts take many steps, and are caught by all that happens
        max_model_len, budget = between(80, 160), between(8, 12)
    num_blocks = between(4, 256)
    if random.random() < 0.6:  # room for little more than one of the longest
        num_blocks = round(max_model_len * (1 + 2 * random.random()) / block_size)
    return SchedulerConfig(
        num_blocks=min(max(num_blocks, 4), 256),
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=between(1, 16),
        max_num_batched_tokens=budget,
        prefix_caching=random.random() < 0.65,
        chunked_prefill=random.random() < 0.7,
        policy=random.choice(["fcfs", "priority", "fair"]),
        depth=depth,
        lookahead=lookahead,
        enough_prompt=random.choice([0, 0, 1, 8]),
    )


@dataclass
class Life:
    """What was seen of one request so far."""

    expected: Expected
    behaviour: Behaviour
    new_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    outputs: int = 0
    aborted: bool = False
    trace: list[TraceEvent] = field(default_factory=list)


class Run:
    """One workload. All that is random comes from the seed."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.config = config = random_config(random, seed)
        self.machine = Machine(config.num_blocks, config.block_size, config.max_num_seqs)
        self.machine.raise_in_submit = random.random() < 0.5
        if random.random() < 0.3:
            self.machine.transient = {random.randrange(1, 60)}
        self.now = 1000.0
        self.traced = random.random() < 0.7
        self.scheduler = Scheduler(config, Tracer() if self.traced else None)
        self.core = EngineCore(self.scheduler, self.machine, clock=self.clock)
        self.oracle = ContentOracle(config)
        self.lives: dict[str, Life] = {}
        self.ended: list[str] = []
        self.twins: Counter[str] = Counter()  # second requests of an id in use
        self.sums: Counter[str] = Counter()
        self.turns = 0
        self.share_prepared = random.choice([0.0, 0.5, 0.9])
        self.share_scored = random.choice([0.0, 0.2, 0.8])  # of requests with prompt log-probs
        self.prefixes = [self.some_tokens(config.max_model_len) for _ in range(3)]

    def clock(self) -> float:
        self.now += 0.001
        return self.now

    def some_tokens(self, count: int) -> list[int]:
        return self.random.choices(range(VOCAB), k=count)

    # -- what happens --

    def go(self) -> None:
        random = self.random
        for _ in range(random.randrange(5, 60)):
            self.prepare()
            if random.random() < 0.25:
                for _ in range(random.randrange(1, 4)):
                    self.add_group()
            if random.random() < 0.12 and self.lives:
                self.abort()
            if random.random() < 0.03:
                assert self.core.control("reset_prefix_cache", {}) == {"reset": "true"}
            if random.random() < 0.03:
                self.now += random.random() * 3
            self.turn()
        while self.core.has_work():
            self.prepare()
            self.turn()
        self.check_end()

    def prepare(self) -> None:
        """Now and then the next step is planned before all that comes until it begins."""
        if self.random.random() < self.share_prepared and self.core.prepare():
            self.sums["prepared"] += 1
            check(self.scheduler)

    def add_group(self) -> None:
        random, config = self.random, self.config
        num = random.choice([1, 1, 1, 2, 3, 4])
        longest = random.choice([4, config.max_model_len // 2, config.max_model_len - 4])
        longest += 8 * (random.random() < 0.1)
        shared = random.choice(self.prefixes)[: random.randrange(longest + 1)]
        prompt = shared + self.some_tokens(random.randrange(longest + 1 - len(shared)))
        fields = {
            "arrival": self.now - random.random(),
            "group": f"g{len(self.lives)}" if num > 1 or random.random() < 0.1 else "",
            "emitted_ids": self.some_tokens(3) if random.random() < 0.05 else [],
            "priority": random.randrange(3),
            "deadline": self.now + random.random() * 4 if random.random() < 0.1 else 0.0,
            "cache_salt": random.choice(["", "", "salt"]),
            "adapter": random.choice(["", "", "french"]),
            "suspect": random.random() < 0.05,
            "tenant": random.choice(["", "crow", "heron"]),
            "weight": random.choice([0.5, 1.0, 3.0]),
        }
        for _ in range(num):
            seed = len(self.lives)
            known = len(prompt) + len(fields["emitted_ids"])
            behaviour = random_behaviour(random, known)
            request = AddRequest(f"r{seed}", prompt, self.some_params(seed), **fields)
            self.machine.behaviours[seed] = behaviour
            life = Life(expect(request, behaviour, config), behaviour)
            self.lives[request.id] = life
            self.oracle.add(life.expected)
            self.core.add(request)
            if random.random() < 0.03 and request.id in self.scheduler.by_id:
                self.twins[request.id] += 1
                self.core.add(AddRequest(request.id, [1, 2], TokenParams(3), self.now))

    def some_params(self, seed: int) -> TokenParams:
        random = self.random
        return TokenParams(
            max_tokens=random.choice([0, 1, 2, 8, 8, 30, 30, 200]),
            min_tokens=random.choice([0, 0, 0, 2, 5]),
            seed=seed,
            stop_ids=tuple(random.sample(range(VOCAB), random.choice([0, 1, 2, 6]))),
            presence_penalty=random.choice([0.0, 0.0, 0.5]),
            logprobs=random.choice([None, None, 0]),
            prompt_logprobs=0 if random.random() < self.share_scored else None,
        )

    def abort(self) -> None:
        """Live and ended ones, twice the same, and ids that never were."""
        ids = ["never seen", *self.random.choices(list(self.lives), k=2)]
        live = list(self.scheduler.by_id)
        if live:
            ids += [self.random.choice(live)] * self.random.choice([1, 2])
        for id in ids:
            if id in self.scheduler.by_id:
                self.lives[id].aborted = True
        self.core.abort(ids)

    def turn(self) -> None:
        self.turns += 1
        assert self.turns < MAX_TURNS, "no end in sight"
        had_work, began = self.core.has_work(), self.now
        outputs = self.core.step()
        assert (outputs is not None) == had_work, "work to do, but nothing was done"
        check(self.scheduler)
        self.check_content()
        for sequence in self.scheduler.by_id.values():
            assert not 0 < sequence.deadline <= began, f"{sequence.id} lives past its deadline"
            assert not self.lives[sequence.id].aborted, f"{sequence.id} lives past its abort"
        if outputs is not None:
            self.take(outputs)

    # -- what is seen --

    def take(self, outputs: StepOutputs) -> None:
        stats = outputs.stats
        for name in ("sampled_tokens", "prefix_queries", "prefix_hits", "preemptions"):
            self.sums[name] += getattr(stats, name)
        self.sums["recoveries"] += stats.recoveries
        assert stats.queued_tokens >= stats.waiting
        assert 0 <= stats.blocks_used + stats.blocks_cached <= stats.blocks_total
        for output in outputs.outputs:
            if "in use" in output.error:
                self.twins[output.id] -= 1
                continue
            self.take_one(output, self.lives[output.id])

    def take_one(self, output: SequenceOutput, life: Life) -> None:
        id, expected, first = output.id, life.expected, life.outputs == 0
        assert id not in self.ended, f"{id} goes on after its end"
        life.outputs += 1
        life.new_ids += output.new_ids
        life.logprobs += output.logprobs or []
        assert output.new_ids or output.reason, f"{id}: no news"
        so_far = expected.new_ids[: len(life.new_ids)]
        assert life.new_ids == so_far, f"{id} gave {life.new_ids}, alone it gives {so_far}"
        if expected.request.params.logprobs is not None:
            assert life.logprobs == expected.logprobs[: len(life.new_ids)], f"{id}: logprobs"
        else:
            assert not life.logprobs
        wanted = expected.prompt_logprobs if first and output.new_ids else None
        assert output.prompt_logprobs == wanted, f"{id}: prompt_logprobs"
        self.check_cached(output, expected, first)
        life.trace += output.trace
        self.check_trace(output, life)
        if output.reason is not None:
            self.check_reason(output, life)
            self.ended.append(id)

    def check_cached(self, output: SequenceOutput, expected: Expected, first: bool) -> None:
        cached, num_prompt = output.num_cached, len(expected.request.prompt_ids)
        assert first or not cached
        assert self.config.prefix_caching or not cached
        assert cached == 0 or cached % self.config.block_size == 0 or cached == num_prompt
        known = num_prompt + len(expected.request.emitted_ids)
        assert 0 <= cached <= min(num_prompt, max(known - 1, 0))
        self.sums["num_cached"] += cached
        self.sums["preempted"] += output.preemptions
        assert not (first and output.new_ids) or 1000 < output.scheduled_at <= self.now

    def check_trace(self, output: SequenceOutput, life: Life) -> None:
        """By the first token the events tell all of the prompt, once for each stay in a slot."""
        assert self.traced or not output.trace
        stays: list[list[TraceEvent]] = []
        for event in life.trace:
            assert 1000 < event.at <= self.now
            if event.kind == "queue":
                since, *waits = event.values
                assert len(waits) == 1 + 2 * len(LACKS)
                assert min(waits) >= 0
                assert sum(waits[: 1 + len(LACKS)]) <= event.at - since + 1e-6
                stays.append([])
            elif stays:
                stays[-1].append(event)
        if not (self.traced and output.new_ids):
            return
        assert len(stays) == 1 + sum(e.kind == "preempted" for e in life.trace)
        prefix = next(event for event in stays[0] if event.kind == "prefix")
        assert 0 <= prefix.values[0] <= prefix.values[1] < len(life.expected.tokens)
        chunks = [event.values for event in stays[-1] if event.kind == "chunk"]
        ends = [start + length for start, length, *_ in chunks]
        assert [start for start, *_ in chunks[1:]] == ends[:-1], "the chunks have gaps"
        assert ends[-1] <= len(life.expected.request.prompt_ids) + 3 + len(life.new_ids)
        if len(stays) == 1:
            assert chunks[0][0] == prefix.values[0]

    def check_reason(self, output: SequenceOutput, life: Life) -> None:
        id, expected = output.id, life.expected
        if output.reason == "abort":
            assert life.aborted, f"{id} was not aborted"
        elif output.reason == "timeout":
            assert 0 < expected.request.deadline <= self.now, f"{id} had time left"
        else:
            assert output.reason == expected.reason, (
                f"{id} ended by {output.reason} {output.error}, alone by {expected.reason}"
            )
            assert life.new_ids == expected.new_ids, f"{id} ended early"
        assert bool(output.error) == (output.reason == "error")
        stop_id = life.new_ids[-1] if output.reason == "stop" else None
        assert output.stop_id == stop_id

    def check_content(self) -> None:
        """Every cell of a registered block holds what its hash names."""
        if self.machine.failed_epoch == self.scheduler.epoch:
            return  # the failed step has not landed: the host cannot know yet
        registered = self.scheduler.pool.block_of
        if not registered:
            return
        unknown = registered.keys() - self.oracle.named.keys()
        assert not unknown, f"blocks {[registered[d] for d in unknown]}: hashes of nothing known"
        named = np.stack([self.oracle.named[digest] for digest in registered])
        held = self.machine.contents(list(registered.values()))
        assert (held == named).all(), f"blocks do not hold what they are named: {registered}"

    def check_end(self) -> None:
        scheduler = self.scheduler
        assert sorted(self.ended) == sorted(self.lives), "a request never ended"
        assert not +self.twins, "a second request of an id was dropped"
        assert scheduler.pool.num_used == 0
        assert len(scheduler.free_slots) == self.config.max_num_seqs
        queues = [scheduler.running, scheduler.leaving, scheduler.suspects, scheduler.filling]
        assert [*queues, len(scheduler.waiting), len(scheduler.steps)] == [[], [], [], [], 0, 0]
        assert scheduler.waiting.num_tokens == 0
        sums, given = self.sums, sum(len(life.new_ids) for life in self.lives.values())
        assert sums["sampled_tokens"] == given
        assert sums["prefix_hits"] == sums["num_cached"] <= sums["prefix_queries"]
        assert sums["preemptions"] == sums["preempted"]
        assert sums["recoveries"] == self.machine.num_failed


def run_seed(seed: int) -> Run:
    """Raises AssertionError or MachineFault, with the line that repeats it."""
    run = Run(seed)
    try:
        run.go()
    except BaseException as error:
        error.add_note(
            f"seed {seed}, turn {run.turns}, {run.config}\n"
            f"again: pytest tests/engine/test_fuzz.py --first-seed {seed} --seeds 1"
        )
        raise
    return run
