"""The loop: plan, submit, land, commit; and what to do when a step fails.

`EngineCore.step` is one turn. It fills the pipeline up to the scheduler's depth, then lands the
oldest step. With depth 1 that is the plain synchronous loop; with depth 2 the host plans the next
step while the device runs this one; with a pipeline of devices the depth is its length.

A step that raises is an event, not the end: every plan not yet landed is void, running sequences
go back to the queue, and those of the failed step run one at a time. Only the one that fails alone
ends with an error. A dead executor is the end: `EngineDead` is raised, and the caller restarts.

Not for: processes and sockets (see `process.py`, the next file), or any decision (`scheduler.py`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo.engine.pace import Allowance, Pace
from octavo.engine.scheduler import Scheduler
from octavo.errors import EngineDead, RequestFailed
from octavo.executor.base import Preparing
from octavo.types import PREPARE, AddRequest, StepOutputs, StepPlan, StepResult

if TYPE_CHECKING:
    from octavo.executor.base import Executor, Handle


COMPILE_WAIT = 0.01  # seconds for a grammar at a time, when there is nothing else to do


class FailedStep:
    """Handle of a step that could not be submitted; it fails in its turn."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def done(self) -> bool:
        """True: there is nothing to wait for."""
        return True

    def result(self) -> StepResult:
        """Raises what `submit` raised."""
        raise self._error


