"""Compiles the kernels of a piece of work side by side, before the work is done.

Triton compiles a kernel at its first launch, one after the other, half a second each. Here the work
is rehearsed without launches: those that would compile are noted for a pool of threads, and what
the work computes is garbage. No kernel of ours may run then, even one that is compiled already: it
would take garbage for places in memory. What cannot be compiled this way is compiled at its first
launch. Not for: launching anything. Next file: `cuda_queue.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import triton
from triton.runtime.jit import JITFunction

THREADS = 16


def compile_ahead(rehearsal: Callable[[], None]) -> str:
    """Does `rehearsal` without our kernels, then waits for new ones; what went wrong, or empty."""
    runtime = triton.knobs.runtime
    launch = JITFunction.run
    before, own, seen = runtime.jit_cache_hook, threading.get_ident(), set()
    problem = ""
    with ThreadPoolExecutor(THREADS) as pool:

        def note(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
            if threading.get_ident() != own:
                return False  # the pool's own call for the same kernel: go on and compile
            if (fn.name, key) not in seen:
                seen.add((fn.name, key))
                pool.submit(fn.jit_function.preload, compile["specialization_data"])
            return True  # no launch

        def prepare(self: Any, *args: Any, warmup: bool, **options: Any) -> Any:
            return launch(self, *args, warmup=True, **options)

        try:
            runtime.jit_cache_hook = note
            JITFunction.run = prepare
            rehearsal()
        except Exception as error:  # garbage may be refused somewhere; then the rest comes later
            problem = f"{type(error).__name__}: {error}"
        finally:
            JITFunction.run = launch
            pool.shutdown(wait=True)
            runtime.jit_cache_hook = before
    return problem
