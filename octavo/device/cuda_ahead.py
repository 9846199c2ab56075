"""Compiles the kernels of a piece of work side by side, before the work is done.

Triton compiles a kernel at its first launch, one after the other, half a second each, and then has
the system's compiler make what launches kernels of its signature, another third of a second. Here
the work is rehearsed without launches: those that would compile are noted, and a pool of threads
does both; what the work computes is garbage. So no kernel of ours may run then, even one
that is compiled already: it would take garbage for places in memory. What cannot be compiled this
way is compiled at its first launch. Most of compiling is Python, in which threads take turns: where
all is to be compiled, processes do it (`Compilers`), and the threads find it on disk. Not for:
launching anything. Next file: `cuda_queue.py`.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any, TypeAlias

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

PARALLEL = 16
LONGEST_SECONDS = 60.0  # that a process may take for a kernel, and those before it
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)

Order: TypeAlias = tuple[tuple[str, str], ...]  # modules and names of kernels


class Compilers:
    """Processes that compile into the cache on disk, for one GPU.

    They are forked, for each would else import torch and Triton anew: to be made before this
    process uses a GPU, of which they know nothing. One that dies is no error: what it should have
    compiled is compiled in this process.
    """

    def __init__(self) -> None:
        count = min(PARALLEL, os.cpu_count() or 1)
        context = multiprocessing.get_context("fork")
        self._pool = ProcessPoolExecutor(count, mp_context=context, initializer=_begin)
        self._pool.submit(_nothing)  # all are forked at the first call
        self.problem = ""  # the first, of what was left to this process

    def compile(self, function: Any, specialization: str, order: Order) -> None:
        """Waits until a kernel is compiled; what fails will fail again where it is launched.

        `order` are all kernels, as this process came to know them.
        """
        target = triton.runtime.driver.active.get_current_target()
        kind = (target.backend, target.arch, target.warp_size)
        name = function.__name__
        try:
            job = self._pool.submit(_compile, kind, function.module, name, specialization, order)
            job.result(LONGEST_SECONDS)
        except Exception as error:  # a process that died, hangs, or could not compile this
            self.problem = self.problem or f"{name}: {type(error).__name__}: {error}"

    def close(self) -> None:
        """Ends the processes."""
        self._pool.shutdown(cancel_futures=True)


def name_versions() -> None:
    """Has Triton hash its own files, 400 MB, once a process: the names in its cache need that."""
    triton_key()


def compile_ahead(
    rehearsal: Callable[[], None], device: int = 0, compilers: Compilers | None = None
) -> str:
    """Does `rehearsal` without our kernels, then makes those; what went wrong, or empty.

    `device` is the number of the GPU that is to launch them. `compilers` are used where most are
    not in the cache.
    """
    runtime, launch = triton.knobs.runtime, JITFunction.run
    before, problem = runtime.jit_cache_hook, ""
    noted: dict[tuple[str, str], tuple[Any, str]] = {}

    def note(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        noted[fn.name, key] = (fn.jit_function, compile["specialization_data"])
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
        runtime.jit_cache_hook = before
    order = _named(function for function, _ in noted.values())
    # What is current is a thread's own affair, and kernels are kept by device.
    begin = torch.cuda.set_device
    with ThreadPoolExecutor(PARALLEL, initializer=begin, initargs=(device,)) as pool:
        made = [
            pool.submit(_make, function, specialization, order, compilers)
            for function, specialization in noted.values()
        ]
    if compilers is not None:
        problem = problem or compilers.problem
    for failure in (each.exception() for each in made):
        if failure is not None and not problem:
            problem = f"{type(failure).__name__}: {failure}"
    return problem


def _named(functions: Iterable[Any]) -> Order:
    """Module and name of each kernel, once, with its name in the cache worked out.

    That depends on which of the kernels that share a helper comes first. So every start does it
    in the order of its rehearsal, or it would not find what is there.
    """
    order: dict[tuple[str, str], None] = {}
    for function in functions:
        _ = function.cache_key
        order[function.module, function.__name__] = None
    return tuple(order)


def _make(function: Any, specialization: str, order: Order, compilers: Compilers | None) -> None:
    """Compiles a kernel, and makes and loads what launches it."""
    if compilers is not None:
        compilers.compile(function, specialization, order)
    kernel = function.preload(specialization)
    if kernel is not None:
        _ = kernel.run  # made when first asked for


class _NoDriver:
    """What compiling asks of Triton's driver: the target, and a device's number."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0


def _begin() -> None:
    # Linux's: nobody else would end a process whose parent was killed.
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    name_versions()


def _nothing() -> None:
    """Something to do."""


def _compile(
    kind: tuple[str, int, int], module: str, name: str, specialization: str, order: Order
) -> None:
    triton.runtime.driver.set_active(_NoDriver(GPUTarget(*kind)))
    _named(getattr(importlib.import_module(each), kernel) for each, kernel in order)
    getattr(importlib.import_module(module), name).preload(specialization)
