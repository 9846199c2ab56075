"""What the CPU device finds, on made-up machines and on this one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from octavo.device.cpu import CpuDevice
from octavo.device.limits import cpu_flags, read_cores, read_memory
from octavo.errors import ConfigError

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:   8388608 kB\n"


def test_memory_without_groups(tmp_path: Path) -> None:
    memory = read_memory(write(tmp_path, {"proc/meminfo": MEMINFO}))
    assert (memory.total, memory.free, memory.limited) == (16 * GIB, 8 * GIB, False)


def test_memory_of_a_version_2_group_inside_another(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/a/b"
    root = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/a/b\n",
            f"{group}/memory.max": "max",
            f"{group}/memory.current": "7",
            "sys/fs/cgroup/a/memory.max": str(4 * GIB),
            "sys/fs/cgroup/a/memory.current": str(3 * GIB),
            "sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        },
    )
    memory = read_memory(root)
    assert (memory.total, memory.free, memory.limited) == (4 * GIB, 2 * GIB, True)


def test_memory_of_a_version_1_group_whose_path_is_outside_the_container(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        },
    )
    memory = read_memory(root)
    assert (memory.total, memory.free) == (2 * GIB, GIB)
    assert read_cores(root).quota == 1.5


def test_version_1_says_unlimited_with_a_huge_number(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "4:memory:/\n1:cpu:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "5",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
    )
    assert not read_memory(root).limited
    assert read_cores(root).quota is None


@pytest.mark.parametrize(
    ("quota", "usable"), [("max 100000", 2), ("50000 100000", 1), ("190000 100000", 1)]
)
def test_quota_and_hyper_threads_bound_the_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, usable: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    siblings = {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}
    files = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": text
        for cpu, text in siblings.items()
    }
    files |= {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": quota}
    cores = read_cores(write(tmp_path, files))
    assert (cores.logical, cores.physical, cores.usable) == (4, 2, usable)


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("fpu avx512f avx512_bf16", torch.bfloat16),
        ("fpu amx_bf16", torch.bfloat16),
        ("fpu avx2", torch.float32),
    ],
)
def test_number_format_follows_the_instruction_set(
    tmp_path: Path, flags: str, dtype: torch.dtype
) -> None:
    root = write(tmp_path, {"proc/cpuinfo": f"processor : 0\nflags : {flags}\n"})
    assert cpu_flags(root) == set(flags.split())
    device = CpuDevice(root=root)
    assert device.default_dtype() == dtype
    assert "bf16" in device.default_dtype_reason()


def test_this_machine() -> None:
    device = CpuDevice()
    assert 1 <= device.threads <= len(os.sched_getaffinity(0))
    assert 0 < device.free_memory() <= device.total_memory()
    assert CpuDevice(threads=3).threads == 3
    before = torch.get_num_threads()
    try:
        CpuDevice(threads=1).start()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_no_threads_is_refused() -> None:
    with pytest.raises(ConfigError, match="threads is 0"):
        CpuDevice(threads=0)
