"""RemoteExecutor: many workers, each a process of its own, behind the seam of one.

A plan goes to every rank in one message each; the rank that draws the tokens sends the result. A
thread watches: a worker that ended, that gives no sign of life, or that no longer moves makes the
whole executor lost, for the others wait in a collective for it. The core then ends, and is started
anew with new workers. Not for: starting them (`spawn.py`, `ray.py`) or what they do (`serving.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from dataclasses import replace as changed

import msgspec
import zmq
from msgspec.structs import replace

from octavo.config import WorkerConfig
from octavo.errors import CheckpointError, ConfigError, EngineDead, RequestFailed
from octavo.executor.base import Handle
from octavo.executor.channel import Context, Socket, encode
from octavo.executor.records import (
    Answer,
    Ask,
    Broken,
    FromRank,
    Landed,
    Leave,
    Loading,
    Pulse,
    Raised,
    RankSettings,
    Step,
    ToRank,
    Up,
)
from octavo.executor.spawn import Crew
from octavo.types import StepPlan, StepResult, WorkerInfo

WORKING = 0.02  # seconds of processor time between two pulses of a rank that computes
SEND_MILLISECONDS = 1000  # for the channel to a rank that has just said it is up

logger = logging.getLogger("octavo.executor.remote")


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds after which a silence means something."""

    look: float = 0.2  # between looks at the workers
    silence: float = 10.0  # without a pulse: the worker hangs as a whole
    stuck: float = 60.0  # no rank has moved, and a step is on its way
    settle: float = 4.0  # for the others to come back after one rank has raised
    answer: float = 600.0  # to an operation that is not a step, after the steps before it
    leave: float = 1.0  # for workers to end by themselves


class StepError(RuntimeError):
    """A worker's words for what a step raised."""


class RemoteHandle:
    """A step that the ranks were given."""

    __slots__ = ("_executor", "_step")

    def __init__(self, executor: RemoteExecutor, step: int) -> None:
        self._executor = executor
        self._step = step

    def done(self) -> bool:
        """True if `result` would not wait."""
        return self._executor.landed(self._step)

    def result(self) -> StepResult:
        """The step's result. Raises StepError, or EngineDead if a worker is lost."""
        return self._executor.wait(self._step)


@dataclass(slots=True)
class Life:
    """What a rank last said of itself, and when it last said something new."""

    pulse: Pulse | None = None
    heard_at: float = field(default_factory=time.monotonic)
    moved_at: float = field(default_factory=time.monotonic)


