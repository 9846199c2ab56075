"""Our GPU kernels under compute-sanitizer: python -m benchmarks.gpu.sanitize [--tool NAME].

Runs the kernel tests, whose shapes are small, inside the checker; reads and writes beyond an
allocation fail it (memcheck), as do races in shared memory (racecheck). Everything runs many times
slower than it does alone, so `--only` picks tests by words, as pytest's -k does.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys

TESTS = ("test_kernels.py", "test_kernels_attention.py", "test_kernels_sample.py")
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
FAILED = 86  # exit status for what the checker found, which no test gives


def command(tool: str, only: str) -> list[str]:
    """The whole command line. Only kernels of ours are watched: their names end in _kernel."""
    checker = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    tests = [f"tests/gpu/{name}" for name in TESTS]
    words = ["-k", only] if only else []
    return [
        *(checker, "--tool", tool, "--error-exitcode", str(FAILED)),
        *("--kernel-name", "kernel_substring=_kernel", "--print-limit", "20"),
        *(sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"),
        *("--confcutdir=tests/gpu", "-c", "/dev/null", "--rootdir=.", *tests, *words),
    ]


def main() -> int:
    """The checker's exit status: 0 if all tests passed and nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tool", default="memcheck", choices=TOOLS)
    parser.add_argument("--only", default="", help="words of the tests to run, as pytest's -k")
    options = parser.parse_args()
    return subprocess.run(command(options.tool, options.only), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
