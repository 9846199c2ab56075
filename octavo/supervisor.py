"""Keeps one engine core running: starts its process, watches it, restarts it when it dies.

A core that dies while it loads for the first time ends the start with its own error. A core that
dies later costs the requests it held, never the service: a new one is started, at most
`MAX_RESTARTS` times within `RESTART_WINDOW` seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from octavo.config import SchedulerConfig, WorkerConfig
from octavo.core import GET_READY, CoreSettings
from octavo.engine.channel import Addresses
from octavo.engine.client import EngineClient
from octavo.errors import CheckpointError, ConfigError, EngineDead, OctavoError
from octavo.folders import PrivateFolder
from octavo.types import Died, StepStats, WorkerInfo

MAX_RESTARTS = 3
RESTART_WINDOW = 300.0
STOP_SECONDS = 3.0
CORE_PROGRAM = (sys.executable, "-m", "octavo.core")  # gets its `CoreSettings` on standard input

logger = logging.getLogger("octavo.supervisor")


class Others(Protocol):
    """Processes besides this one that talk to the core; see `fleet.py`."""

    count: int

    def core_started(self, addresses: Sequence[Addresses]) -> None:
        """A core is being started; each process has its own address."""
        ...

    def core_died(self, error: str) -> None:
        """The core is gone."""
        ...


class CoreProcess:
    """A core's process, which can be started before its settings are known.

    It has much to import by then, torch above all.
    """

    def __init__(self, program: Sequence[str] = CORE_PROGRAM, *, prepares: bool = False) -> None:
        """With `prepares` it imports what a model needs that runs in it. Raises OSError."""
        self._process = subprocess.Popen(program, stdin=subprocess.PIPE)
        if prepares:
            self._write(GET_READY)

    @property
    def returncode(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    def tell(self, settings: CoreSettings) -> None:
        """Once: what it is to do. That it has ended already is noticed by who waits for it."""
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError), self._process.stdin:
            self._write(msgspec.json.encode(settings))

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def signal(self, number: int) -> None:
        """Sends it a signal, unless it has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()

    async def wait(self) -> int:
        """The exit code, once it has ended."""
        return await asyncio.to_thread(self._process.wait)

    def discard(self) -> None:
        """Ends one that was never told anything."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


class Supervisor:
    """Owns the core's process and the client that talks to it."""

    def __init__(
        self,
        worker: WorkerConfig,
        scheduler: SchedulerConfig,
        *,
        on_stats: Callable[[StepStats], None] | None = None,
        on_death: Callable[[], None] | None = None,
        program: Sequence[str] = CORE_PROGRAM,
        others: Others | None = None,
        process: CoreProcess | None = None,
    ) -> None:
        """`on_stats` gets each step's figures, `on_death` is called when a core has died.

        `program` is the command line of the core's process; benchmarks have one of their own.
        `others` are more processes that talk to the same core. `process` is one of that program
        that has been started already.
        """
        self._worker = worker
        self._scheduler = scheduler
        self._on_stats = on_stats
        self._on_death = on_death
        self._program = tuple(program)
        self._others = others
        self._client: EngineClient | None = None
        self._process: CoreProcess | None = None
        self._started = process  # and not used yet
        self._folder: PrivateFolder | None = None
        self._watch: asyncio.Task[None] | None = None
        self._restarts: list[float] = []
        self._telling: asyncio.Task[None] | None = None
        self._stopping = False
        self._has_served = False
        self.failure: asyncio.Future[OctavoError] = asyncio.get_running_loop().create_future()

    @property
    def supervisors(self) -> list[Supervisor]:
        """Itself: there is one core."""
        return [self]

    @property
    def restarting(self) -> bool:
        """True from the death of a core until the next one takes requests."""
        return self._has_served and not self.client.ready.is_set()

    @property
    def client(self) -> EngineClient:
        """The client of the core that runs now."""
        if self._client is None:
            raise EngineDead("the engine has not been started")
        return self._client

    async def start(self) -> None:
        """Starts the core's process and returns at once; `ready` waits for it."""
        await self._spawn()
        self._watch = asyncio.get_running_loop().create_task(self._keep())

    async def ready(self) -> WorkerInfo:
        """Waits until the core takes requests; raises what kept it from starting."""
        waiting = asyncio.get_running_loop().create_task(self.client.ready.wait())
        first: set[asyncio.Future[Any]] = {waiting, self.failure}
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self.failure.done():
            raise self.failure.result()
        assert self.client.info is not None
        return self.client.info

    async def stop(self) -> None:
        """Ends the core's process, politely and then not; may be called twice."""
        self._stopping = True
        for task in (self._watch, self._telling):
            if task is not None:
                task.cancel()
        process = self._process
        if process is not None and process.returncode is None:
            self.client.stop()
            # A core that still loads does not listen yet, and has nothing to lose.
            patience = STOP_SECONDS if self.client.ready.is_set() else 0.0
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), patience)
            if process.returncode is None:
                process.kill()
                await process.wait()
        self._forget()

    def kill(self) -> None:
        """Ends the core's process at once, without waiting; for callers that cannot wait."""
        self._stopping = True
        self._kill_process()
        self._forget()

    def dump_stacks(self) -> None:
        """Has the core write the stacks of its threads to its stderr, even if it hangs."""
        running = self._process is not None and self._process.returncode is None
        if running and self.client.ready.is_set():  # before that it does not listen for it
            assert self._process is not None
            self._process.signal(signal.SIGUSR1)

    def _kill_process(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def _forget(self) -> None:
        if self._client is not None:
            self._client.fail(EngineDead("the engine has been stopped"))
            self._client.close()
        if self._folder is not None:
            self._folder.remove()
        self._folder = None
        if self._stopping:
            self._give_up(EngineDead("the engine has been stopped"))

    def _give_up(self, error: OctavoError) -> None:
        if not self.failure.done():
            self.failure.set_result(error)

    async def _spawn(self) -> None:
        self._folder = PrivateFolder()
        others = self._others.count if self._others is not None else 0
        folder = self._folder.path
        addresses = [Addresses.in_folder(folder, number) for number in range(1 + others)]
        self._client = EngineClient(addresses[0], self._on_stats, self._kill_process)
        if self._others is not None:
            self._others.core_started(addresses[1:])
        settings = CoreSettings(tuple(addresses), os.getpid(), self._worker, self._scheduler)
        self._process = self._started or CoreProcess(self._program)
        self._started = None
        # A vocabulary may be more than a pipe takes at once, and the process still imports.
        await asyncio.to_thread(self._process.tell, settings)

    async def _keep(self) -> None:
        error: OctavoError | None = None
        try:
            while not self._stopping and (error := await self._one_life()) is None:
                self._forget()
                await self._spawn()
                self._telling = asyncio.get_running_loop().create_task(self._tell_ready())
        except Exception as problem:  # no process, no memory, no folder: nothing to go on with
            logger.exception("event=supervisor_failed")
            error = EngineDead(f"the engine core cannot be started: {problem}")
        if error is not None:
            self._give_up(error)

    async def _tell_ready(self) -> None:
        await self.client.ready.wait()
        logger.info("event=core_ready after=restart")

    async def _one_life(self) -> OctavoError | None:
        """Waits for the core's end; None if another may be started, else the final error."""
        assert self._process is not None
        code = await self._process.wait()
        await asyncio.sleep(0.05)  # let the client read a last word from the socket
        error = self._reason(code)
        self._has_served = self._has_served or self.client.ready.is_set()
        self.client.fail(EngineDead(error.message))
        if self._others is not None:
            self._others.core_died(error.message)
        if self._stopping:
            return EngineDead("the engine has been stopped")
        if self._on_death is not None:
            self._on_death()
        if not self._has_served or not self._may_restart():
            return error
        logger.error("event=core_died code=%d error=%r action=restart", code, error.message)
        return None

    def _reason(self, code: int) -> OctavoError:
        died: Died | None = self.client.died
        if died is None:
            return EngineDead(f"the engine core ended with code {code} and said nothing")
        kinds: dict[str, type[OctavoError]] = {
            "ConfigError": ConfigError,
            "CheckpointError": CheckpointError,
        }
        return kinds.get(died.kind, EngineDead)(died.error)

    def _may_restart(self) -> bool:
        now = time.monotonic()
        self._restarts = [t for t in self._restarts if now - t < RESTART_WINDOW] + [now]
        return len(self._restarts) <= MAX_RESTARTS
