"""`GrammarCompiler`: demands to checked grammars, within a time, without harm to this process.

Keeps a few processes of `check.py`, started when they are first needed and ended when a demand
takes too long, and remembers its last verdicts, good and bad. Not for: what a process does
(`check.py`), or following an answer (`matcher.py`).
"""

from __future__ import annotations

import select
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from octavo.config import Vocabulary
from octavo.errors import InvalidRequest, Overloaded, RequestFailed
from octavo.grammar.check import Verdict
from octavo.grammar.request import PARAM, Form, StructuredOutputs

SECONDS = 1.6  # for one demand, of the two that a client may have to wait
START_SECONDS = 30.0  # for a process to be ready, on a busy machine
PROCESSES = 2
MAX_WAITING = 256  # demands
REMEMBERED = 256  # verdicts
REMEMBERED_BYTES = 2**24
MAX_DEMAND = 2**20  # bytes of JSON
MAX_GRAMMAR = 2**21  # characters; whatever compiles is small enough to be remembered


class CheckerDied(Exception):
    """The process ended or was ended while it worked."""


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

    def judge(self, wanted: bytes, seconds: float) -> Verdict:
        """Raises CheckerDied, and TimeoutError when the time is over; both end the process.

        RequestFailed says that it did not start, which is no fault of what is wanted.
        """
        if not self._ready:
            self._start()
        try:
            self._send(wanted + b"\n")
            return msgspec.json.decode(self._receive(seconds), type=Verdict)
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


class GrammarCompiler:
    """Compiles for one model; safe to use from several threads, which may have to wait."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._known: OrderedDict[bytes, Verdict] = OrderedDict()
        self._known_bytes = 0
        self._lock = threading.Lock()
        self._free: list[Checker] = []
        self._waiting = 0
        self._threads = ThreadPoolExecutor(PROCESSES, "grammars")
        self._places = threading.Semaphore(PROCESSES)
        self.close = weakref.finalize(self, _close, self._free)  # called at the latest at exit

    def known(self, wanted: StructuredOutputs) -> Form | None:
        """The grammar, if it has been compiled before. Raises as `compile` does."""
        with self._lock:
            key = _written(wanted)
            verdict = self._known.get(key)
            if verdict is None:
                return None
            self._known.move_to_end(key)
        return _form(verdict, wanted)

    def submit(self, wanted: StructuredOutputs) -> Future[Form]:
        """As `compile`, in a thread of its own. Raises Overloaded if too many wait already."""
        with self._lock:
            if self._waiting >= MAX_WAITING:
                raise Overloaded(
                    f"{self._waiting} grammars wait to be compiled. Try again later.", SECONDS
                )
            self._waiting += 1
        future = self._threads.submit(self.compile, wanted)
        future.add_done_callback(lambda _: self._settled())
        return future

    def _settled(self) -> None:
        with self._lock:
            self._waiting -= 1

    def compile(self, wanted: StructuredOutputs) -> Form:
        """Raises InvalidRequest for what cannot be enforced or takes too long."""
        if (form := self.known(wanted)) is not None:
            return form
        if not self._vocabulary.eos_ids:
            raise InvalidRequest(
                f"{PARAM}: this model has no end token, so that no answer could end.", PARAM
            )
        line = _written(wanted)
        if len(line) > MAX_DEMAND:
            large = f"it has {len(line)} bytes as JSON; use at most {MAX_DEMAND}"
            return _form(Verdict(error=large), wanted)
        verdict = self._judge(line)
        if verdict.form is not None and len(verdict.form.text) > MAX_GRAMMAR:
            verdict = Verdict(error=f"it makes a grammar of over {MAX_GRAMMAR} characters; cut it")
        self._remember(line, verdict)
        return _form(verdict, wanted)

    def _judge(self, line: bytes) -> Verdict:
        with self._places:
            for _ in range(2):  # one that has idled for long may be gone
                with self._lock:
                    idle = self._free.pop() if self._free else None
                checker = idle or Checker(self._vocabulary)
                try:
                    verdict = checker.judge(line, SECONDS)
                except TimeoutError:
                    return Verdict(
                        error=f"it takes more than {SECONDS} seconds to compile; make it simpler"
                    )
                except (OSError, CheckerDied):
                    if idle is not None:
                        continue
                    break
                with self._lock:
                    self._free.append(checker)
                return verdict
        return Verdict(error="it is too large or nested too deep to compile; make it simpler")

    def _remember(self, key: bytes, verdict: Verdict) -> None:
        size = len(key) + len(msgspec.json.encode(verdict))
        with self._lock:
            if key in self._known:
                return
            self._known[key] = verdict
            self._known_bytes += size
            while len(self._known) > REMEMBERED or self._known_bytes > REMEMBERED_BYTES:
                old, gone = self._known.popitem(last=False)
                self._known_bytes -= len(old) + len(msgspec.json.encode(gone))


def _written(wanted: StructuredOutputs) -> bytes:
    try:
        return msgspec.json.encode(wanted)
    except RecursionError:
        raise InvalidRequest(f"{PARAM}: it is nested too deep; make it flatter.", PARAM) from None
    except (TypeError, ValueError, OverflowError, msgspec.EncodeError) as error:
        raise InvalidRequest(f"{PARAM}: it is no JSON: {str(error)[:200]}.", PARAM) from None


def _form(verdict: Verdict, wanted: StructuredOutputs) -> Form:
    if verdict.form is None:
        error = verdict.error
        if error.startswith("it "):  # nobody was there to say which field
            given = msgspec.structs.asdict(wanted).items()
            error = f"{next(name for name, value in given if value is not None)}: {error}"
        raise InvalidRequest(f"{PARAM}.{error}.", PARAM)
    return verdict.form


def _close(checkers: list[Checker]) -> None:
    while checkers:
        checkers.pop().close()
