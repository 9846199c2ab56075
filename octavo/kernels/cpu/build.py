"""Builds the native kernels with the system's C++ compiler, once, and finds what was built.

The library's name carries a hash of the sources, the compile flags and the CPU's features, so a
stale or foreign build is never loaded. Two processes may build at once: each writes a file of its
own and renames it. Not for: loading it (`binding.py`). Runs without torch, as `setup.py` uses it.
Next file: `binding.py`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent
PREBUILT = SOURCES / "prebuilt"
DEFAULT_CACHE = Path("~/.cache/octavo")
COMPILERS = ("g++", "clang++", "c++")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-fPIC",
    "-shared",
    "-pthread",
)
NEEDED = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
COMPILE_SECONDS = 180


def find_library(cache: Path | None = None, *, prebuilt: bool = True) -> Path | str:
    """The built library for this CPU, or the reason why there is none.

    Looks into the package first (built when it was installed) unless `prebuilt` is false, then
    into `cache`/kernels (None: ~/.cache/octavo), and builds there if need be: some three seconds,
    once.
    """
    features = cpu_features()
    refusal = refuse(features)
    if refusal:
        return refusal
    key = build_key(features)
    if prebuilt:
        for path in sorted(PREBUILT.glob(f"native-{key}-*.so")):
            return path
    compiler = find_compiler()
    if compiler is None:
        return f"no C++ compiler ({', '.join(COMPILERS)}) was found to build them"
    folder = (cache or DEFAULT_CACHE).expanduser() / "kernels"
    name = f"native-{key}-{compiler_key(compiler)}.so"
    if (folder / name).exists():
        return folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return compile_to(folder / name, compiler)
    except OSError:
        # A home that cannot be written to: built anew in each process rather than not at all.
        try:
            return compile_to(Path(tempfile.mkdtemp(prefix="octavo-")) / name, compiler)
        except OSError as error:
            return f"they could be built neither in {folder} nor in a temporary folder: {error}"


def prebuild(folder: Path = PREBUILT) -> Path | str:
    """Builds into `folder`, for `setup.py`; gives the library or the reason why not."""
    features = cpu_features()
    compiler = find_compiler()
    refusal = refuse(features) or ("" if compiler else "no C++ compiler")
    if refusal or compiler is None:
        return refusal
    path = folder / f"native-{build_key(features)}-{compiler_key(compiler)}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("native-*.so"):
        old.unlink()
    return compile_to(path, compiler)


def cpu_features() -> frozenset[str]:
    """Feature flags of the first CPU as Linux names them; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def refuse(features: frozenset[str]) -> str:
    """Why this machine cannot run the kernels; empty if it can."""
    if sys.platform != "linux":
        return f"they are written for Linux, not {sys.platform}"
    missing = [name for name in NEEDED if name not in features]
    return f"the CPU lacks {', '.join(missing)}" if missing else ""


def build_key(features: frozenset[str]) -> str:
    """A hash of all that decides the machine code, but for the compiler."""
    digest = hashlib.sha256()
    for path in sorted((*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(" ".join((*FLAGS, *sorted(features))).encode())
    return digest.hexdigest()[:20]


def find_compiler() -> str | None:
    """Path of a C++ compiler."""
    return next((path for path in map(shutil.which, COMPILERS) if path), None)


def compiler_key(compiler: str) -> str:
    """A short hash of the compiler's own account of its version."""
    run = subprocess.run([compiler, "--version"], capture_output=True, timeout=30, check=False)
    return hashlib.sha256(run.stdout).hexdigest()[:8]


def compile_to(path: Path, compiler: str) -> Path | str:
    """Compiles to `path` in one atomic step; gives `path` or the compiler's complaint."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".so")
    os.close(handle)
    temporary = Path(name)
    try:
        command = [compiler, *FLAGS, str(SOURCES / "native.cpp"), "-o", name]
        run = subprocess.run(command, capture_output=True, timeout=COMPILE_SECONDS, check=False)
        if run.returncode:
            complaint = run.stderr.decode(errors="replace").strip()
            first = next((li for li in complaint.splitlines() if "error" in li), complaint[:200])
            return f"{compiler} could not build them: {first}"
        temporary.chmod(0o755)
        temporary.replace(path)
    except subprocess.TimeoutExpired:
        return f"{compiler} took over {COMPILE_SECONDS} s to build them"
    finally:
        temporary.unlink(missing_ok=True)
    return path
