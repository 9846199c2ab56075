"""`octavo kernels`: what is compiled ahead of the first start, and building it.

    octavo kernels list     what there is, what is missing
    octavo kernels build    the native library of the CPU; FlashInfer's modules if it is installed

Triton's kernels are not here: a start compiles those that its model needs and keeps them in the
cache folder. Not for: choosing kernels (`octavo/attention/select.py`).
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from octavo.errors import ConfigError, OctavoError
from octavo.kernels.cpu.binding import load
from octavo.kernels.flashinfer import HEADS, Module, spec_of
from octavo.options import EngineArgs, cache_dir

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Item:
    """Something that can be built, or the reason why not."""

    name: str
    spec: Any = None  # FlashInfer's; None is the CPU's library
    refusal: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to do, and which of FlashInfer's modules to do it for."""
    parser.add_argument("action", choices=("list", "build"), help="list or build")
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), default="bfloat16", help="number format of the model"
    )
    parser.add_argument("--head-dim", type=int, choices=HEADS, default=128, help="size of a head")
    parser.add_argument(
        "--window", action="store_true", help="also for layers with a sliding window"
    )
    parser.add_argument("--soft-cap", action="store_true", help="also with soft-capped scores")
    parser.epilog = "example:\n  octavo kernels build --head-dim 128"


def run(args: argparse.Namespace) -> int:
    """Prints one line an item; 1 if something could not be built."""
    failed = False
    for item in _items(args):
        state, good = _build(item) if args.action == "build" else (_state(item), True)
        failed = failed or not good
        print(f"{item.name}: {state}", flush=True)
    return 1 if failed else 0


def _items(args: argparse.Namespace) -> Iterator[Item]:
    yield Item("native kernels of the CPU")
    if importlib.util.find_spec("flashinfer") is None:
        print("flashinfer: not installed, nothing to build", file=sys.stderr)
        return
    windows = (False, True) if args.window else (False,)
    caps = (False, True) if args.soft_cap else (False,)
    for window, cap in product(windows, caps):
        try:
            spec = spec_of(Module(DTYPES[args.dtype], args.head_dim, window, cap))
        except ConfigError as error:
            yield Item("flashinfer", refusal=error.message.removeprefix("flashinfer: "))
            return
        yield Item(f"flashinfer {spec.name}", spec)


def _state(item: Item) -> str:
    if item.refusal:
        return f"cannot be built: {item.refusal}"
    if item.spec is None:
        return "built when first used, and by `octavo kernels build`"
    return "built" if item.spec.is_compiled else "not built"


def _build(item: Item) -> tuple[str, bool]:
    """(what became of it, whether it is there now)."""
    if item.refusal:
        return _state(item), False
    started = time.monotonic()
    try:
        if item.spec is None:
            args = EngineArgs()
            library = load(cache_dir(args), args.threads)
            if isinstance(library, str):
                return f"cannot be built: {library}", False
        elif item.spec.is_compiled:
            return "built already", True
        else:
            item.spec.build()
    except (OctavoError, RuntimeError, OSError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"cannot be built: {' ... '.join(dict.fromkeys((lines[0], lines[-1])))}", False
    return f"built in {time.monotonic() - started:.0f} s", True
