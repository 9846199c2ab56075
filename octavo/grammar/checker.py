"""`Lane`: processes of `check.py` that judge demands, so many at a time, within a bound of time.

A demand may use so many seconds of processor time, which a busy machine does not shorten; the
process ends itself when they are over. Not for: what becomes of a verdict (`compiler.py`, the next
file), or what a process does (`check.py`).
"""

from __future__ import annotations

import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from octavo.config import Vocabulary
from octavo.errors import Overloaded, RequestFailed
from octavo.grammar.check import DIED, Demand, Verdict
from octavo.grammar.request import StructuredOutputs

START_SECONDS = 30.0  # for a process to be ready, on a busy machine
WALL_SECONDS = 15.0  # for a verdict, whatever else the machine does


class CheckerDied(Exception):
    """The process ended while it worked."""


class Checker:
    """One process of `check.py`; used by one thread at a time."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "octavo.grammar.check"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._ready = False
        self._line = msgspec.json.encode(vocabulary) + b"\n"

    def judge(self, demand: bytes) -> Verdict:
        """Raises CheckerDied or TimeoutError, both of which end the process.

        RequestFailed says that it did not start, which is no fault of what is wanted.
        """
        if not self._ready:
            self._start()
        try:
            self._send(demand + b"\n")
            return msgspec.json.decode(self._receive(WALL_SECONDS), type=Verdict)
        except (OSError, CheckerDied):
            self.close()
            raise

    def _start(self) -> None:
        try:
            self._send(self._line)
            self._receive(START_SECONDS)
        except (OSError, CheckerDied):  # a TimeoutError is an OSError
            self.close()
            raise RequestFailed(
                "The process that compiles grammars did not start. Try again later."
            ) from None
        self._ready, self._line = True, b""

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()

    def _receive(self, seconds: float) -> bytes:
        assert self._process.stdout is not None
        deadline, parts = time.monotonic() + seconds, b""
        while not parts.endswith(b"\n"):
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, left))
            if not ready:
                raise TimeoutError
            data = self._process.stdout.read1(2**16)  # type: ignore[attr-defined]
            if not data:
                raise CheckerDied
            parts += data
        return parts


class Lane:
    """Demands that may use `seconds` of processor time each, judged by `width` processes."""

    def __init__(
        self, vocabulary: Vocabulary, name: str, *, seconds: float, width: int, waiting: int
    ) -> None:
        """At most `waiting` demands may be there at a time, those being judged among them."""
        self.seconds = seconds
        self._vocabulary = vocabulary
        self._waiting = waiting
        self._inside = 0
        self._lock = threading.Lock()
        self._free: list[Checker] = []
        self._threads = ThreadPoolExecutor(width, name)

    def submit(self, work: Callable[[], None]) -> None:
        """Has a thread do `work`, which calls `judge`. Raises Overloaded if too many wait."""
        with self._lock:
            if self._inside >= self._waiting:
                raise Overloaded(
                    f"{self._inside} grammars wait to be compiled that take as long as this one. "
                    "Try again later.",
                    max(1.0, self._inside * self.seconds),
                )
            self._inside += 1
        self._threads.submit(work).add_done_callback(lambda _: self._leave())

    def _leave(self) -> None:
        with self._lock:
            self._inside -= 1

    def judge(self, wanted: StructuredOutputs) -> Verdict | None:
        """The verdict; None if its time was over. Raises Overloaded where the machine is too busy.

        A process that ends while it judges says that the demand is too large.
        """
        demand = msgspec.json.encode(Demand(self.seconds, wanted))
        for _ in range(2):  # one that has idled for long may be gone
            with self._lock:
                idle = self._free.pop() if self._free else None
            checker = idle or Checker(self._vocabulary)
            try:
                verdict = checker.judge(demand)
            except TimeoutError:
                raise Overloaded(
                    "The machine is too busy to compile grammars. Try again later.", self.seconds
                ) from None
            except (OSError, CheckerDied):
                if idle is not None:
                    continue
                break
            with self._lock:
                self._free.append(checker)
            return None if verdict.late else verdict
        return Verdict(error=DIED, lasts=False)

    def close(self) -> None:
        """Ends the processes that are idle."""
        while self._free:
            self._free.pop().close()
