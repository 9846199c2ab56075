"""LocalExecutor: the worker in this process.

On the CPU a step is computed inside `submit`; a GPU is given its work there.

Not for: other processes or machines. Next file: `worker/worker.py`.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING

from msgspec.structs import replace

from octavo.config import WorkerConfig
from octavo.executor.base import Handle
from octavo.types import StepPlan, StepResult, WorkerInfo

if TYPE_CHECKING:
    from octavo.worker.worker import Worker


def import_worker() -> None:
    """Imports what `LocalExecutor.start` will, torch above all; for a thread that has time."""
    import octavo.worker.worker  # noqa: F401


def wake_device(device: str, cache_dir: str | None) -> None:
    """Begins what takes a GPU's driver long; for a thread beside that which imports.

    Not where kernels are still to be compiled: processes will be forked for that, before a GPU is
    used.
    """
    from octavo.device.wake import has_kernels, wake

    name, _, index = device.partition(":")
    if name == "cuda" and (index or "0").isdecimal() and has_kernels(cache_dir):
        wake(int(index or "0"))


class FailedHandle:
    """A step that could not be started."""

    __slots__ = ("_error",)

    def __init__(self, error: Exception) -> None:
        self._error = error

    def done(self) -> bool:
        """Always true."""
        return True

    def result(self) -> StepResult:
        """Raises what the step raised."""
        raise self._error


class LocalExecutor:
    """Executor with one worker in this process.

    After a step that raised, later plans of the same epoch are not run: they may build on what it
    was to write. Each of them raises the same error.
    """

    def __init__(
        self, config: WorkerConfig, *, report: Callable[[str], None] | None = None
    ) -> None:
        """`report` is told what the start is doing, in a few words, as it changes."""
        self._config = config
        self._report = report
        self._worker: Worker | None = None
        self._failed_epoch: int | None = None
        self._failure: Exception | None = None

    def start(self) -> WorkerInfo:
        """Loads the model. Raises ConfigError or CheckpointError."""
        started = perf_counter()
        if self._report is not None:
            self._report("import")
        # Here and not above: this import brings torch, and the module must stay cheap.
        from octavo.worker.worker import Worker

        imported = perf_counter() - started
        worker = Worker(self._config)
        info = worker.load(self._report)
        self._worker = worker
        return replace(info, timings=(("import", imported), *info.timings))

    def submit(self, plan: StepPlan) -> Handle:
        """Starts the step. Raises nothing: the handle does."""
        assert self._worker is not None, "start comes first"
        if self._failure is not None and plan.epoch == self._failed_epoch:
            return FailedHandle(self._failure)
        self._failure = None
        try:
            return self._worker.submit(plan)
        except Exception as error:  # of any kind: the core finds the guilty sequence
            traceback.clear_frames(error.__traceback__)  # they hold the step's tensors
            self._worker.trim()
            self._failed_epoch, self._failure = plan.epoch, error
            return FailedHandle(error)

    def prepare(self, plan: StepPlan) -> None:
        """Lays out the plan's inputs; what fails will fail again in `submit`."""
        if self._worker is None or self._failure is not None:
            return
        with contextlib.suppress(Exception):
            self._worker.prepare(plan)

    def control(self, op: str, **args: str) -> dict[str, str]:
        """Operations of the worker; see `Worker.control`."""
        assert self._worker is not None, "start comes first"
        return self._worker.control(op, **args)

    def alive(self) -> bool:
        """True from `start` to `close`, as this process is the worker, unless its device died."""
        return self._worker is not None and self._worker.usable()

    def close(self) -> None:
        """Drops the worker, and with it weights and cache."""
        self._worker = None
        self._failure = None
