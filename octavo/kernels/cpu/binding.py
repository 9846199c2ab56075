"""The native library through ctypes: one Python object with typed functions and a thread pool.

A call releases the interpreter lock while it runs. Not for: tensors' meaning (`native.py`).
Next file: `native.py`.
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import c_float, c_int, c_int64, c_long, c_void_p
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from octavo.kernels.cpu.build import find_library

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
# Number formats of pages: `oct::CacheKind`, where 0 is that of the activations.
CACHES = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}
INT8_WEIGHTS = 3  # the code of bf16 activations over weights of 8 bits


class Heads(ctypes.Structure):
    """`oct::Heads`: the shape of attention."""

    _fields_ = [
        ("queries", c_int),
        ("keys", c_int),
        ("size", c_int),
        ("page", c_int),
        ("scale", c_float),
        ("cap", c_float),
        ("window", c_int),
        ("cache", c_int),
        ("key_scale", c_float),
        ("value_scale", c_float),
    ]


class ExpertShape(ctypes.Structure):
    """`oct::ExpertShape`: sizes and packed weights of a layer's experts."""

    _fields_ = [
        ("experts", c_int),
        ("hidden", c_int),
        ("width", c_int),
        ("top", c_int),
        ("gate_up", c_int64),
        ("down", c_int64),
        ("gate_up_bytes", c_int64),
        ("down_bytes", c_int64),
        ("gate_up_bias", c_int64),
        ("down_bias", c_int64),
        ("alpha", c_float),
        ("limit", c_float),
    ]


class StackShape(ctypes.Structure):
    """`oct::StackShape`: sizes and shared weights of a stack."""

    _fields_ = [
        ("layers", c_int),
        ("hidden", c_int),
        ("intermediate", c_int),
        ("queries", c_int),
        ("keys", c_int),
        ("head_size", c_int),
        ("vocabulary", c_int),
        ("embedding_rows", c_int),
        ("page", c_int),
        ("table_rows", c_int),
        ("eps", c_float),
        ("scale", c_float),
        ("cap", c_float),
        ("cache", c_int),
        ("table", c_int64),
        ("embedding", c_int64),
        ("norm", c_int64),
        ("head", c_int64),
    ]


class StepArrays(ctypes.Structure):
    """`oct::StepArrays`: one step's inputs and outputs."""

    _fields_ = [
        ("tokens", c_int),
        ("rows", c_int),
        ("samples", c_int),
        ("pages", c_int),
        ("width", c_int64),
        ("ids", c_int64),
        ("positions", c_int64),
        ("slots", c_int64),
        ("q_indptr", c_int64),
        ("kv_lens", c_int64),
        ("block_table", c_int64),
        ("sample_rows", c_int64),
        ("keys", c_int64),
        ("values", c_int64),
        ("logits", c_int64),
        ("hidden", c_int64),
    ]


_P, _I = c_void_p, c_int
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "oct_bf16": (c_int, ()),
    "oct_int8": (c_int, ()),
    "oct_plan_bytes": (c_int, ()),
    "oct_expert_bytes": (c_int, ()),
    "oct_stack_bytes": (c_int, ()),
    "oct_step_bytes": (c_int, ()),
    "oct_pool_new": (_P, (_I,)),
    "oct_pool_free": (None, (_P,)),
    "oct_packed_bytes": (c_long, (_I, _I, _I)),
    "oct_pack": (_I, (_I, _P, c_long, _I, _I, _P)),
    "oct_packed4_bytes": (c_long, (_I, _I, _I)),
    "oct_pack4": (_I, (_P, _P, _P, _I, _I, _I, _P)),
    "oct_linear": (_I, (_P, _I, _I, _P, c_long, _I, _P, _I, _I, _P, _P)),
    "oct_apart": (_I, (_P, _I, _P, c_long, c_long, _I, _P, c_long, _I, _I, _I, _P)),
    "oct_embed": (_I, (_P, _I, _P, _I, _P, _I, _I, _P)),
    "oct_rms_norm": (_I, (_P, _I, _I, _P, _P, _P, _I, _I, c_float, _P, _P)),
    "oct_rope": (_I, (_P, _I, _P, _P, _P, _I, _I, _I, _I, _P)),
    "oct_silu_mul": (_I, (_P, _I, _P, _I, _I, _P)),
    "oct_gelu_mul": (_I, (_P, _I, _P, _I, _I, _P)),
    "oct_attention": (
        _I,
        (_P, _I, _P, _P, _P, _P, _I, _P, _I, _P, _P, _P, c_long, _P, _P, _P),
    ),
    "oct_experts": (_I, (_P, _I, _P, _P, _I, _P, _P, _P)),
    "oct_sample": (_I, (_P, _P, _I, _I, _P, _P, _P, _P, _P, _P, _P)),
    "oct_stack_new": (_P, (_I, _P, _P)),
    "oct_stack_free": (None, (_I, _P)),
    "oct_stack_run": (_I, (_P, _I, _P, _P)),
}


class Library:
    """The loaded library with a pool of `threads` threads (the caller is one of them).

    `call` has the C functions by name; every function that computes takes `pool` first. One call
    runs at a time: a second caller waits.
    """

    __slots__ = ("__weakref__", "bf16", "call", "int8", "pool", "threads")

    def __init__(self, path: Path, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"threads is {threads}; use 1 or more")
        self.call = _typed(ctypes.CDLL(str(path)))
        for structure, size in (
            (Heads, self.call.oct_plan_bytes()),
            (ExpertShape, self.call.oct_expert_bytes()),
            (StackShape, self.call.oct_stack_bytes()),
            (StepArrays, self.call.oct_step_bytes()),
        ):
            assert ctypes.sizeof(structure) == size, f"{structure.__name__} differs from the C++"
        self.bf16 = bool(self.call.oct_bf16())
        self.int8 = bool(self.call.oct_int8())
        self.threads = threads
        self.pool = self.call.oct_pool_new(threads)
        weakref.finalize(self, self.call.oct_pool_free, self.pool)

    def refuse(self, dtype: torch.dtype, *, int8: bool = False) -> str:
        """Why activations of `dtype`, over weights of 8 bits, cannot be; empty if they can."""
        if dtype not in DTYPES:
            return f"they know float32 and bfloat16, not {str(dtype).removeprefix('torch.')}"
        if dtype == torch.bfloat16 and not self.bf16:
            return "the CPU lacks avx512_bf16; float32 works"
        if int8 and dtype != torch.bfloat16:
            return "weights of 8 bits go with activations in bfloat16 only"
        if int8 and not self.int8:
            return "the CPU lacks avx512_vnni, which weights of 8 bits need"
        return ""


def _typed(library: ctypes.CDLL) -> SimpleNamespace:
    """The library's functions with their types; raises AttributeError if one is missing."""
    functions = {}
    for name, (result, arguments) in _SIGNATURES.items():
        function = library[name]
        function.restype = result
        function.argtypes = arguments
        functions[name] = function
    return SimpleNamespace(**functions)


def load(cache: Path | None = None, threads: int | None = None) -> Library | str:
    """The library, built if need be, or the reason why there is none.

    `threads` None is torch's own number, which is OMP_NUM_THREADS or the cores.
    """
    reason = ""
    for prebuilt in (True, False):  # one built elsewhere may not load here
        path = find_library(cache, prebuilt=prebuilt)
        if isinstance(path, str):
            return reason or path
        try:
            return Library(path, threads or torch.get_num_threads())
        except (OSError, AttributeError) as error:
            reason = f"{path.name} cannot be loaded: {error}"
    return reason
