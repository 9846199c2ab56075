"""What the machine and its control groups leave to this process: cores and memory.

Reads `/proc` and `/sys` below a given root, so that tests can show it other machines. Both
versions of control groups are understood. Not for: using what is found (`cpu.py`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60  # version 1 writes "no limit" as a number close to 2**63


@dataclass(frozen=True, slots=True)
class Cores:
    """Cores that this process may use, and what set their number."""

    logical: int  # by affinity
    physical: int  # the same with hyper-threads of one core counted once
    quota: float | None  # cores' worth of time that the control group gives, None if unlimited

    @property
    def usable(self) -> int:
        """Threads that can compute at once: physical cores, or the quota's whole cores if fewer."""
        if self.quota is None:
            return self.physical
        return max(1, min(self.physical, int(self.quota + 0.01)))


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of main memory: the most this process could have, and what is left of it."""

    total: int
    free: int
    limited: bool  # by a control group below the machine's own memory


def read_cores(root: Path = Path("/")) -> Cores:
    """Cores by affinity, topology and control-group quota."""
    allowed = os.sched_getaffinity(0)
    return Cores(logical=len(allowed), physical=_physical(root, allowed), quota=_quota(root))


def read_memory(root: Path = Path("/")) -> Memory:
    """Memory of the machine, or of the tightest control group around this process."""
    machine = _meminfo(root)
    total, free = machine["MemTotal"], machine["MemAvailable"]
    limited = False
    for limit, used in _memory_limits(root):
        limited = limited or limit < total
        total = min(total, limit)
        free = min(free, max(0, limit - used))
    return Memory(total=total, free=free, limited=limited)


def cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    """Instruction sets of the first core, in the kernel's spelling."""
    for line in _lines(root / "proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _physical(root: Path, allowed: set[int]) -> int:
    """Groups of sibling threads among the allowed logical cores."""
    groups = set()
    for cpu in allowed:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = _text(topology / "thread_siblings_list")
        groups.add(siblings if siblings is not None else str(cpu))
    return max(1, len(groups))


def _quota(root: Path) -> float | None:
    """Cores' worth of time allowed by the tightest group."""
    found: list[float] = []
    for folder in _folders(root, "cpu"):
        text = _text(folder / "cpu.max")  # version 2: "max 100000" or "150000 100000"
        if text is None:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        else:
            quota, period = text.split()
        if quota is not None and period is not None and quota not in ("max", "-1"):
            found.append(int(quota) / int(period))
    return min(found, default=None)


def _memory_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, used) of each group with a limit; cache that can be dropped is not in `used`."""
    found: list[tuple[int, int]] = []
    for folder in _folders(root, "memory"):
        limit, used = _text(folder / "memory.max"), _text(folder / "memory.current")
        if limit is None:
            limit = _text(folder / "memory.limit_in_bytes")
            used = _text(folder / "memory.usage_in_bytes")
        if limit is None or used is None or limit == "max" or int(limit) >= _UNLIMITED:
            continue
        droppable = 0
        for line in _lines(folder / "memory.stat"):
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                droppable = max(droppable, int(value))
        found.append((int(limit), max(0, int(used) - droppable)))
    return found


def _folders(root: Path, controller: str) -> list[Path]:
    """Folders of this process's groups for a controller, innermost first, up to the mount.

    Inside a container the path in /proc/self/cgroup may not exist below the mount; then the mount
    itself is the container's group.
    """
    folders: list[Path] = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",")
        if controllers == "":
            mount = root / "sys/fs/cgroup"
        elif controller in names:
            mount = root / "sys/fs/cgroup" / controllers
            if not mount.exists():
                mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        folder = mount / path.strip("/")
        while folder != mount:
            folders.append(folder)
            folder = folder.parent
        folders.append(mount)
    return [folder for folder in folders if folder.is_dir()]


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    values: dict[str, int] = {}
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        number = rest.split()
        if number:
            values[name] = int(number[0]) * 1024
    values.setdefault("MemTotal", 0)
    values.setdefault("MemAvailable", values.get("MemFree", values["MemTotal"]))
    return values


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _lines(path: Path) -> list[str]:
    return (_text(path) or "").splitlines()
