"""`octavo doctor` with several workers: starts each where it would run, and has them talk.

For each rank its host, address, versions, GPUs, shared memory and clock, then the time of an
all-reduce. Where that does not come to its end, the ranks that did not are named, which is what a
start that hangs does not tell. Not for: what a rank finds out (`executor/checkup.py`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import msgspec
import zmq

from octavo.config import WorkerConfig
from octavo.errors import OctavoError
from octavo.executor.channel import Context, Socket
from octavo.executor.records import Answer, Broken, FromRank, RankSettings
from octavo.executor.spawn import CHECK, PROGRAM, Crew, LocalCrew

Rows = list[tuple[str, str]]

FACTS, TIMES = 0, 1  # numbers of a rank's answers, as in `executor/checkup.py`
CLOCK_SECONDS = 1.0  # by which clocks may differ; logs and deadlines are told by them
ALIKE = ("octavo", "torch", "python", "nccl")  # must be the same everywhere


def examine_ranks(worker: WorkerConfig, limit: float) -> Rows:
    """Rows of findings; those of faults begin with MISSING. Takes at most about `limit` seconds."""
    crew = _crew(worker)
    context: Context = zmq.Context()
    sockets: list[Socket] = []
    try:
        places = crew.places()
        binder = crew.binder(context)
        results, address = binder.bind(zmq.PULL, "results")
        sockets.append(results)
        crew.start(
            [
                RankSettings(
                    worker=worker,
                    place=place,
                    plans="",
                    results=address,
                    pulse="",
                    parent=os.getpid() if worker.parallel.backend == "mp" else 0,
                    keys=binder.keys(),
                )
                for place in places
            ]
        )
        return _rows(results, len(places), limit, crew.lost)
    except OctavoError as error:
        return [("workers", f"MISSING: {error.message}")]
    finally:
        crew.close(0.0)
        for socket in sockets:
            socket.close()
        context.term()


def _crew(worker: WorkerConfig) -> Crew:
    if worker.parallel.backend == "ray":
        from octavo.executor.ray import RayCrew

        return RayCrew(worker.parallel, worker.device, worker.threads, check=True)
    return LocalCrew(worker.parallel, program=(*PROGRAM, CHECK))


def _rows(results: Socket, count: int, limit: float, lost: Callable[[], str]) -> Rows:
    """Hears the ranks until all have given both answers, or one is lost, or the time is over."""
    decoder: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
    facts: dict[int, dict[str, str]] = {}
    times: dict[int, dict[str, str]] = {}
    broken: dict[int, str] = {}
    clocks: dict[int, float] = {}
    end = time.monotonic() + limit
    while len(times) + len(broken) < count and (left := end - time.monotonic()) > 0:
        if not results.poll(min(500, int(1000 * left) + 1)):
            if lost() and not times:  # those that have said all they had end too
                break
            continue
        message = decoder.decode(results.recv())
        if isinstance(message, Broken):
            broken[message.rank] = message.error
        elif isinstance(message, Answer) and message.number == FACTS:
            clocks[message.rank] = time.time() - float(message.result["clock"])
            facts[message.rank] = message.result
        elif isinstance(message, Answer):
            times[message.rank] = message.result
    rows: Rows = []
    for rank in range(count):
        rows += [(f"rank {rank}", _line(facts[rank]))] if rank in facts else []
        rows += [(f"rank {rank}", f"MISSING: {broken[rank]}")] if rank in broken else []
    return [*rows, *_differences(facts, clocks), *_verdict(facts, times, broken, count, limit)]


def _line(found: dict[str, str]) -> str:
    shown = {name: value for name, value in found.items() if name != "clock"}
    return ", ".join(f"{name} {value}" for name, value in shown.items())


def _differences(facts: dict[int, dict[str, str]], clocks: dict[int, float]) -> Rows:
    rows: Rows = []
    for name in ALIKE:
        found = {one[name] for one in facts.values() if name in one}
        if len(found) > 1:
            versions = ", ".join(sorted(found))
            rows.append((name, f"MISSING: the same version on every rank; there are {versions}"))
    if clocks and (apart := max(clocks.values()) - min(clocks.values())) > CLOCK_SECONDS:
        rows.append(
            ("clocks", f"MISSING: the same time on every rank; they are {apart:.1f} s apart")
        )
    return rows


def _verdict(
    facts: dict[int, dict[str, str]],
    times: dict[int, dict[str, str]],
    broken: dict[int, str],
    count: int,
    limit: float,
) -> Rows:
    """The slowest rank's times, or who did not come."""
    if len(times) == count:
        return [(name, _slowest([one[name] for one in times.values()])) for name in times[0]]
    absent = [rank for rank in range(count) if rank not in facts]
    stuck = [rank for rank in facts if rank not in times and rank not in broken]
    rows: Rows = []
    if absent:
        rows.append(("workers", f"MISSING: ranks {absent} did not start within {limit:g} s"))
    if stuck and not absent:
        rows.append(
            (
                "all-reduce",
                f"MISSING: ranks {stuck} did not come out of it within {limit:g} s; a firewall "
                "between the addresses above, or an interface that the others cannot reach",
            )
        )
    return rows


def _slowest(texts: list[str]) -> str:
    return max(texts, key=lambda text: int(text.split()[0]))
