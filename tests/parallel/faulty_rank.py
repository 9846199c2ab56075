"""A worker's program with a fault: `python -m tests.parallel.faulty_rank KIND STEP`.

Rank 1 begins step STEP and then raises before its first collective, hangs, or ends.
"""

from __future__ import annotations

import os
import sys
import time

from octavo import rank
from octavo.types import StepPlan
from octavo.worker.runner import StepHandle
from octavo.worker.worker import Worker


def main() -> int:
    kind, step = sys.argv[1], int(sys.argv[2])
    submit = Worker.submit

    def faulty(self: Worker, plan: StepPlan) -> StepHandle:
        if plan.step == step and self.world.mesh.tp.rank + self.world.mesh.pp.rank == 1:
            if kind == "raise":
                raise RuntimeError("a fault of this rank alone")
            if kind == "hang":
                time.sleep(3600)
            os._exit(7)
        return submit(self, plan)

    Worker.submit = faulty  # type: ignore[method-assign]
    return rank.main()


if __name__ == "__main__":
    sys.exit(main())
