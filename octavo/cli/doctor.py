"""`octavo doctor`: what this machine offers to the engine, and what is missing.

Imports torch, so it takes a moment. Not for: a running server (`GET /health`).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from octavo import __version__
from octavo.cli.doctor_ranks import examine_ranks
from octavo.cli.flags import add_config, add_options, engine_args
from octavo.options import EngineArgs, cache_dir
from octavo.resolve import worker_config

WANTED_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The engine's options: with several workers these are started and examined too."""
    parser.epilog = (
        "examples:\n  octavo doctor\n"
        "  octavo doctor --tensor-parallel-size 8            the GPUs here, and how they talk\n"
        "  octavo doctor --tensor-parallel-size 8 --pipeline-parallel-size 4 --ray-address auto"
    )
    add_config(parser)
    add_options(parser, EngineArgs)
    parser.add_argument(
        "--limit",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="for the workers to come and to have talked to each other (60)",
    )


def run(parsed: argparse.Namespace) -> int:
    """Prints one line a finding; 1 if something that is needed is missing."""
    args = engine_args(parsed)
    rows = [*_software(), *_machine(), *_engine(), *_options()]
    if args.tensor_parallel_size * args.pipeline_parallel_size > 1:
        rows += examine_ranks(worker_config(args), parsed.limit)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    return 1 if any(value.startswith("MISSING") for _, value in rows) else 0


def _software() -> list[tuple[str, str]]:
    rows = [("octavo", __version__), ("python", sys.version.split()[0])]
    for package in ("torch", "tokenizers", "msgspec", "pyzmq", "starlette", "uvicorn"):
        try:
            rows.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            rows.append((package, "MISSING: install octavo again"))
    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    rows.append(("compiler", _first_line(compiler) if compiler else NO_COMPILER))
    return rows


NO_COMPILER = "none: the kernels in plain torch are used, which are slower; install g++"


def _first_line(program: str) -> str:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    return f"{program} ({(done.stdout or done.stderr).partition(chr(10))[0].strip()})"


def _machine() -> list[tuple[str, str]]:
    info = _lines("/proc/cpuinfo")
    flags = set(info.get("flags", "").split())
    have = [flag for flag in WANTED_CPU_FLAGS if flag in flags]
    lack = [flag for flag in WANTED_CPU_FLAGS if flag not in flags]
    memory = _lines("/proc/meminfo")
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return [
        ("cpu", info.get("model name", platform.processor() or platform.machine())),
        ("cpu flags", f"{' '.join(have) or 'none known'} (without {' '.join(lack) or 'none'})"),
        ("cores", f"{cores} usable"),
        ("memory", f"{_gib(memory, 'MemAvailable')} free of {_gib(memory, 'MemTotal')}"),
    ]


def _lines(path: str) -> dict[str, str]:
    """`name : value` lines of a /proc file, the first of each name; empty elsewhere."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError:
        return {}
    rows: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        rows.setdefault(name.strip(), value.strip())
    return rows


def _engine() -> list[tuple[str, str]]:
    """What an engine would choose here; builds the native kernels if they can be built."""
    from octavo.device.cpu import CpuDevice
    from octavo.kernels.select import select

    args = EngineArgs()
    device = CpuDevice(args.threads)
    dtype = device.default_dtype()
    rows = [("dtype", f"{str(dtype).removeprefix('torch.')}: {device.default_dtype_reason()}")]
    _, lines = select(dtype, args.kernels, cache=cache_dir(args), threads=device.threads)
    for line in (*device.notes, *lines):
        name, _, value = line.partition(": ")
        rows.append((name, value))
    return rows


def _options() -> list[tuple[str, str]]:
    args = EngineArgs()
    folder = cache_dir(args)
    held = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    rows = [("cache folder", f"{folder} ({held / 1e6:.0f} MB)")]
    rows += [
        (name, f"{value} ({source})")
        for name, value, source in args.effective()
        if source != "default"
    ]
    return rows


def _gib(memory: dict[str, str], name: str) -> str:
    kilobytes = memory.get(name, "").removesuffix(" kB")
    return f"{int(kilobytes) / 2**20:.1f} GiB" if kilobytes.isdigit() else "?"
