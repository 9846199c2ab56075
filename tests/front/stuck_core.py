"""The program of a core whose device hangs for a while: a real process, scheduler and sockets.

    python -m tests.front.stuck_core SECONDS

The step that computes the eighth position hangs. Run by `test_stalls.py`.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import msgspec

from octavo.core import CoreSettings
from octavo.engine.core import EngineCore
from octavo.engine.process import run
from octavo.engine.scheduler import Scheduler
from octavo.types import StepPlan, WorkerInfo, unpack
from tests.engine.machine import VOCAB, Done, Machine

HANG_AT = 8


class StuckMachine(Machine):
    """Hangs once, in its second step of decoding."""

    seconds = 0.0

    def submit(self, plan: StepPlan) -> Done:
        if self.seconds and max(unpack(plan.starts)) >= HANG_AT:
            seconds, self.seconds = self.seconds, 0.0
            self.the_device_does_not_answer(seconds)
        return super().submit(plan)

    def the_device_does_not_answer(self, seconds: float) -> None:
        time.sleep(seconds)


def main() -> int:
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=CoreSettings)
    sizes = {"num_blocks": 64, "block_size": 4, "max_model_len": 64}
    machine = StuckMachine(64, 4, settings.scheduler.max_num_seqs)
    machine.seconds = float(sys.argv[1])
    core = EngineCore(Scheduler(replace(settings.scheduler, **sizes)), machine)
    info = WorkerInfo(64, 4, 64, VOCAB, "none", "none", 0, 0)
    return run(settings.addresses, settings.parent, lambda report: (core, info))


if __name__ == "__main__":
    sys.exit(main())
