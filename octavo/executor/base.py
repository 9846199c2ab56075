"""The seam between the engine core, which decides, and the workers, which compute.

Five methods. `submit` never blocks on the device: on the CPU it computes and returns a finished
handle, on a GPU it launches, remotely it sends. Plans run strictly in order.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from octavo.types import StepPlan, StepResult, WorkerInfo


class Handle(Protocol):
    """A step on its way."""

    def done(self) -> bool:
        """True if `result` would not wait."""

    def result(self) -> StepResult:
        """The step's result; raises what the step raised."""


class Executor(Protocol):
    """Runs plans on one or many workers."""

    def start(self) -> WorkerInfo:
        """Loads the model and allocates the cache; called once, before all else."""

    def submit(self, plan: StepPlan) -> Handle:
        """Starts a step. After a failed step all plans of the same epoch are void."""

    def control(self, op: str, **args: str) -> dict[str, str]:
        """Runs an operation that is not a step on every worker."""

    def alive(self) -> bool:
        """False once a worker is lost."""

    def close(self) -> None:
        """Frees all that `start` took; may be called twice."""


@runtime_checkable
class Preparing(Protocol):
    """An Executor that can do a part of a step's work before it is known to be wanted."""

    def prepare(self, plan: StepPlan) -> None:
        """For a plan of decode rows: makes `submit` of this very plan quicker. Raises nothing.

        Another plan may be submitted instead, which holds the same and more.
        """