class RemoteExecutor:
    """Executor over all ranks of one model."""

    def __init__(
        self,
        config: WorkerConfig,
        crew: Crew,
        *,
        report: Callable[[str], None] | None = None,
        parent: int = 0,
        patience: Patience | None = None,
    ) -> None:
        """`parent` is this process's id if the workers are its children."""
        self._config = config
        self._crew = crew
        self._report = report
        self._parent = parent
        self._patience = patience or Patience()
        self._context: Context = zmq.Context()
        self._plans: list[Socket] = []
        self._results: Socket | None = None
        self._pulses: Socket | None = None  # the watch's, once there is one
        self._decoder: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
        self._numbers = itertools.count()
        self._waiting: set[int] = set()  # steps on their way
        self._found: dict[int, StepResult] = {}
        self._raised: Raised | None = None
        self._answers: dict[int, Answer] = {}  # by rank, to the last question
        self._lost = ""
        self._watch: Watch | None = None

    # The seam

    def start(self) -> WorkerInfo:
        """Starts all workers and waits for their models.

        Raises ConfigError or CheckpointError as a worker has, and EngineDead if one is lost.
        """
        began = time.monotonic()
        try:
            places = self._crew.places()
            binder = self._crew.binder(self._context)
            self._results, results = binder.bind(zmq.PULL, "results")
            self._results.rcvtimeo = int(1000 * self._patience.look)
            self._pulses, pulse = binder.bind(zmq.ROUTER, "pulse")
            settings: list[RankSettings] = []
            for place in places:
                socket, address = binder.bind(zmq.PUSH, f"plans-{place.rank}")
                socket.sndtimeo = SEND_MILLISECONDS
                self._plans.append(socket)
                settings.append(
                    RankSettings(
                        # A rank that draws no tokens needs no words.
                        worker=self._config
                        if place.answers
                        else changed(self._config, vocabulary=None),
                        place=place,
                        plans=address,
                        results=results,
                        pulse=pulse,
                        parent=self._parent,
                        keys=binder.keys(),
                    )
                )
            self._crew.start(settings)
            self._watch = Watch(self._pulses, self._crew, self._patience, len(places), self._lose)
            infos = self._wait_until_up(len(places))
        except BaseException:
            self.close()
            raise
        self._watch.serving = True
        return self._joint_info(infos, time.monotonic() - began)

    def submit(self, plan: StepPlan) -> Handle:
        """Sends the plan to every rank."""
        if self._lost:
            raise EngineDead(self._lost)
        self._waiting.add(plan.step)
        self._tell(Step(plan))
        if self._watch is not None:
            self._watch.stepping = True
        return RemoteHandle(self, plan.step)

    def control(self, op: str, **args: str) -> dict[str, str]:
        """Runs the operation on every rank, after the steps on their way.

        The answer is that of the rank that answers, with "N." before the names of rank N's.
        """
        try:
            answers = self._ask(op, args, self._patience.answer)
        except EngineDead as dead:
            self._lose(dead.message)
            raise
        found: dict[str, str] = {}
        for rank, answer in sorted(answers.items()):
            if answer.error:
                raise RequestFailed(f"worker rank {rank}: {answer.error}")
            found |= {f"{rank}.{name}": value for name, value in answer.result.items()}
            if rank == len(self._plans) - self._config.parallel.tensor:
                found |= answer.result
        return found

    def alive(self) -> bool:
        """False once a worker is lost."""
        return not self._lost

    def close(self) -> None:
        """Ends the workers; may be called twice."""
        if self._watch is not None:
            self._watch.close()
        if not self._lost:
            with contextlib.suppress(EngineDead):
                self._tell(Leave())
        self._crew.close(0.0 if self._lost else self._patience.leave)
        self._lost = self._lost or "the workers have been ended"
        for socket in (*self._plans, self._results, self._pulses):
            if socket is not None:  # an open one would hold up the context's end
                socket.close()
        self._plans = []
        self._context.term()

    # Handles

    def landed(self, step: int) -> bool:
        """True if the step's result is here, or never will be."""
        while self._receive(wait=False) is not None:
            pass
        return step in self._found or step not in self._waiting or bool(self._lost)

    def wait(self, step: int) -> StepResult:
        """The result of a step. Raises what a rank has raised since the last call."""
        while step not in self._found:
            if self._raised is not None:
                raise self._settle(self._raised)
            if self._lost:
                raise EngineDead(self._lost)
            self._receive()
        self._waiting.discard(step)
        if self._watch is not None:
            self._watch.stepping = bool(self._waiting)
        return self._found.pop(step)

    # Inside

    def _tell(self, message: ToRank) -> None:
        """One message to each rank. Raises EngineDead if one of them is gone."""
        data = encode(message)
        try:
            for socket in self._plans:
                socket.send(data)
        except zmq.Again:  # its end of the channel is gone; the watch knows more in a moment
            time.sleep(2 * self._patience.look)
            self._lose(self._lost or "a worker has left its channel")
            raise EngineDead(self._lost) from None

    def _receive(self, *, wait: bool = True) -> FromRank | None:
        """Takes in one message, after at most `Patience.look` seconds if it may wait."""
        assert self._results is not None, "start comes first"
        try:
            message = self._decoder.decode(self._results.recv(0 if wait else zmq.NOBLOCK))
        except zmq.Again:
            return None
        if isinstance(message, Landed):
            if message.result.step in self._waiting:
                self._found[message.result.step] = message.result
        elif isinstance(message, Raised):
            if message.step in self._waiting and self._raised is None:
                self._raised = message
        elif isinstance(message, Answer):
            self._answers[message.rank] = message
        return message

    def _wait_until_up(self, count: int) -> dict[int, WorkerInfo]:
        infos: dict[int, WorkerInfo] = {}
        kinds = {"ConfigError": ConfigError, "CheckpointError": CheckpointError}
        while len(infos) < count:
            message = self._receive()
            if isinstance(message, Up):
                infos[message.rank] = message.info
            elif isinstance(message, Loading):
                if self._report is not None and message.rank == 0:
                    self._report(message.detail)
            elif isinstance(message, Broken):
                raise kinds.get(message.kind, EngineDead)(message.error)
            elif message is None and self._lost:
                raise EngineDead(f"{self._lost} while it loaded the model")
        return infos

    def _joint_info(self, infos: dict[int, WorkerInfo], seconds: float) -> WorkerInfo:
        parallel = self._config.parallel
        info = infos[parallel.size - parallel.tensor]
        loaded = sum(phase[1] for phase in info.timings)
        note = (
            f"workers: {parallel.size} started by {parallel.backend}, {parallel.tensor} share each "
            f"layer, {parallel.pipeline} stages"
        )
        return replace(
            info,
            weight_bytes=sum(one.weight_bytes for one in infos.values()),
            kv_bytes=sum(one.kv_bytes for one in infos.values()),
            notes=(note, *info.notes),
            timings=(("processes", max(0.0, seconds - loaded)), *info.timings),
        )

    def _ask(self, op: str, args: dict[str, str], seconds: float) -> dict[int, Answer]:
        """The answers of all ranks that give one in time."""
        if self._lost:
            raise EngineDead(self._lost)
        number = next(self._numbers)
        self._answers.clear()
        self._tell(Ask(number, op, args))
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._lost:
            found = {r: a for r, a in self._answers.items() if a.number == number}
            if len(found) == len(self._plans):
                return found
            self._receive()
        missing = set(range(len(self._plans))) - self._answers.keys()
        raise EngineDead(self._lost or f"worker ranks {sorted(missing)} did not answer {op!r}")

    def _settle(self, raised: Raised) -> Exception:
        """What a step raised, once all ranks have come back from it; else all are lost.

        A rank that raised between two collectives leaves the others waiting in the second.
        """
        error = f"worker rank {raised.rank}: {raised.error}"
        try:
            self._ask("ping", {}, self._patience.settle)
        except EngineDead as dead:
            self._lose(f"{dead.message}, after {error}")
            return EngineDead(self._lost)
        self._waiting.clear()
        self._found.clear()
        self._raised = None
        if self._watch is not None:
            self._watch.stepping = False
        return StepError(error)

    def _lose(self, why: str) -> None:
        """The first reason stands. Called by the watch as well."""
        if not self._lost:
            self._lost = why
            logger.error("event=workers_lost reason=%r", why)


