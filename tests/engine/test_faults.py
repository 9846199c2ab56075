"""Deliberate faults, each of which the harness must detect: the test of the test.

Each fault changes one rule of the engine by patching it. Seeds are tried until one run fails; a
fault that outlives them all means that the harness has gone blind there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from octavo.engine import scheduler as scheduler_module
from octavo.engine import sequence as sequence_module
from octavo.engine.block_pool import BlockPool, chain_digest, root_digest
from octavo.engine.scheduler import Scheduler
from octavo.engine.sequence import Columns, Draft, Sequence
from octavo.types import FROM_DEVICE, AddRequest, StepPlan
from tests.engine.workload import Run

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]
FAULTS: dict[str, Fault] = {}
MAX_SEEDS = 150


def fault(seed_it: Fault) -> Fault:
    FAULTS[seed_it.__name__] = seed_it
    return seed_it


def around(patch: Patch, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    patch.setattr(owner, name, make(getattr(owner, name)))


# -- blocks and slots --


@fault
def release_in_flight(patch: Patch) -> None:
    def end(self: Scheduler, sequence: Sequence, reason: Any) -> None:
        original(self, sequence, reason)
        if sequence in self.leaving:
            self.leaving.remove(sequence)
            self._release(sequence)

    original = Scheduler._end
    patch.setattr(Scheduler, "_end", end)


@fault
def preempt_in_flight(patch: Patch) -> None:
    def make_room(self: Scheduler, count: int, sequence: Sequence, draft: Draft) -> bool:
        while self.pool.num_free < count:
            draft.tight = True
            if self.running[-1] is sequence:
                return False
            self._preempt(self.running[-1])
        return True

    patch.setattr(Scheduler, "_make_room", make_room)


@fault
def double_give(patch: Patch) -> None:
    def give(self: BlockPool, blocks: list[int]) -> None:
        original(self, blocks)
        original(self, [b for b in blocks[:1] if self.refs[b]])

    original = BlockPool.give
    patch.setattr(BlockPool, "give", give)


@fault
def blocks_never_given(patch: Patch) -> None:
    around(patch, BlockPool, "give", lambda give: lambda self, blocks: give(self, blocks[:-1]))


@fault
def share_without_owner(patch: Patch) -> None:
    patch.setattr(BlockPool, "share", lambda self, blocks: None)


@fault
def slot_not_cleared(patch: Patch) -> None:
    def clear(self: Columns, slot: int) -> None:
        self.in_flight[slot] = self.pending[slot] = 0

    patch.setattr(Columns, "clear", clear)


@fault
def blocks_one_too_few(patch: Patch) -> None:
    around(
        patch, Scheduler, "_reach", lambda reach: lambda self, s, end, d: reach(self, s, end - 1, d)
    )


@fault
def blocks_not_told_to_the_worker(patch: Patch) -> None:
    def attach(self: Scheduler, sequence: Sequence, blocks: list[int], draft: Draft) -> None:
        before = list(draft.attached)
        original(self, sequence, blocks, draft)
        if len(before) > 1:
            draft.attached[:] = before

    original = Scheduler._attach
    patch.setattr(Scheduler, "_attach", attach)


@fault
def preempted_keeps_its_progress(patch: Patch) -> None:
    def forget(self: Sequence) -> None:
        self.slot = -1
        self.blocks = []

    patch.setattr(Sequence, "forget_progress", forget)  # prompt log-probs are assembled twice


# -- prefix cache --


@fault
def no_parent_in_the_chain(patch: Patch) -> None:
    patch.setattr(sequence_module, "chain_digest", lambda parent, t: chain_digest(b"", t))


@fault
def forgotten_salt(patch: Patch) -> None:
    patch.setattr(scheduler_module, "root_digest", lambda s, a, g: root_digest("", a, g))


@fault
def forgotten_adapter(patch: Patch) -> None:
    patch.setattr(scheduler_module, "root_digest", lambda s, a, g: root_digest(s, "", g))


@fault
def forgotten_group(patch: Patch) -> None:
    patch.setattr(scheduler_module, "root_digest", lambda s, a, g: root_digest(s, a, ""))


@fault
def hit_covers_the_whole_prompt(patch: Patch) -> None:
    def match(self: Scheduler, sequence: Sequence) -> list[int]:
        if sequence.root is None or sequence.prompt_logprobs is not None:
            return []
        size = self.config.block_size
        return self.pool.match(sequence.digests(len(sequence.tokens) // size, size))

    patch.setattr(Scheduler, "_match", match)


@fault
def hit_though_prompt_logprobs_are_wanted(patch: Patch) -> None:
    def match(self: Scheduler, sequence: Sequence) -> list[int]:
        if sequence.root is None:
            return []
        size = self.config.block_size
        return self.pool.match(sequence.digests((len(sequence.tokens) - 1) // size, size))

    patch.setattr(Scheduler, "_match", match)


@fault
def hash_of_unknown_tokens(patch: Patch) -> None:
    patch.setattr(
        Scheduler,
        "_num_known_computed",
        lambda self, s: int(self.columns.computed[s.slot]) + self.config.block_size - 1,
    )


@fault
def hash_before_computing(patch: Patch) -> None:
    patch.setattr(Scheduler, "_num_known_computed", lambda self, s: len(s.tokens))


@fault
def taken_block_keeps_its_hash(patch: Patch) -> None:
    def take(self: BlockPool, count: int) -> list[int]:
        names = dict(self.digest_of)
        blocks = original(self, count)
        for block in blocks:
            if block in names:
                self.digest_of[block] = names[block]
                self.block_of[names[block]] = block
        return blocks

    original = BlockPool.take
    patch.setattr(BlockPool, "take", take)


@fault
def cache_outlives_a_failed_step(patch: Patch) -> None:
    def recover(self: Scheduler, error: str) -> Any:
        forget = self.pool.forget_all
        self.pool.forget_all = lambda: None  # type: ignore[method-assign]
        try:
            return original(self, error)
        finally:
            self.pool.forget_all = forget  # type: ignore[method-assign]

    original = Scheduler.recover
    patch.setattr(Scheduler, "recover", recover)


@fault
def blocks_kept_with_caching_off(patch: Patch) -> None:
    def make(self: BlockPool, num_blocks: int, block_size: int, *, keep: bool) -> None:
        original(self, num_blocks, block_size, keep=True)

    original = BlockPool.__init__
    patch.setattr(BlockPool, "__init__", make)


# -- steps --


@fault
def lookahead_off_by_one(patch: Patch) -> None:
    def decodes(self: Scheduler, draft: Draft) -> None:
        config = self.config
        self.config = replace(config, lookahead=config.lookahead + 1)
        original(self, draft)
        self.config = config

    original = Scheduler._plan_decodes
    patch.setattr(Scheduler, "_plan_decodes", decodes)


@fault
def limit_off_by_one(patch: Patch) -> None:
    def enter(self: Scheduler, sequence: Sequence, hit: list[int], draft: Draft) -> None:
        sequence.limit += 1
        original(self, sequence, hit, draft)

    original = Scheduler._enter
    patch.setattr(Scheduler, "_enter", enter)


@fault
def budget_off_by_one(patch: Patch) -> None:
    def waiting(self: Scheduler, draft: Draft) -> None:
        draft.budget += 1
        original(self, draft)

    original = Scheduler._plan_waiting
    patch.setattr(Scheduler, "_plan_waiting", waiting)


@fault
def unknown_token_sent_by_the_host(patch: Patch) -> None:
    def seal(self: Draft, *args: Any, **fields: Any) -> Any:
        self.pending = self.pending * 0
        return original(self, *args, **fields)

    original = Draft.seal
    patch.setattr(Draft, "seal", seal)


@fault
def rows_in_no_order(patch: Patch) -> None:
    def seal(self: Draft, *args: Any, **fields: Any) -> Any:
        step = original(self, *args, **fields)
        if FROM_DEVICE & step.plan.flags[0] or step.plan.num_rows < 2:
            return step
        fields_of = {name: getattr(step.plan, name) for name in StepPlan.__struct_fields__}
        fields_of["starts"] = step.plan.starts[4:] + step.plan.starts[:4]
        step.plan = StepPlan(**fields_of)
        return step

    original = Draft.seal
    patch.setattr(Draft, "seal", seal)


@fault
def prompt_cut_with_chunking_off(patch: Patch) -> None:
    """Not seen by tokens: the plan checks must see it."""

    def waiting(self: Scheduler, draft: Draft) -> None:
        config = self.config
        self.config = replace(config, chunked_prefill=True)
        original(self, draft)
        self.config = config

    original = Scheduler._plan_waiting
    patch.setattr(Scheduler, "_plan_waiting", waiting)


# -- ends --


@fault
def dropped_abort(patch: Patch) -> None:
    def abort(self: Scheduler, ids: list[str]) -> None:
        original(self, [id for id in ids if id in self.by_id and self.by_id[id].slot < 0])

    original = Scheduler.abort
    patch.setattr(Scheduler, "abort", abort)


@fault
def deadline_ignored(patch: Patch) -> None:
    patch.setattr(Scheduler, "_expire", lambda self, now: None)


@fault
def equal_id_replaces_the_first(patch: Patch) -> None:
    def problem(self: Scheduler, request: AddRequest) -> str:
        text = original(self, request)
        return "" if "in use" in text else text

    original = Scheduler._problem
    patch.setattr(Scheduler, "_problem", problem)


@fault
def min_tokens_ignored(patch: Patch) -> None:
    patch.setattr(Sequence, "stops_at", lambda self, token: token in self.stop_ids)


@fault
def token_after_the_end(patch: Patch) -> None:
    def accept(self: Scheduler, step: Any, tokens: list[int], result: Any) -> int:
        for sequence in step.sampled:
            if sequence.reason is not None:
                self._news.append(sequence.output([1]))
        return int(original(self, step, tokens, result))

    original = Scheduler._accept
    patch.setattr(Scheduler, "_accept", accept)


@fault
def whole_failed_step_ends(patch: Patch) -> None:
    def recover(self: Scheduler, error: str) -> Any:
        for sequence in self.steps[0].rows:
            if sequence.reason is None and not sequence.suspect:
                sequence.suspect = True
                self.suspects.append(sequence)
        return original(self, error)

    original = Scheduler.recover
    patch.setattr(Scheduler, "recover", recover)


@fault
def epoch_stays(patch: Patch) -> None:
    def recover(self: Scheduler, error: str) -> Any:
        try:
            return original(self, error)
        finally:
            self.epoch -= 1

    original = Scheduler.recover
    patch.setattr(Scheduler, "recover", recover)


@fault
def suspects_run_together(patch: Patch) -> None:
    def plan(self: Scheduler, draft: Draft) -> None:
        self._plan_decodes(draft)
        self._plan_filling(draft)
        self._plan_waiting(draft)

    patch.setattr(Scheduler, "_plan_suspect", plan)


@fault
def row_that_is_not_finite_goes_on(patch: Patch) -> None:
    def accept(self: Scheduler, step: Any, tokens: list[int], result: Any) -> int:
        fields = {name: getattr(result, name) for name in result.__struct_fields__}
        return int(original(self, step, tokens, type(result)(**fields | {"bad": ()})))

    original = Scheduler._accept
    patch.setattr(Scheduler, "_accept", accept)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_detected(name: str, monkeypatch: Patch) -> None:
    FAULTS[name](monkeypatch)
    for seed in range(MAX_SEEDS):
        try:
            Run(seed).go()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            return
    pytest.fail(f"{MAX_SEEDS} workloads did not see the fault {name}")
