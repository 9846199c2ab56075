"""`Fleet`: the API processes of a server with more than one, seen from the process that owns them.

That process owns the core too. It starts the API processes, tells them where the core is, gathers
their metrics, lets them drain, and starts one anew that has died, or that hangs and is ended: its
sequences are ended in the core, its counts are kept. Each has the same port (SO_REUSEPORT), so the
kernel deals connections out. Not for: what an API process does (`api.py`, the next file).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from octavo.engine.channel import Addresses
from octavo.engine.process import FORGET
from octavo.errors import EngineDead, OctavoError
from octavo.folders import PrivateFolder
from octavo.hub import (
    BEAT,
    CoreDied,
    CoreStarted,
    Drain,
    Drained,
    Hello,
    Hurry,
    Link,
    Listening,
)
from octavo.obs.merge import Family, families_of, merge, only_sums
from octavo.obs.metrics import Metrics
from octavo.supervisor import MAX_RESTARTS, RESTART_WINDOW, Supervisor
from octavo.types import WorkerInfo

PROGRAM = (sys.executable, "-m", "octavo.api")
ANSWER_SECONDS = 1.0  # for one process to say what it is asked
FORGET_SECONDS = 2.0
END_SECONDS = 5.0  # for a process to end by itself
BEAT_SECONDS = 1.0  # between two questions whether a process still moves
HANG_SECONDS = 15.0  # without an answer, after which it is ended
STACK_SECONDS = 0.5  # to write down where it hangs

logger = logging.getLogger("octavo.fleet")


class Member:
    """One API process, whichever life it is in."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.process: asyncio.subprocess.Process | None = None
        self.link: Link | None = None
        self.addresses: Addresses | None = None  # of the core that runs now
        self.last: bytes = b""  # its metrics when it was last asked
        self.listening = asyncio.Event()
        self.drained: asyncio.Future[int] = asyncio.get_running_loop().create_future()


