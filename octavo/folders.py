"""Private folders for the sockets of a server, and the end of those that a killed one left.

Who owns a folder holds a lock on a file in it, which the kernel lets go of when the process ends in
whatever way; that holds between containers that share a folder for temporary files, where process
ids would not. Not for: what lies in them (`engine/channel.py`, `hub.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

PREFIX: Final = "octavo-run-"
_LOCK: Final = "lock"


class PrivateFolder:
    """A folder of this process, mode 0700, until `remove`. Raises OSError if there can be none."""

    def __init__(self) -> None:
        remove_left()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        # Locked before it has the name by which others look for it.
        fresh = self.path / f"{_LOCK}.new"
        self._lock = os.open(fresh, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        fresh.rename(self.path / _LOCK)

    def remove(self) -> None:
        """Ends it with all that is in it; once."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_left() -> None:
    """Removes this user's folders whose owners are gone. What cannot be removed stays."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.lstat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
