"""Finding and building the library: once, safely at the same time, and a reason where it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from octavo.errors import ConfigError
from octavo.kernels.cpu import build
from octavo.kernels.cpu.binding import load
from octavo.kernels.select import select
from tests.kernels.native_parts import native_library, native_ops

FIND = "import sys; from pathlib import Path; from octavo.kernels.cpu.build import find_library; \
print(find_library(Path(sys.argv[1])))"


@pytest.fixture
def machine() -> None:
    """A machine that can build, without a library in the package."""
    if build.refuse(build.cpu_features()) or build.find_compiler() is None:
        pytest.skip("this machine cannot build native kernels")
    if any(build.PREBUILT.glob("native-*.so")):
        pytest.skip("the package has a library of its own")


@pytest.mark.usefixtures("machine")
def test_two_processes_build_at_once_and_the_third_finds_it(tmp_path: Path) -> None:
    running = [
        subprocess.Popen(
            [sys.executable, "-c", FIND, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    found = {Path(process.communicate(timeout=240)[0].strip()) for process in running}
    assert len(found) == 1
    files = list((tmp_path / "kernels").iterdir())
    assert files == list(found)  # and no temporary file is left
    before = files[0].stat().st_mtime_ns
    assert build.find_library(tmp_path) == files[0]
    assert files[0].stat().st_mtime_ns == before


def test_the_reason_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    reason = load(tmp_path)
    assert isinstance(reason, str)
    assert "compiler" in reason or "lacks" in reason or "Linux" in reason
    for dtype in (torch.float32, torch.bfloat16):
        ops, notes = select(dtype, cache=tmp_path)
        assert ops.name == "onednn"
        assert reason in notes[0]
    with pytest.raises(ConfigError, match="use auto"):
        select(torch.float32, "native", cache=tmp_path)


def test_the_reason_on_an_older_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cpu_features", lambda: frozenset({"avx2", "avx512f"}))
    reason = build.find_library()
    assert isinstance(reason, str)
    assert "avx512bw" in reason


@pytest.mark.usefixtures("machine")
def test_the_reason_when_the_compiler_fails(tmp_path: Path) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'native.cpp:1: error: no such luck' >&2\nexit 1\n")
    broken.chmod(0o755)
    reason = build.compile_to(tmp_path / "native.so", str(broken))
    assert isinstance(reason, str)
    assert "no such luck" in reason
    assert list(tmp_path.iterdir()) == [broken]


def test_another_cpu_or_source_has_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = build.build_key(frozenset({"a", "b"}))
    assert key == build.build_key(frozenset({"b", "a"}))
    assert key != build.build_key(frozenset({"a"}))
    (tmp_path / "native.cpp").write_text("// other\n")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert key != build.build_key(frozenset({"a", "b"}))


def test_names_are_checked_and_dtypes_refused() -> None:
    with pytest.raises(ConfigError, match="use auto, native, onednn, triton, reference"):
        select(torch.float32, "fast")
    with pytest.raises(ConfigError, match="float16"):
        select(torch.float16, "native")
    ops, notes = select(torch.float16)
    assert ops.name == "reference"
    assert len(notes) == 3


def test_idle_threads_sleep_and_a_forked_child_gets_its_own() -> None:
    ops = native_ops(torch.float32, threads=3)
    weight = torch.randn(512, 256)
    packed = ops.pack(weight)
    x = torch.randn(64, 256)
    wanted = ops.linear(x, packed, None, None)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(ops.linear(x, packed, None, None), wanted) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_two_python_threads_may_call_at_once() -> None:
    ops = native_ops(torch.float32, threads=2)
    packed = ops.pack(torch.randn(300, 64))
    x = torch.randn(40, 64)
    wanted = ops.linear(x, packed, None, None)
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(200):
            if not torch.equal(ops.linear(x, packed, None, None), wanted):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_threads_must_be_at_least_one() -> None:
    with pytest.raises(ValueError, match="threads is -1"):
        native_library(-1)
