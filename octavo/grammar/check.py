"""The program that compiles demands for real, in a process of its own: `python -m ... .check`.

Compiling can take minutes, fill the memory or overflow a stack, and cannot be interrupted; in here
that harms nobody. Each demand is judged by a fork, which a timer ends when its processor time is
over, and which takes nothing along that was read for all. A grammar that compiles is tried with a
few tokens too, as some become too complex only then. Reads one demand a line from standard input,
after the vocabulary, and writes one answer a line. Next file: `checker.py`, the other end.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from random import Random
from time import process_time

import llguidance
import msgspec
import numpy as np

from octavo.config import Vocabulary
from octavo.grammar.forms import GrammarError, form_of
from octavo.grammar.request import Form, StructuredOutputs
from octavo.grammar.vocabulary import new_matcher, open_vocabulary, special_texts

MAX_MEMORY = 4 * 2**30  # bytes of address space
COMPILE_SECONDS = 0.5  # of this process's own time: a batch may have to wait for it
TRIED_TOKENS = 32
WAYS = 3
MASK_SECONDS = 0.015  # a token's, on average
DIED = "it is too large or nested too deep to compile; make it simpler"
SLOW = "it takes too long for each token; make it simpler"


class Verdict(msgspec.Struct, frozen=True):
    """A grammar, or why there is none."""

    form: Form | None = None
    error: str = ""
    late: bool = False  # its time was over
    lasts: bool = True  # false for what another moment might judge differently


class Demand(msgspec.Struct, frozen=True):
    """What is wanted, and the processor time for it in seconds."""

    seconds: float
    wanted: StructuredOutputs


def judge(
    wanted: StructuredOutputs, tokenizer: llguidance.LLTokenizer, special: dict[str, int]
) -> Verdict:
    """Makes, compiles and tries the grammar of one demand."""
    name = next(
        field
        for field in ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
        if msgspec.structs.asdict(wanted)[field] is not None
    )
    try:
        form = form_of(wanted, special)
        started = process_time()
        matcher = new_matcher(tokenizer, form.text)
        if matcher.is_error():
            return Verdict(error=f"{name}: {_reason(matcher.get_error())}")
        if process_time() - started > COMPILE_SECONDS:
            return Verdict(
                error=f"{name}: it takes too long to compile; make it simpler", lasts=False
            )
        problem = _try(matcher, tokenizer)
    except GrammarError as error:
        return Verdict(error=str(error))
    except RecursionError:
        return Verdict(error=f"{name}: it is nested too deep; make it flatter")
    if problem:
        return Verdict(error=f"{name}: {problem}", lasts=problem != SLOW)
    return Verdict(form)


def _try(matcher: llguidance.LLMatcher, tokenizer: llguidance.LLTokenizer) -> str:
    """Goes some random ways from the beginning; what is wrong, if anything."""
    started = process_time()
    for seed in range(WAYS):
        problem = _go(matcher.deep_copy(), set(tokenizer.eos_tokens), Random(seed))
        if not problem and process_time() - started > (seed + 1) * TRIED_TOKENS * MASK_SECONDS:
            problem = SLOW
        if problem:
            return problem
    return ""


def _go(matcher: llguidance.LLMatcher, eos: set[int], draw: Random) -> str:
    for step in range(TRIED_TOKENS):
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        more = [token for token in allowed.tolist() if token not in eos]
        if matcher.is_error():
            return _reason(matcher.get_error())
        if not more or matcher.is_stopped():
            if step == 0:
                return "it allows no answer, or an empty one only; allow at least one character"
            return "" if matcher.is_accepting() else "it comes to where nothing is allowed"
        if not matcher.consume_token(draw.choice(more)):
            return _reason(matcher.get_error())
    return ""


def _reason(error: str) -> str:
    """What the library says, in one line and without its state."""
    lines = [line.strip() for line in error.replace("<non-verbose/>", "").splitlines()]
    shown = " ".join(line for line in lines if line)
    if "NoExtension" in shown:
        return "it allows no answer at all; make it wider"
    if shown.startswith("oneOf "):
        return (
            "oneOf cannot be enforced where a value could meet two of its schemas; tell them apart "
            "by a required property with a const, or use anyOf"
        )
    if "recursion limit" in shown:
        return "it is nested too deep; make it flatter"
    shown = shown.partition("; following special tokens")[0][:240] or "unknown error"
    return f"it cannot be enforced; mend what is named here: {shown.rstrip('. ')}"


def main() -> int:
    """Serves demands until its input ends."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, target = sys.stdin.buffer, sys.stdout.buffer
    vocabulary = msgspec.json.decode(source.readline(), type=Vocabulary)
    tokenizer, special = open_vocabulary(vocabulary), special_texts(vocabulary)
    target.write(b"{}\n")
    target.flush()
    while line := source.readline():
        demand = msgspec.json.decode(line, type=Demand)
        if (child := os.fork()) == 0:
            signal.setitimer(signal.ITIMER_PROF, demand.seconds)  # its signal ends the process
            verdict = judge(demand.wanted, tokenizer, special)
            signal.setitimer(signal.ITIMER_PROF, 0)
            target.write(msgspec.json.encode(verdict) + b"\n")
            target.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status):
            late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
            target.write(msgspec.json.encode(Verdict(error=DIED, late=late, lasts=False)) + b"\n")
            target.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
