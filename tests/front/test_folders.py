"""Folders of sockets: private, removed, and not left by processes that were killed."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from octavo.folders import PREFIX, PrivateFolder

OWNER = """
import sys
from octavo.folders import PrivateFolder
print(PrivateFolder().path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_a_folder_is_private_and_goes_with_all_that_is_in_it(room: Path) -> None:
    folder = PrivateFolder()
    assert folder.path.parent == room
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    (folder.path / "hub").write_text("")
    folder.remove()
    assert list(room.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_nothing_else(room: Path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", OWNER], **pipes) as owner:  # type: ignore[call-overload]
        left = Path(owner.stdout.readline().decode().strip())
        others = [room / f"{PREFIX}mine", room / "octavo-other"]  # nobody's lock is in them
        for other in others:
            other.mkdir()
        (room / f"{PREFIX}link").symlink_to(room / "octavo-other")
        first = PrivateFolder()
        assert left.is_dir(), "its owner lives"
        owner.kill()
    second = PrivateFolder()
    assert not left.exists()
    assert all(other.is_dir() for other in others)
    assert first.path.is_dir()
    assert os.listdir(second.path) == ["lock"]
    for folder in (first, second):
        folder.remove()
