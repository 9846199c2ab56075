"""A worker behind a channel: serves plans in order until told to leave.

What `octavo/rank.py` and Ray's actors run. A step that raises is reported, and the next one is run
all the same: ranks stay in step with each other, whatever the core makes of it.
Not for: the worker itself (`worker/worker.py`), or who starts it (`spawn.py`, `ray.py`).
"""

from __future__ import annotations

import os
import queue
import threading
import time
import traceback

import msgspec
import zmq

from octavo.errors import OctavoError
from octavo.executor.base import Handle
from octavo.executor.channel import Context, Socket, connect, encode
from octavo.executor.records import (
    Answer,
    Ask,
    Broken,
    FromRank,
    Landed,
    Loading,
    Pulse,
    Raised,
    RankSettings,
    Step,
    ToRank,
    Up,
)
from octavo.parallel.mesh import Calls
from octavo.types import StepPlan
from octavo.worker.worker import Worker

PULSE_SECONDS = 0.5
LONELY_SECONDS = 60.0  # without a word of the core, after which there is nobody to work for


def serve(settings: RankSettings) -> int:
    """Loads the model and serves; 0 after `Leave`, 1 if the model cannot be loaded."""
    context: Context = zmq.Context()
    plans = connect(context, zmq.PULL, settings.plans, settings)
    results = Results(context, settings)
    heart = Heart(context, settings)
    try:
        return _serve(settings, context, plans, results, heart)
    finally:
        heart.stop()


def _serve(
    settings: RankSettings, context: Context, plans: Socket, results: Results, heart: Heart
) -> int:
    worker = Worker(settings.worker, place=settings.place)
    try:
        info = worker.load(lambda detail: results.send(Loading(results.rank, detail)))
    except Exception as error:
        kind = type(error).__name__
        text = str(error) if isinstance(error, OctavoError) else f"{kind}: {error}"
        if not isinstance(error, OctavoError):
            traceback.print_exc()
        results.send(Broken(results.rank, text, kind))
        return 1
    heart.calls, heart.on_cpu = worker.world.calls, not worker.asynchronous
    results.send(Up(results.rank, info))
    landing = Landing(context, settings, heart) if worker.asynchronous else None
    Server(worker, results, heart, landing).run(plans)
    return 0


class Results:
    """One thread's way back to the core."""

    def __init__(self, context: Context, settings: RankSettings) -> None:
        self.rank = settings.place.rank
        self.answers = settings.place.answers  # steps' results are this rank's to tell
        self._socket = connect(context, zmq.PUSH, settings.results, settings)
        self._socket.linger = 1000  # a last word must get out before the process ends

    def send(self, message: FromRank) -> None:
        """Hands the message to the socket's own thread."""
        self._socket.send(encode(message))

    def landed(self, handle: Handle) -> None:
        """Waits for a step; tells its result, if that is this rank's to do."""
        result = handle.result()
        if self.answers:
            self.send(Landed(result))

    def raised(self, step: int, error: Exception) -> None:
        """Tells of a step that raised."""
        self.send(Raised(self.rank, step, f"{type(error).__name__}: {error}"))


class Heart:
    """A thread that says how far this rank has come, and ends the process of a core that is gone.

    The main thread counts `begun`, who lands steps `ended`, and the collectives write `calls`.
    """

    def __init__(self, context: Context, settings: RankSettings) -> None:
        self.begun = 0  # steps
        self.ended = 0
        self.calls = Calls()
        self.on_cpu = False
        self._context = context
        self._settings = settings
        self._stopped = False
        threading.Thread(target=self._beat, name="heart", daemon=True).start()

    def stop(self) -> None:
        """There is nothing more to say; the process may live on."""
        self._stopped = True

    def _pulse(self, rank: int) -> Pulse:
        calls = self.calls
        # Whoever waits in a collective works little; that its threads do is no sign of movement.
        worked = time.process_time() if self.on_cpu and not calls.inside else 0.0
        busy = self.begun > self.ended
        return Pulse(rank, self.begun, busy, calls.count, calls.last, worked)

    def _beat(self) -> None:
        settings = self._settings
        socket = connect(self._context, zmq.DEALER, settings.pulse, settings)
        heard = time.monotonic()
        while not settings.parent or os.getppid() == settings.parent:
            try:
                socket.send(encode(self._pulse(settings.place.rank)))
                if socket.poll(int(1000 * PULSE_SECONDS)):
                    while socket.poll(0):
                        socket.recv()
                    heard = time.monotonic()
                    time.sleep(PULSE_SECONDS)
            except zmq.ContextTerminated:
                return
            if self._stopped:
                return
            if time.monotonic() - heard > LONELY_SECONDS:
                break
        os._exit(1)


class Server:
    """The loop over the core's messages."""

    def __init__(
        self, worker: Worker, results: Results, heart: Heart, landing: Landing | None
    ) -> None:
        self._worker = worker
        self._results = results
        self._heart = heart
        self._landing = landing

    def run(self, plans: Socket) -> None:
        """Serves until `Leave`."""
        decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
        while True:
            message = decoder.decode(plans.recv())
            if isinstance(message, Step):
                self._step(message.plan)
            elif isinstance(message, Ask):
                self._results.send(self._answer(message))
            else:
                return

    def _step(self, plan: StepPlan) -> None:
        heart = self._heart
        heart.begun += 1
        try:
            handle = self._worker.submit(plan)
            if self._landing is not None:
                self._landing.take(plan.step, handle)
                return
            self._results.landed(handle)
        except Exception as error:  # of any kind: the core finds the guilty sequence
            self._results.raised(plan.step, error)
            traceback.clear_frames(error.__traceback__)  # they hold the step's tensors
            self._worker.trim()
        heart.ended += 1

    def _answer(self, message: Ask) -> Answer:
        rank = self._results.rank
        if message.op == "ping":
            return Answer(rank, message.number)
        try:
            found = self._worker.control(message.op, **message.args)
        except Exception as error:
            return Answer(rank, message.number, error=f"{type(error).__name__}: {error}")
        return Answer(rank, message.number, found)


class Landing:
    """A thread that waits for steps of a device that works while the host goes on.

    So the next plan can be launched while this step still runs.
    """

    def __init__(self, context: Context, settings: RankSettings, heart: Heart) -> None:
        self._heart = heart
        self._queue: queue.SimpleQueue[tuple[int, Handle]] = queue.SimpleQueue()
        args = (context, settings)
        threading.Thread(target=self._land, args=args, name="landing", daemon=True).start()

    def take(self, step: int, handle: Handle) -> None:
        """A step that the device was given."""
        self._queue.put((step, handle))

    def _land(self, context: Context, settings: RankSettings) -> None:
        results = Results(context, settings)
        while True:
            step, handle = self._queue.get()
            try:
                results.landed(handle)
            except Exception as error:
                results.raised(step, error)
            self._heart.ended += 1
