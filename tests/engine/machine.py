"""A paged machine without arithmetic: the worker of the fuzz harness.

A cell of its memory holds a token, the position it was stored for, and a checksum of all that came
before it, read back through the block table. The next token is a checksum of the whole context. So
a wrong block, a block given away too early, or a prefix shared wrongly shows as a wrong token or
as a cell that does not hold what was asked for. `context_of` and `choose` are the same "model"
for a sequence alone; the oracle uses them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

import numpy as np

from octavo.types import (
    FROM_DEVICE,
    LAST_CHUNK,
    PROMPT_LOGPROBS,
    SAMPLE,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TokenParams,
    WorkerInfo,
    pack,
    unpack,
)

VOCAB = 50
WEIGHTS = np.random.default_rng(7).integers(1, 2**31, 4096)


class MachineFault(BaseException):
    """The plan was wrong. Not an Exception, so that no recovery can hide it."""


class Injected(Exception):
    """A step fails on purpose."""


@dataclass(frozen=True)
class Behaviour:
    """What goes wrong with a request; positions are those of input tokens."""

    poison_at: int | None = None  # a step that computes this position raises
    bad_at: int | None = None  # logits at this position are not finite
    unmasked: bool = False  # stop ids are sampled even before min_tokens


SOUND = Behaviour()


def must(condition: object, text: str) -> None:
    if not condition:
        raise MachineFault(text)


def contexts_of(tokens: np.ndarray, adapter: str) -> np.ndarray:
    """The checksum after each position."""
    start = sum(adapter.encode()) * 7919
    return start + np.cumsum(tokens.astype(np.int64) * WEIGHTS[: len(tokens)])


def choose(context: int, params: TokenParams, num_output: int, behaviour: Behaviour) -> int:
    """The token that follows, as the `num_output`-th of the output."""
    token = context % VOCAB
    if not behaviour.unmasked and num_output < params.min_tokens:
        while token in params.stop_ids:
            token = (token + 1) % VOCAB
    return token


def score(token: int, context: int) -> TokenLogprobs:
    return TokenLogprobs([token], [-float(context % 1000)], 1)


@dataclass
class Slot:
    num_prompt: int
    params: TokenParams
    adapter: str
    history: list[int]
    table: list[int] = field(default_factory=list)
    computed: int = -1  # unknown until the first row: a prefix may have been found
    last: int = -1


@dataclass
class Row:
    slot: Slot
    start: int
    end: int
    flags: int


class Done:
    def __init__(self, result: StepResult | None, error: Exception | None = None) -> None:
        self._result, self._error = result, error

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class Machine:
    """An executor that computes in `submit`; results are handed out later, by their handles."""

    def __init__(self, num_blocks: int, block_size: int, num_slots: int) -> None:
        self.block_size = block_size
        self.memory = np.full((3, num_blocks * block_size), -1, np.int64)
        self.tokens, self.positions, self.contexts = self.memory
        self.slots: list[Slot | None] = [None] * num_slots
        self.behaviours: dict[int, Behaviour] = {}  # by seed
        self.transient: set[int] = set()  # steps that fail once, if they have several rows
        self.raise_in_submit = False
        self.failed_epoch = -1
        self.num_failed = 0
        self.last_step = 0
        self.is_alive = True
        self.log: deque[StepPlan] = deque(maxlen=4)

    def start(self) -> WorkerInfo:
        raise NotImplementedError

    def alive(self) -> bool:
        return self.is_alive

    def close(self) -> None:
        self.is_alive = False

    def control(self, op: str, **args: str) -> dict[str, str]:
        return {"op": op, **args}

    def prepare(self, plan: StepPlan) -> None:
        must(plan.step > self.last_step, "a step is prepared that has been")
        must(not plan.admits, "a sequence enters before it is submitted")

    def submit(self, plan: StepPlan) -> Done:
        self.log.append(plan)
        if plan.epoch == self.failed_epoch:
            return Done(None, Injected("void"))
        must(plan.epoch > self.failed_epoch, "epoch went back")
        must(plan.step > self.last_step, "steps out of order")
        self.last_step = plan.step
        try:
            return Done(self._step(plan))
        except Injected as error:
            self.failed_epoch = plan.epoch
            self.num_failed += 1
            self.slots = [None] * len(self.slots)
            if self.raise_in_submit:
                raise
            return Done(None, error)
        except Exception as error:
            raise MachineFault(f"{type(error).__name__}: {error}") from error

    def contents(self, blocks: list[int]) -> np.ndarray:
        """[N, 3, block_size]: tokens, positions and contexts of blocks."""
        cells = self.memory.reshape(3, -1, self.block_size)[:, blocks]
        return cells.transpose(1, 0, 2)

    def _step(self, plan: StepPlan) -> StepResult:
        rows = self._read(plan)
        for row in rows:
            poison = self._behaviour(row).poison_at
            if poison is not None and row.end > poison:
                raise Injected(f"poisoned {row.slot.params.seed}")
        if plan.step in self.transient and len(rows) > 1:
            raise Injected("transient")
        self._store(plan, rows)
        # All rows are stored before any reads, as in a layer of a real model.
        known = [self._context(row) for row in rows]
        for row in rows:
            self._check_context(row)
        return self._sample(plan, rows, known)

    def _read(self, plan: StepPlan) -> list[Row]:
        for admit in plan.admits:
            self.slots[admit.slot] = Slot(
                admit.num_prompt, admit.params, admit.adapter, list(unpack(admit.history))
            )
            must(bool(admit.history) == admit.params.needs_history, "history")
        slots, rows = list(unpack(plan.slots)), []
        for index, start, length, flags in zip(
            slots, unpack(plan.starts), unpack(plan.lengths), plan.flags, strict=True
        ):
            slot = self.slots[index]
            if slot is None:
                raise MachineFault("a row of a slot that nothing entered")
            must(length > 0, "an empty row")
            must(slot.computed in (-1, start), f"starts at {start}, computed {slot.computed}")
            rows.append(Row(slot, start, start + length, flags))
            last = start < slot.num_prompt <= start + length
            must(bool(flags & LAST_CHUNK) == last, "LAST_CHUNK")
        for row, at, block in zip(
            unpack(plan.block_rows), unpack(plan.block_at), unpack(plan.block_ids), strict=True
        ):
            must(at == len(rows[row].slot.table), "block tables are append-only")
            rows[row].slot.table.append(block)
        return rows

    def _cells(self, row: Row, start: int, end: int) -> np.ndarray:
        at = np.arange(start, end)
        table = np.array(row.slot.table)
        must(end <= len(table) * self.block_size, "computes beyond its blocks")
        return table[at // self.block_size] * self.block_size + at % self.block_size

    def _store(self, plan: StepPlan, rows: list[Row]) -> None:
        given = iter(unpack(plan.tokens))
        written: set[int] = set()
        for row in rows:
            count = row.end - row.start
            if row.flags & FROM_DEVICE:
                must(count == 1 and row.slot.last >= 0, "FROM_DEVICE without a token")
                tokens = [row.slot.last]
            else:
                tokens = [next(given) for _ in range(count)]
                if row.slot.last >= 0:
                    must(tokens == [row.slot.last], "not the token that was sampled")
            row.slot.computed = row.end
            history = row.slot.history[row.start : row.end]
            must(tokens[: len(history)] == history, "history differs from the tokens")
            cells = self._cells(row, row.start, row.end)
            must(written.isdisjoint(cells.tolist()), "two rows write one cell")
            written.update(cells.tolist())
            self.tokens[cells] = tokens
            self.positions[cells] = np.arange(row.start, row.end)
            self.contexts[cells] = -1
        must(next(given, None) is None, "tokens left over")

    def _context(self, row: Row) -> np.ndarray:
        cells = self._cells(row, 0, row.end)
        must((self.positions[cells] == np.arange(row.end)).all(), "a cell of another position")
        contexts = contexts_of(self.tokens[cells], row.slot.adapter)
        self.contexts[cells[row.start :]] = contexts[row.start :]
        return contexts

    def _check_context(self, row: Row) -> None:
        cells = self._cells(row, 0, row.end)
        contexts = contexts_of(self.tokens[cells], row.slot.adapter)
        must((self.contexts[cells] == contexts).all(), "a cell of another context")

    def _behaviour(self, row: Row) -> Behaviour:
        return self.behaviours.get(row.slot.params.seed, SOUND)

    def _sample(self, plan: StepPlan, rows: list[Row], known: list[np.ndarray]) -> StepResult:
        tokens: list[int] = []
        logprobs: dict[int, TokenLogprobs] = {}
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        bad: list[int] = []
        for index, (row, contexts) in enumerate(zip(rows, known, strict=True)):
            slot, behaviour = row.slot, self._behaviour(row)
            if row.flags & PROMPT_LOGPROBS:
                must(slot.params.prompt_logprobs is not None, "PROMPT_LOGPROBS not asked for")
                end = min(row.end, slot.num_prompt - 1)
                prompt_logprobs[index] = [
                    score(slot.history[at + 1], int(contexts[at])) for at in range(row.start, end)
                ]
            if not row.flags & SAMPLE:
                continue
            if behaviour.bad_at is not None and row.end > behaviour.bad_at:
                bad.append(len(tokens))
            context = int(contexts[-1])
            slot.last = choose(context, slot.params, row.end - slot.num_prompt, behaviour)
            if slot.params.logprobs is not None:
                logprobs[len(tokens)] = score(slot.last, context)
            tokens.append(slot.last)
        return StepResult(
            step=plan.step,
            tokens=pack(tokens),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            bad=tuple(bad),
            bad_reasons=("NaN in the logits",) * len(bad),
        )


def random_behaviour(random: Random, num_known: int) -> Behaviour:
    """Mostly sound."""
    at = random.randrange(num_known + 12)
    kind = random.random()
    if kind < 0.03:
        return Behaviour(poison_at=at)
    if kind < 0.06:
        return Behaviour(bad_at=at)
    return Behaviour(unmasked=kind < 0.2)
