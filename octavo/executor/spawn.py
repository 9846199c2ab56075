"""Workers as processes of this machine.

Not for: what they are told (`remote.py`) or do (`octavo/rank.py`, the next file).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from octavo.config import ParallelConfig, Place
from octavo.executor.channel import Binder, Context
from octavo.executor.records import RankSettings

PROGRAM = (sys.executable, "-m", "octavo.rank")
CHECK = "--check"  # answers `octavo doctor` in place of loading a model
FOLLOW = "--follow"  # has the kernel end the process with its parent
LOOPBACK = "127.0.0.1"


class Crew(Protocol):
    """Who starts the workers, sees that they live, and ends them."""

    def binder(self, context: Context) -> Binder:
        """Opens the core's ends of the channels; called once, before all else."""

    def places(self) -> list[Place]:
        """Where each rank is to be. Raises ConfigError if there is no room for them."""

    def start(self, settings: Sequence[RankSettings]) -> None:
        """Starts all of them and returns at once."""

    def lost(self) -> str:
        """Which worker is gone and how; empty while all live. Called by another thread."""

    def dump_stacks(self) -> None:
        """Has each worker write the stacks of its threads to its log, where that can be done."""

    def close(self, patience: float) -> None:
        """Ends them all, by force after `patience` seconds; may be called twice."""


class LocalCrew:
    """A process for each rank."""

    def __init__(
        self,
        parallel: ParallelConfig,
        folder: Path | None = None,
        *,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        """`folder` is private to this user and removed by its owner; one is made if left out.

        `program` is the command line of a worker's process; tests have one of their own.
        """
        self._parallel = parallel
        self._program = tuple(program)
        self._own: tempfile.TemporaryDirectory[str] | None = None
        if folder is None:  # removed at the interpreter's end at the latest
            self._own = tempfile.TemporaryDirectory(prefix="octavo-", ignore_cleanup_errors=True)
            folder = Path(self._own.name)
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def binder(self, context: Context) -> Binder:
        """Sockets in the private folder."""
        return Binder(context, folder=self._folder)

    def places(self) -> list[Place]:
        """All here; collectives go over the loopback interface."""
        parallel = self._parallel
        hosts = [LOOPBACK] * parallel.size
        # A file: nothing listens. Its name is new with each life of a core in the same folder.
        return places(parallel, f"file:{self._folder / f'ranks-{os.getpid()}'}", hosts)

    def start(self, settings: Sequence[RankSettings]) -> None:
        """Starts the processes."""
        # The kernel ends a process with the thread that started it, which must be one that lasts.
        lasts = threading.current_thread() is threading.main_thread()
        program = (*self._program, FOLLOW) if lasts else self._program
        for one in settings:
            process = subprocess.Popen(program, stdin=subprocess.PIPE)
            self._processes.append(process)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # its end is noticed by `lost`
                process.stdin.write(msgspec.json.encode(one))
                process.stdin.close()

    def lost(self) -> str:
        """By exit codes."""
        for rank, process in enumerate(self._processes):
            code = process.poll()
            if code is not None:
                return f"worker rank {rank} (process {process.pid}) {_ended(code)}"
        return ""

    @property
    def pids(self) -> list[int]:
        """The processes, by rank."""
        return [process.pid for process in self._processes]

    def dump_stacks(self) -> None:
        """SIGUSR1, which they answer even if they hang."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)

    def close(self, patience: float) -> None:
        """Waits, kills, and removes the folder if it is ours."""
        end = time.monotonic() + patience
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._processes.clear()
        if self._own is not None:
            self._own.cleanup()


def places(parallel: ParallelConfig, store: str, hosts: Sequence[str]) -> list[Place]:
    """One for each rank, by the host that each is on."""
    return [
        Place(
            rank=rank,
            tensor=parallel.tensor,
            pipeline=parallel.pipeline,
            local_rank=hosts[:rank].count(host),
            local_size=hosts.count(host),
            store=store,
            host=host,
        )
        for rank, host in enumerate(hosts)
    ]


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"