class Watch:
    """A thread that looks at the workers and listens to their pulses."""

    def __init__(
        self,
        pulses: Socket,
        crew: Crew,
        patience: Patience,
        count: int,
        lose: Callable[[str], None],
    ) -> None:
        """`lose` is told why all is lost, once."""
        self.serving = False  # the models are loaded: from then on silence means something
        self.stepping = False  # a step is on its way
        self._pulses = pulses
        self._crew = crew
        self._patience = patience
        self._lives = [Life() for _ in range(count)]
        self._lose = lose
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and waits for it."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        decoder: msgspec.msgpack.Decoder[Pulse] = msgspec.msgpack.Decoder(Pulse)
        looked_at = time.monotonic()
        while not self._closing.is_set():
            if self._pulses.poll(int(1000 * self._patience.look)):
                sender, data = self._pulses.recv_multipart()
                self._hear(decoder.decode(data))
                self._pulses.send_multipart([sender, b""])  # which tells it that we live
            now = time.monotonic()
            if now - looked_at > self._patience.look:
                if now - looked_at > self._patience.silence / 2:
                    self._start_anew(now)  # it was this process that stood still
                looked_at = now
                if why := self._crew.lost() or self._silent(now):
                    self._lose(why)
                    break
        self._pulses.close()

    def _hear(self, pulse: Pulse) -> None:
        life, now = self._lives[pulse.rank], time.monotonic()
        if not pulse.busy or life.pulse is None or moved(life.pulse, pulse):
            life.moved_at = now
        life.pulse, life.heard_at = pulse, now

    def _start_anew(self, now: float) -> None:
        for life in self._lives:
            life.heard_at = life.moved_at = now

    def _silent(self, now: float) -> str:
        """Why the workers are to be given up though none has ended; empty if they are not."""
        if not self.serving:
            return ""
        patience = self._patience
        for rank, life in enumerate(self._lives):
            if now - life.heard_at > patience.silence:
                self._crew.dump_stacks()
                return (
                    f"worker rank {rank} has given no sign of life for {patience.silence:g} s; "
                    f"{self._table()}"
                )
        moved_at = max(life.moved_at for life in self._lives)
        if self.stepping and now - moved_at > patience.stuck and any(map(_busy, self._lives)):
            self._crew.dump_stacks()
            return f"no worker has moved for {patience.stuck:g} s; {self._table()}"
        return ""

    def _table(self) -> str:
        """How far each rank has come, and which has come least far."""
        known = [life.pulse for life in self._lives if life.pulse is not None]
        if not known:
            return "none has said how far it is"
        least = min((pulse.steps, pulse.calls) for pulse in known)
        furthest = max((pulse.steps, pulse.calls) for pulse in known)
        behind = [pulse.rank for pulse in known if (pulse.steps, pulse.calls) == least]
        lines = ", ".join(
            f"rank {pulse.rank} in step {pulse.steps} at collective {pulse.calls} ({pulse.call})"
            for pulse in known
        )
        if least == furthest:
            return lines
        return (
            f"{lines}; not reached by rank {', '.join(map(str, behind))}: what the others wait in"
        )


def moved(before: Pulse, now: Pulse) -> bool:
    """True if a rank came further from one pulse to the next, or computes: a step may be long."""
    if (before.steps, before.calls) != (now.steps, now.calls):
        return True
    return before.worked > 0 and now.worked - before.worked > WORKING


def _busy(life: Life) -> bool:
    return life.pulse is not None and life.pulse.busy