class EngineCore:
    """Drives a scheduler and an executor; one thread, and never sleeps."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._preparing = executor if isinstance(executor, Preparing) else None
        self._prepared = False  # the scheduler's next step, and the executor knows of it
        self._in_flight: deque[tuple[StepPlan, Handle, float]] = deque()  # and since when
        self._last_landing = 0.0
        self._formless: list[AddRequest] = []  # their grammars are being compiled
        # Texts of the last ones that were; workers keep more of them.
        self._formed: deque[str] = deque(maxlen=16)
        self._allow = Allowance()
        self.allowance = 0.0  # seconds that what is in flight may take because of its size
        self._pace = Pace() if scheduler.config.lookahead else None

    def add(self, request: AddRequest) -> None:
        """Queues a request; one that cannot be served is reported by the next `step`.

        One with a grammar that the worker has yet to compile waits for that alone, not in a batch
        that would have to wait as well.
        """
        if self._has_form(request, 0.0):
            self._scheduler.add(request)
        else:
            self._formless.append(request)

    def abort(self, ids: list[str]) -> None:
        """Ends requests; unknown and ended ids are no error."""
        if self._formless:
            for request in [one for one in self._formless if one.id in ids]:
                self._formless.remove(request)
                self._scheduler.add(request)
        self._scheduler.abort(ids)

    def _has_form(self, request: AddRequest, seconds: float) -> bool:
        grammar = request.params.grammar
        if grammar is None or grammar.text in self._formed:
            return True
        try:
            reply = self._executor.control(PREPARE, text=grammar.text, seconds=str(seconds))
        except RequestFailed:  # its step will fail, alone
            return True
        if reply.get("ready") == "false":
            return False
        self._formed.append(grammar.text)
        return True

    def _queue_formed(self) -> None:
        """Queues those whose grammars have been compiled; waits a little if nothing else is due."""
        busy = self._in_flight or self._scheduler.num_live or self._scheduler.has_news
        seconds = 0.0 if busy else COMPILE_WAIT
        waiting, self._formless = self._formless, []
        for request in waiting:
            if self._has_form(request, seconds):
                self._scheduler.add(request)
                seconds = 0.0
            else:
                self._formless.append(request)

    def control(self, op: str, args: dict[str, str]) -> dict[str, str]:
        """`reset_prefix_cache` and `snapshot` are done here, all else by the executor."""
        if op == "reset_prefix_cache":
            self._scheduler.reset_prefix_cache()
            return {"reset": "true"}
        if op == "snapshot":
            return self._snapshot()
        return self._executor.control(op, **args)

    def has_work(self) -> bool:
        """True if `step` has something to do or to report."""
        scheduler = self._scheduler
        return bool(scheduler.num_live or self._in_flight or scheduler.has_news or self._formless)

    def step(self) -> StepOutputs | None:
        """One turn; None if there was nothing to do. Raises EngineDead if the executor is lost."""
        if self._formless:
            self._queue_formed()
        while len(self._in_flight) < self._scheduler.config.depth:
            began = self._clock()
            prepared = self._prepared
            plan = self._scheduler.extend(began) if prepared else self._scheduler.plan(began)
            self._prepared = False
            if plan is None:
                break
            tokens = plan.num_tokens + sum(one.num_tokens for one, _, _ in self._in_flight)
            self.allowance = self._allow.seconds(tokens)
            handle = self._submit(plan)
            if self._pace is not None and self._in_flight:
                late = self._in_flight[-1][1].done()
                seconds = self._clock() - began
                self._pace.planned(
                    plan.num_rows, plan.num_tokens, seconds, late=late, prepared=prepared
                )
            self._in_flight.append((plan, handle, began))
        if self._in_flight:
            return self._land()
        return self._scheduler.report() if self._scheduler.has_news else None

    def check(self) -> None:
        """Raises EngineDead if the executor was lost while there was nothing to do."""
        if not self._in_flight and not self._executor.alive():
            raise EngineDead("a worker was lost while the engine was idle")

    def patience(self) -> float:
        """Seconds for which `step` may be put off, for requests that are about to come.

        Nobody loses by it: the device is busy until then. 0 where nothing could be gained.
        """
        scheduler = self._scheduler
        if self._pace is None or len(self._in_flight) != 1 or scheduler.waiting:
            return 0.0
        plan, handle, began = self._in_flight[0]
        if handle.done():
            return 0.0
        since = max(began, self._last_landing)
        rows, tokens = plan.num_rows, plan.num_tokens
        wait = self._pace.patience(rows, tokens, self._clock() - since, prepared=self._prepared)
        if self._prepared or not self._pace.leaves_time(wait) or not self.prepare():
            return wait
        return self._pace.patience(rows, tokens, self._clock() - since, prepared=True)

    def prepare(self) -> bool:
        """Plans what the next `step` starts, though more may come before; False if it cannot."""
        if self._preparing is None or self._pace is None or self._prepared:
            return False
        if len(self._in_flight) != 1:
            return False
        plan = self._scheduler.prepare(self._clock())
        if plan is None:
            return False
        self._preparing.prepare(plan)
        self._prepared = True
        return True

    def close(self) -> None:
        """Frees the executor; what is in flight is lost."""
        self._in_flight.clear()
        self._executor.close()

    def _submit(self, plan: StepPlan) -> Handle:
        try:
            return self._executor.submit(plan)
        except Exception as error:
            return FailedStep(error)

    def _land(self) -> StepOutputs:
        plan, handle, began = self._in_flight.popleft()
        try:
            result = handle.result()
        except Exception as error:
            return self._recover(error)
        now = self._clock()
        # Overlapping steps share the time: each counts from where the one before it ended.
        seconds = now - max(began, self._last_landing)
        self._last_landing = now
        self._allow.landed(plan.num_tokens, seconds)
        if self._pace is not None:
            self._pace.landed(plan.num_rows, plan.num_tokens, seconds)
        return self._scheduler.commit(plan, result, 1000 * seconds, now)

    def _recover(self, error: Exception) -> StepOutputs:
        text = f"{type(error).__name__}: {error}"
        if not self._executor.alive():
            raise EngineDead(f"the executor is lost: {text}") from error
        self._in_flight.clear()
        return self._scheduler.recover(text)

    def _snapshot(self) -> dict[str, str]:
        scheduler = self._scheduler
        pool = scheduler.pool
        return {
            "running": str(len(scheduler.running)),
            "waiting": str(len(scheduler.waiting)),
            "in_flight": str(len(self._in_flight)),
            "suspects": str(len(scheduler.suspects)),
            "epoch": str(scheduler.epoch),
            "blocks_used": str(pool.num_used),
            "blocks_cached": str(pool.num_cached),
            "blocks_total": str(pool.num_blocks),
        }