class Fleet:
    """All API processes. `count` of them; `supervisor` is set before `start`."""

    def __init__(self, count: int, metrics: Metrics) -> None:
        self.count = count
        self.failure: asyncio.Future[OctavoError] = asyncio.get_running_loop().create_future()
        self.supervisor: Supervisor | None = None
        self._metrics = metrics
        self._members = [Member(number + 1) for number in range(count)]
        self._left: list[Family] = []  # counts of processes that are gone
        self._core_error = ""
        self._folder: PrivateFolder | None = None  # while there is a server
        self._server: asyncio.Server | None = None
        self._keepers: list[asyncio.Task[None]] = []
        self._links: set[asyncio.Task[None]] = set()
        self._restarts: list[float] = []
        self._address = ""
        self._stopping = False

    @property
    def hub(self) -> str:
        """The socket at which the API processes report."""
        assert self._folder is not None, "open comes first"
        return str(self._folder.path / "hub")

    # What the supervisor tells

    def core_started(self, addresses: Sequence[Addresses]) -> None:
        """A core is being started."""
        self._core_error = ""
        for member, address in zip(self._members, addresses, strict=True):
            member.addresses = address
            self._send_core(member)

    def core_died(self, error: str) -> None:
        """The core is gone; streams end with an error."""
        self._core_error = error
        for member in self._members:
            if member.link is not None:
                member.link.send(CoreDied(error))

    def _send_core(self, member: Member) -> None:
        if member.link is not None and member.addresses is not None:
            member.link.send(CoreStarted(member.addresses, self._core_info()))
            if self._core_error:
                member.link.send(CoreDied(self._core_error))

    def _core_info(self) -> WorkerInfo | None:
        """Set once the core takes requests; who listened before has heard it from the core."""
        if self.supervisor is None or not self.supervisor.client.ready.is_set():
            return None
        return self.supervisor.client.info

    # Starting and ending

    def open(self) -> None:
        """Makes the place where processes report; `stop` removes it."""
        self._folder = PrivateFolder()

    async def start(self, settings: Sequence[bytes]) -> None:
        """Starts all processes, each with its settings, and returns at once."""
        self._server = await asyncio.start_unix_server(self._accept, self.hub)
        for member, one in zip(self._members, settings, strict=True):
            keeper = asyncio.create_task(self._keep(member, one))
            self._keepers.append(keeper)

    async def listening(self) -> str:
        """Waits until every process takes connections; the address."""
        await asyncio.gather(*(member.listening.wait() for member in self._members))
        return self._address

    async def drain(self, timeout: float, hurry: asyncio.Event) -> int:
        """Lets all finish what they have, for at most `timeout` seconds; how many were cut."""
        self._stopping = True
        members = [member for member in self._members if member.link is not None]
        for member in members:
            assert member.link is not None
            member.link.send(Drain(timeout))
        waits = [member.drained for member in members]
        hurrying = asyncio.create_task(hurry.wait())
        done = asyncio.gather(*waits)
        ends: set[asyncio.Future[Any]] = {done, hurrying}
        await asyncio.wait(ends, timeout=timeout + END_SECONDS, return_when="FIRST_COMPLETED")
        if hurrying.done():
            for member in members:
                if member.link is not None:
                    member.link.send(Hurry())
            await asyncio.wait({done}, timeout=END_SECONDS)
        hurrying.cancel()
        done.cancel()
        return sum(wait.result() for wait in waits if wait.done() and not wait.cancelled())

    async def stop(self) -> None:
        """Ends all processes."""
        self._stopping = True
        for member in self._members:
            if member.link is not None:
                member.link.close()  # which they take for the end
        processes = [m.process for m in self._members if m.process is not None]
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(
                asyncio.gather(*(process.wait() for process in processes)), END_SECONDS
            )
        for process in processes:
            if process.returncode is None:
                process.kill()
                await process.wait()
        for task in (*self._keepers, *self._links):
            task.cancel()
        if self._server is not None:
            self._server.close()
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    async def _keep(self, member: Member, settings: bytes) -> None:
        try:
            await self._lives(member, settings)
        except Exception as problem:  # no process, no memory: nothing to go on with
            logger.exception("event=api_process_not_kept index=%d", member.index)
            self._give_up(f"API process {member.index} cannot be started: {problem}")

    def _give_up(self, error: str) -> None:
        if not self.failure.done():
            self.failure.set_result(EngineDead(error))

    async def _lives(self, member: Member, settings: bytes) -> None:
        """One process after another, until the server ends or a process dies too often."""
        while True:
            process = await asyncio.create_subprocess_exec(*PROGRAM, stdin=asyncio.subprocess.PIPE)
            member.process = process
            assert process.stdin is not None
            process.stdin.write(settings)
            with contextlib.suppress(ConnectionError):  # its end is noticed below
                await process.stdin.drain()
            process.stdin.close()
            watch = asyncio.create_task(self._watch(member, process))
            code = await process.wait()
            watch.cancel()
            await self._bury(member)
            if self._stopping:
                return
            now = time.monotonic()
            self._restarts = [t for t in self._restarts if now - t < RESTART_WINDOW] + [now]
            never_listened = not member.listening.is_set()
            if never_listened or len(self._restarts) > MAX_RESTARTS * self.count:
                self._give_up(f"API process {member.index} ended with code {code}")
                return
            logger.error(
                "event=api_process_died index=%d code=%d action=restart", member.index, code
            )

    async def _watch(self, member: Member, process: asyncio.subprocess.Process) -> None:
        """Ends a process that listens and answers nothing for a while.

        It answers from its event loop: one that stands still there serves nobody.
        """
        await member.listening.wait()
        heard = time.monotonic()
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            if member.link is None:  # not there yet, or about to end
                heard = time.monotonic()
                continue
            with contextlib.suppress(TimeoutError, OctavoError):
                await member.link.ask(BEAT, BEAT_SECONDS)
                heard = time.monotonic()
            if time.monotonic() - heard > HANG_SECONDS:
                logger.error(
                    "event=api_process_hangs index=%d seconds=%.0f action=restart; its stacks "
                    "follow",
                    member.index,
                    time.monotonic() - heard,
                )
                process.send_signal(signal.SIGUSR1)
                await asyncio.sleep(STACK_SECONDS)
                process.kill()
                return

    async def _bury(self, member: Member) -> None:
        """Ends what a process has left in the core, and keeps its counts."""
        if member.link is not None:
            member.link.close()
            member.link = None
        if member.last:
            self._left = merge([self._left, only_sums(families_of(member.last))])
            member.last = b""
        if not member.drained.done() and self._stopping:
            member.drained.set_result(0)
        client = self.supervisor.client if self.supervisor is not None else None
        if not self._stopping and client is not None and client.ready.is_set():
            # A core that hangs must not hold up the next process; it is another's to end.
            with contextlib.suppress(OctavoError, TimeoutError):
                await asyncio.wait_for(
                    client.control(FORGET, client=str(member.index)), FORGET_SECONDS
                )

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._links.add(task)
        link = Link(reader, writer, self._answer)
        member: Member | None = None
        async for message in link.messages():
            if isinstance(message, Hello):
                member = self._members[message.index - 1]
                member.link = link
                self._send_core(member)
            elif isinstance(message, Listening) and member is not None:
                self._address = message.address
                member.listening.set()
            elif isinstance(message, Drained) and member is not None:
                with contextlib.suppress(asyncio.InvalidStateError):  # `drain` has given up on it
                    member.drained.set_result(message.cut)
        if member is not None and member.link is link:
            member.link = None
        if task is not None:
            self._links.discard(task)

    # Questions of the API processes

    async def _answer(self, op: str, to: int) -> list[bytes]:
        """Whatever is asked, everybody answers; of metrics those of the dead as well."""
        asked = [
            member
            for member in self._members
            if member.link is not None and to in (0, member.index)
        ]
        answers = await asyncio.gather(*(self._ask(member, op) for member in asked))
        if op != "metrics":
            return [answer for answer in answers if answer]
        own = msgspec.msgpack.encode(self._metrics.snapshot())
        gone = [member.last for member in self._members if member.link is None]
        return [own, msgspec.msgpack.encode(self._left), *filter(None, (*answers, *gone))]

    async def _ask(self, member: Member, op: str) -> bytes:
        assert member.link is not None
        try:
            answer = (await member.link.ask(op, ANSWER_SECONDS))[0]
        except (TimeoutError, OctavoError, IndexError):  # busy, failed, about to end
            return member.last if op == "metrics" else b""
        if op == "metrics":
            member.last = answer
        return answer
