"""Which table of kernels serves a device and dtype, and why the others do not.

On the CPU native code first, then oneDNN, then plain torch; on a GPU Triton's before torch. Each
that cannot leaves its reason in `Ops.reason`. One asked for by name is taken or refused, never
replaced. Next file: `cpu/build.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from octavo.errors import ConfigError
from octavo.kernels.ops import Ops
from octavo.kernels.reference import reference_ops

NAMES = ("native", "onednn", "triton", "reference")


def select(
    dtype: torch.dtype,
    want: str = "auto",
    *,
    cache: Path | None = None,
    threads: int | None = None,
    device: str = "cpu",
    int8: bool = False,
    int4: bool = False,
    copies: bool = False,
) -> tuple[Ops, tuple[str, ...]]:
    """(the kernels for activations of `dtype`, a line for each decision); `want` "auto" or a name.

    `cache` is the folder for built kernels (None: ~/.cache/octavo), `threads` the number of
    threads (None: torch's own). With `int8` all weights are packed in 8 bits, with `int4`
    what is in 4 bits stays so and the rest has 8: native kernels alone can. `copies` is
    `triton_ops`'s. Raises ConfigError if the wanted one cannot be had.
    """
    if want not in ("auto", *NAMES):
        raise ConfigError(
            f"kernels {want!r} are not known; use auto, {', '.join(NAMES)}", "kernels"
        )
    reference = {"reference": lambda: replace(reference_ops(dtype), reason="plain torch")}
    makers: dict[str, Callable[[], Ops | str]] = {
        "native": lambda: _native(dtype, cache, threads, (int8, int4)),
        "onednn": lambda: _onednn(dtype),
        **reference,
    }
    if device != "cpu":
        makers = {"triton": lambda: _triton(dtype, device, copies), **reference}
    if want not in ("auto", *makers):
        raise ConfigError(
            f"kernels {want!r} do not run on {device}; use auto or {' or '.join(makers)}", "kernels"
        )
    if int8 or int4:
        no_int8 = "it has no weights of 8 bits"
        makers |= {name: lambda: no_int8 for name in makers if name != "native"}
    refusals: list[str] = []
    for name, make in makers.items():
        if want not in ("auto", name):
            continue
        ops = make()
        if isinstance(ops, str):
            refusals.append(f"kernels: not {name}: {ops}")
            continue
        how = "as asked" if want != "auto" else "the first that can"
        notes = (*refusals, f"kernels: {name}, {ops.reason}, {how}")
        return replace(ops, reason="; ".join(notes)), notes
    remedy = (
        "leave quantization out" if (int8 or int4) and want in ("auto", "native") else "use auto"
    )
    raise ConfigError(f"{'; '.join(refusals)}; {remedy}", "kernels")


def _native(
    dtype: torch.dtype, cache: Path | None, threads: int | None, bits: tuple[bool, bool]
) -> Ops | str:
    int8, int4 = bits
    from octavo.kernels.cpu.binding import load
    from octavo.kernels.cpu.native import NativeOps

    library = load(cache, threads)
    if isinstance(library, str):
        return library
    reason = library.refuse(dtype, int8=int8 or int4)
    if reason:
        return reason
    over = " over int4 weights" if int4 else " over int8 weights" if int8 else ""
    name = str(dtype).removeprefix("torch.") + over
    ops = NativeOps(library, dtype, int8=int8, int4=int4)
    return ops.table(f"AVX-512 {name}, {library.threads} threads")


def _onednn(dtype: torch.dtype) -> Ops | str:
    from octavo.kernels.cpu.onednn import onednn_ops

    return onednn_ops(dtype)


def _triton(dtype: torch.dtype, device: str, copies: bool) -> Ops | str:
    try:
        from octavo.kernels.gpu import triton_ops
    except ImportError as error:
        return f"{error}"
    return triton_ops(dtype, torch.device(device), copies=copies)
