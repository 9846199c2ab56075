"""A server whose engine answers by the clock: what two clients measure of it must be the same.

    python -m tests.e2e.paced MODEL server|core

The core speaks the real messages; each sequence gets its first token FIRST seconds after it came
and one more every GAP seconds, whatever else goes on.
"""

from __future__ import annotations

import heapq
import random
import signal
import sys
import time
from pathlib import Path

import msgspec

FIRST = 0.4  # seconds
GAP = 0.06


class PacedCore:
    """Stands where an `EngineCore` stands."""

    allowance = 0.0

    def __init__(self) -> None:
        self._due: list[tuple[float, str]] = []
        self._left: dict[str, int] = {}  # tokens still to come
        self._ids = random.Random(7)

    def add(self, request) -> None:
        self._left[request.id] = request.params.max_tokens
        heapq.heappush(self._due, (request.arrival + FIRST, request.id))

    def abort(self, ids) -> None:
        for name in ids:
            self._left.pop(name, None)

    def control(self, op: str, args) -> dict[str, str]:
        return {}

    def check(self) -> None:
        """Nothing can be lost."""

    def close(self) -> None:
        """Nothing is held."""

    def has_work(self) -> bool:
        return bool(self._left)

    def patience(self) -> float:
        return 0.0

    def step(self):
        from octavo.types import SequenceOutput, StepOutputs, StepStats

        outputs = []
        time.sleep(min(0.005, max(0.0, self._due[0][0] - time.monotonic())))
        while self._due and self._due[0][0] <= time.monotonic():
            due, name = heapq.heappop(self._due)
            left = self._left.pop(name, 0)
            if not left:
                continue
            token = self._ids.randrange(300, 49_000)
            outputs.append(SequenceOutput(name, [token], "length" if left == 1 else None))
            if left > 1:
                self._left[name] = left - 1
                heapq.heappush(self._due, (due + GAP, name))
        return StepOutputs(outputs, StepStats(len(self._left), sampled_tokens=len(outputs)))


def core() -> int:
    from octavo.core import CoreSettings
    from octavo.engine.process import run
    from octavo.types import WorkerInfo

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=CoreSettings)
    info = WorkerInfo(2**16, 16, 2048, 49152, "none", "none", 0, 0)
    return run(settings.addresses, settings.parent, lambda report: (PacedCore(), info))


def server(model: str) -> int:
    from octavo import launch, log
    from octavo.options import EngineArgs, ServerArgs

    log.setup("info")
    program = (sys.executable, "-m", "tests.e2e.paced", model, "core")
    http = ServerArgs(host="127.0.0.1", port=0, served_model_name=["small"])
    return launch.serve(EngineArgs(model=model, max_num_seqs=64), http, program=program)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    sys.exit(core() if sys.argv[2] == "core" else server(sys.argv[1]))
