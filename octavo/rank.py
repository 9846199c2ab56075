"""The program of one worker's process, where a model is spread over several of this machine.

Started by `executor/spawn.py` as `python -m octavo.rank`; its settings come over standard input.
Not for: workers on other machines, which are Ray's actors (`executor/ray.py`).
"""

from __future__ import annotations

import ctypes
import faulthandler
import signal
import sys

import msgspec

from octavo.executor.records import RankSettings
from octavo.executor.spawn import CHECK, FOLLOW

STDERR = 2
PR_SET_PDEATHSIG = 1


def main() -> int:
    """Reads the settings, serves until told to leave, and gives the exit code."""
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=RankSettings)
    # Ctrl-C and service managers signal every process of a group; the core says when to leave.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, file=STDERR, all_threads=True)
    if FOLLOW in sys.argv:
        die_with_parent()
    if CHECK in sys.argv:
        from octavo.executor.checkup import examine

        return examine(settings)
    from octavo.executor.serving import serve

    return serve(settings)


def die_with_parent() -> None:
    """Has the kernel end this process with its parent, even while it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
