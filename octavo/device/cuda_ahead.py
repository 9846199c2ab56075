"""Compiles the kernels of a piece of work side by side, before the work is done.

Triton compiles a kernel at its first launch, one after the other, half a second each, and then has
the system's compiler make what launches kernels of its signature, another third of a second. Here
the work is rehearsed: each launch that would compile is noted for a pool of threads, which does
both, and left out, and what the work computes is garbage. What cannot be compiled this way is
compiled at its first launch. Not for: launching anything. Next file: `cuda_queue.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import triton

THREADS = 16


def compile_ahead(rehearsal: Callable[[], None], device: int = 0) -> str:
    """Does `rehearsal` without new kernels, then waits for these; what went wrong, or empty.

    `device` is the number of the GPU that is to launch them.
    """
    runtime = triton.knobs.runtime
    before, own, seen = runtime.jit_cache_hook, threading.get_ident(), set()
    made: list[Future[None]] = []
    problem = ""
    # What is current is a thread's own affair, and kernels are kept by device.
    with ThreadPoolExecutor(THREADS, initializer=torch.cuda.set_device, initargs=(device,)) as pool:

        def note(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
            if threading.get_ident() != own:
                return False  # the pool's own call for the same kernel: go on and compile
            if (fn.name, key) not in seen:
                seen.add((fn.name, key))
                made.append(pool.submit(_make, fn.jit_function, compile["specialization_data"]))
            return True  # no launch

        try:
            runtime.jit_cache_hook = note
            rehearsal()
        except Exception as error:  # garbage may be refused somewhere; then the rest comes later
            problem = f"{type(error).__name__}: {error}"
        finally:
            pool.shutdown(wait=True)
            runtime.jit_cache_hook = before
    for failure in (each.exception() for each in made):
        if failure is not None and not problem:
            problem = f"{type(failure).__name__}: {failure}"
    return problem


def _make(function: Any, specialization: str) -> None:
    """Compiles a kernel, and makes and loads what launches it."""
    kernel = function.preload(specialization)
    if kernel is not None:
        _ = kernel.run  # made when first asked for
