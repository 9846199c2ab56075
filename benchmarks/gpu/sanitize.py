"""Our GPU kernels under compute-sanitizer: python -m benchmarks.gpu.sanitize [--tool NAME].

Runs kernel tests of small shapes inside the checker; reads and writes beyond an allocation fail it
(memcheck), as do races in shared memory (racecheck) and barriers that not all threads reach
(synccheck). Everything runs many times slower than it does alone, so there are parts, each of one
or two small shapes for every kernel of a kind, and a process each; all parts run side by side.
`--only` picks tests by words instead, as pytest's -k does. What a kernel needs is compiled before,
without the checker.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

TESTS = (
    "test_kernels.py",
    "test_kernels_attention.py",
    "test_kernels_sample.py",
    "test_worker_slots.py",
    "test_quantized.py",
    "test_kernels_experts.py",
    "test_kernels_latent.py",
)
PARTS = {
    "small": "norms and 3-576 or silu_mul and 7-100 or rope and 9-3-80 or rope_store and 3-1-96",
    "products": "gemv and 130-576 and dtype0 or skinny and 130-584 and True and dtype0"
    " or skinny and 1000-4096 and False-False-dtype0",
    "decode": "test_decode or windows_in_a_list or rows_of_padding or captured_step",
    "prefill": "test_prefill or test_mixed or fused_equals or stored_by_scale",
    "hopper": "test_long_rows",
    "sample": "greedy or draws or filters or broken_rows or not_finite",
    "slots": "laid_out",
    "quantized": "four_bits and dtype0 and (70-256 or 40-384) or made_plain and dtype0"
    " or gates_and_order or shared_columns or eight_bit or rounds_by_itself",
    "experts": "routing and 1-False or sorting or test_products and dtype0 and 1-0"
    " or nobody_chose or broken_token or general_tiles",
    "latent": "test_kernels_latent",
}
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
FAILED = 86  # exit status for what the checker found, which no test gives


def tests_of(only: str) -> list[str]:
    """A command that runs tests."""
    tests = [f"tests/gpu/{name}" for name in TESTS]
    words = ["-k", only] if only else []
    return [
        *(sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"),
        *("--confcutdir=tests/gpu", "-c", "/dev/null", "--rootdir=.", *tests, *words),
    ]


def checked(tool: str, only: str) -> list[str]:
    """The same inside the checker. Only kernels of ours are watched: their names end in _kernel."""
    checker = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    return [
        *(checker, "--tool", tool, "--error-exitcode", str(FAILED)),
        *("--kernel-name", "kernel_substring=_kernel", "--print-limit", "20"),
        *tests_of(only),
    ]


def run(title: str, commands: list[list[str]]) -> int:
    """Runs commands in a row up to the first that fails, and prints how the last one went."""
    started = perf_counter()
    for command in commands:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode:
            break
    seconds = perf_counter() - started
    kept = [line for line in done.stdout.splitlines() if " passed" in line or "=====" in line]
    print(f"{title}: status {done.returncode}, {seconds:.0f} s\n    " + "\n    ".join(kept[-24:]))
    if done.returncode:
        print(done.stdout[-4000:])
    sys.stdout.flush()
    return done.returncode


def main() -> int:
    """0 if all tests passed and nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tool", default="memcheck", choices=TOOLS)
    parser.add_argument("--parts", default=",".join(PARTS), help="with commas between")
    parser.add_argument("--only", default="", help="words of the tests to run, as pytest's -k")
    options = parser.parse_args()
    parts = {"tests": options.only} if options.only else {}
    if not parts:
        parts = {name: PARTS[name] for name in options.parts.split(",")}

    def part(name: str) -> int:
        commands = [tests_of(parts[name]), checked(options.tool, parts[name])]
        return run(f"{options.tool} {name}", commands)

    with ThreadPoolExecutor(len(parts)) as pool:
        return max(pool.map(part, parts))


if __name__ == "__main__":
    sys.exit(main())
