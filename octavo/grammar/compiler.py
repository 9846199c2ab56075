"""`GrammarCompiler`: demands to checked grammars, within a time, without harm to this process.

All demands are tried for a short time first; the few that need longer go on in a lane of their own,
so that they do not hold up the others, whoever sends how many of them. The last verdicts are
remembered, good and bad, but none that a limit of time gave. Not for: the processes (`checker.py`,
`check.py`), or following an answer (`matcher.py`).
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from concurrent.futures import Future

import msgspec

from octavo.config import Vocabulary
from octavo.errors import InvalidRequest
from octavo.grammar.check import Verdict
from octavo.grammar.checker import Lane
from octavo.grammar.request import PARAM, Form, StructuredOutputs

# Seconds of processor time for one demand, of the two that a client may have to wait.
SECONDS = 1.4
QUICK_SECONDS = 0.2  # in which all but a few are done
QUICK_PROCESSES = 2
QUICK_WAITING = 64  # demands, those being judged among them
SLOW_PROCESSES = 1
SLOW_WAITING = 2
REMEMBERED = 256  # verdicts
REMEMBERED_BYTES = 2**24
MAX_DEMAND = 2**20  # bytes of JSON
MAX_GRAMMAR = 2**21  # characters; whatever compiles is small enough to be remembered


class GrammarCompiler:
    """Compiles for one model; safe to use from several threads, which may have to wait."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._known: OrderedDict[bytes, Verdict] = OrderedDict()
        self._known_bytes = 0
        self._lock = threading.Lock()
        self._quick = Lane(
            vocabulary,
            "grammars",
            seconds=QUICK_SECONDS,
            width=QUICK_PROCESSES,
            waiting=QUICK_WAITING,
        )
        self._slow = Lane(
            vocabulary,
            "slow-grammars",
            seconds=SECONDS,
            width=SLOW_PROCESSES,
            waiting=SLOW_WAITING,
        )
        lanes = (self._quick, self._slow)
        self.close = weakref.finalize(self, _close, lanes)  # called at the latest at exit

    def known(self, wanted: StructuredOutputs) -> Form | None:
        """The grammar, if it has been compiled before. Raises as `compile` does."""
        with self._lock:
            key = _written(wanted)
            verdict = self._known.get(key)
            if verdict is None:
                return None
            self._known.move_to_end(key)
        return _form(verdict, wanted)

    def compile(self, wanted: StructuredOutputs) -> Form:
        """Raises InvalidRequest for what cannot be enforced or takes too long.

        Raises Overloaded where too many wait, or too many of those that take long.
        """
        return self.submit(wanted).result()

    def form(self, wanted: StructuredOutputs | None) -> Form | None:
        """As `compile`, None if nothing is wanted."""
        return None if wanted is None else self.compile(wanted)

    def submit(self, wanted: StructuredOutputs) -> Future[Form]:
        """As `compile`, which others need not wait for."""
        promise: Future[Form] = Future()
        if (known := self.known(wanted)) is not None:
            promise.set_result(known)
            return promise
        if not self._vocabulary.eos_ids:
            raise InvalidRequest(
                f"{PARAM}: this model has no end token, so that no answer could end.", PARAM
            )
        line = _written(wanted)
        if len(line) > MAX_DEMAND:
            large = f"it has {len(line)} bytes as JSON; use at most {MAX_DEMAND}"
            _form(Verdict(error=large), wanted)
        self._quick.submit(lambda: self._judge_quickly(wanted, line, promise))
        return promise

    def _judge_quickly(self, wanted: StructuredOutputs, line: bytes, promise: Future[Form]) -> None:
        if not promise.set_running_or_notify_cancel():
            return  # who asked has gone away
        try:
            verdict = self._quick.judge(wanted)
            if verdict is None:
                self._slow.submit(lambda: self._judge_slowly(wanted, line, promise))
                return
            promise.set_result(self._settle(verdict, wanted, line))
        except BaseException as error:
            promise.set_exception(error)

    def _judge_slowly(self, wanted: StructuredOutputs, line: bytes, promise: Future[Form]) -> None:
        try:
            verdict = self._slow.judge(wanted)
            if verdict is None:
                late = (
                    f"it takes more than {self._slow.seconds} seconds to compile; make it simpler"
                )
                _form(Verdict(error=late), wanted)
                return
            promise.set_result(self._settle(verdict, wanted, line))
        except BaseException as error:
            promise.set_exception(error)

    def _settle(self, verdict: Verdict, wanted: StructuredOutputs, line: bytes) -> Form:
        """The form, or why there is none, which is remembered."""
        if verdict.form is not None and len(verdict.form.text) > MAX_GRAMMAR:
            verdict = Verdict(error=f"it makes a grammar of over {MAX_GRAMMAR} characters; cut it")
        if verdict.lasts:
            self._remember(line, verdict)
        return _form(verdict, wanted)

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


def _close(lanes: tuple[Lane, ...]) -> None:
    for lane in lanes:
        lane.close()
