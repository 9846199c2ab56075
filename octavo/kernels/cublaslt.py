"""The vendor's matrix products by the algorithm that was measured to be fastest, through cuBLASLt.

The library offers several algorithms for a product, best first by its own estimate. For some
numbers of rows the estimate is far off (28,672 x 4,096 by 560 rows: 271 us, where the second takes
174), so a start times them for the sizes that it captures and keeps the answers in a file, which
the next start reads. What was not timed goes the library's own way (`gpu_products.py`).
Not for: rows that our own kernels multiply. Next file: `gpu_quantized.py`.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterable, Iterator
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

# Names of cuBLASLt's header, version 12 and 13.
COMPUTE_32F, REAL_32F = 68, 0
REAL_TYPES = {torch.bfloat16: 14, torch.float16: 2}
TRANSPOSE_A = 3  # of a product's description
MAX_WORKSPACE = 1  # of a preference
WORKSPACE = 32 << 20  # bytes, as NVIDIA asks for on this generation
CANDIDATES = 4  # later ones are hardly ever better
ROUNDS = 3
ALIGNED = 256  # bytes: what the library takes for granted of addresses
GAIN = 0.94  # of the first candidate's time: a smaller gain is within what times differ by
LEAST = 48 << 20  # elements of a weight: with smaller ones there is little to gain
MANY = 65  # rows; products of fewer read weights, whatever the algorithm is
WEIGHTS = 3  # of a shape, read in turn while it is timed

Key = tuple[int, int, int, str]  # rows, N, K, dtype


class _Heuristic(Structure):
    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """One product's algorithm and the shapes that it was made for."""

    library: Library
    shapes: tuple[c_void_p, c_void_p, c_void_p]  # of weight, x and result, as the library sees them
    algorithm: Any

    def run(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [M, K], weight [N, K] -> [M, N], all of one dtype. On the current stream."""
        out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
        self.library.multiply(self, x, weight, out)
        return out


class Library:
    """cuBLASLt as it is loaded, and a product's description. For one device.

    Raises OSError if it is not there, RuntimeError if it does not work.
    """

    def __init__(self, device: torch.device) -> None:
        version = (torch.version.cuda or "").partition(".")[0]
        self._functions: Any = ctypes.CDLL(f"libcublasLt.so.{version}")
        multiply = self._functions.cublasLtMatmul
        multiply.argtypes = [c_void_p] * 12 + [POINTER(c_uint64 * 8), c_void_p, c_size_t, c_void_p]
        multiply.argtypes[3] = multiply.argtypes[8] = c_void_p
        self._functions.cublasLtGetVersion.restype = c_size_t
        self.version = int(self._functions.cublasLtGetVersion())
        self._device = device
        self._handle, self._kind = c_void_p(), c_void_p()
        self._one, self._zero = c_float(1.0), c_float(0.0)
        with torch.cuda.device(device):
            self._call("cublasLtCreate", byref(self._handle))
        self._call("cublasLtMatmulDescCreate", byref(self._kind), COMPUTE_32F, REAL_32F)
        turned = c_int(1)
        self._call(
            "cublasLtMatmulDescSetAttribute", self._kind, TRANSPOSE_A, byref(turned), c_size_t(4)
        )
        self._workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)

    def candidates(self, key: Key) -> list[Plan]:
        """Algorithms for a product, best first by the library's estimate."""
        shapes = self._shapes(key)
        preference, size = c_void_p(), c_uint64(WORKSPACE)
        self._call("cublasLtMatmulPreferenceCreate", byref(preference))
        self._call(
            "cublasLtMatmulPreferenceSetAttribute",
            *(preference, MAX_WORKSPACE, byref(size), c_size_t(8)),
        )
        found, count = (_Heuristic * CANDIDATES)(), c_int()
        self._call(
            "cublasLtMatmulAlgoGetHeuristic",
            *(self._handle, self._kind, *shapes, shapes[2], preference),
            *(CANDIDATES, found, byref(count)),
        )
        self._call("cublasLtMatmulPreferenceDestroy", preference)
        return [Plan(self, shapes, one.algorithm) for one in found[: count.value]]

    def remembered(self, key: Key, text: str) -> Plan:
        """A plan by what `text_of` gave of it, by the same version of the library."""
        algorithm = (c_uint64 * 8).from_buffer_copy(bytes.fromhex(text))
        return Plan(self, self._shapes(key), algorithm)

    def multiply(self, plan: Plan, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """Starts a product. The library's matrices have columns where torch's have rows."""
        left, right, result = plan.shapes
        status = self._functions.cublasLtMatmul(
            *(self._handle, self._kind, ctypes.addressof(self._one), weight.data_ptr(), left),
            *(x.data_ptr(), right, ctypes.addressof(self._zero), out.data_ptr(), result),
            *(out.data_ptr(), result, byref(plan.algorithm), self._workspace.data_ptr()),
            *(WORKSPACE, torch.cuda.current_stream(self._device).cuda_stream),
        )
        if status:
            raise RuntimeError(f"cublasLtMatmul: status {status}")

    def _shapes(self, key: Key) -> tuple[c_void_p, c_void_p, c_void_p]:
        rows, outputs, columns, dtype = key
        kind = REAL_TYPES[getattr(torch, dtype)]

        def shape(height: int, width: int) -> c_void_p:
            made = c_void_p()
            self._call(
                "cublasLtMatrixLayoutCreate",
                *(byref(made), kind, c_uint64(height), c_uint64(width), c_int64(height)),
            )
            return made

        return shape(columns, outputs), shape(columns, rows), shape(outputs, rows)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._functions, name)(*arguments)
        if status:
            raise RuntimeError(f"{name}: status {status}")


def text_of(plan: Plan) -> str:
    """A plan's algorithm in letters, for `Library.remembered`."""
    return bytes(plan.algorithm).hex()


class Products:
    """What was learned of a device's products."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._library: Library | None = None
        self._plans: dict[Key, Plan] = {}
        self._known: dict[Key, str] = {}  # empty text: the library's own choice is as good
        # Weakly, so that a model's memory is free once the model is gone.
        self._seen: dict[tuple[int, int], list[ReferenceType[Tensor]]] = {}

    def find(self, x: Tensor, weight: Tensor) -> Plan | None:
        """The plan for x [M, K] times weight [N, K], or None: by the library's own choice."""
        plan = self._plans.get((x.shape[0], *weight.shape, str(x.dtype)[6:]))
        if plan is None or x.dtype != weight.dtype or not _is_plain(x) or not _is_plain(weight):
            return None
        return plan

    def see(self, weight: Tensor) -> None:
        """Weights that a model multiplies by, to time products with."""
        if weight.numel() < LEAST or weight.dtype not in REAL_TYPES or not _is_plain(weight):
            return
        shape = (weight.shape[0], weight.shape[1])
        kept = [one for one in self._seen.get(shape, ()) if one() is not None]
        if len(kept) < WEIGHTS and not any(one() is weight for one in kept):
            kept.append(ref(weight))
        self._seen[shape] = kept

    def learn(self, sizes: Iterable[int], folder: Path | None) -> str:
        """Times products of so many rows with the weights seen; a line that says what came of it.

        What a file in `folder` knows is not timed again.
        """
        seen = {
            shape: [w for one in kept if (w := one()) is not None]
            for shape, kept in self._seen.items()
        }
        wanted = [
            (rows, *shape, str(weights[0].dtype)[6:])
            for shape, weights in seen.items()
            if weights
            for rows in sizes
            if rows >= MANY
        ]
        try:
            if wanted and self._library is None:
                self._library = Library(self._device)
        except (OSError, RuntimeError) as error:
            return f"products: by the library's own choice: {error}"
        if self._library is None:
            return "products: all are small"
        path = None if folder is None else folder / self._name()
        self._known |= _read(path)
        new = [key for key in wanted if key not in self._known]
        for key in new:
            self._known[key] = self._fastest(key, seen[key[1], key[2]])
        if new and path is not None:
            _write(path, self._known)
        for key in wanted:
            if self._known[key] and key not in self._plans:
                self._adopt(key, seen[key[1], key[2]][0])
        better = sum(key in self._plans for key in wanted)
        return f"products: {better} of {len(wanted)} by another algorithm, {len(new)} timed now"

    def _adopt(self, key: Key, weight: Tensor) -> None:
        """Takes what is known into use; runs it once, as a captured graph cannot load a kernel."""
        assert self._library is not None
        plan = self._library.remembered(key, self._known[key])
        try:
            plan.run(weight.new_zeros(key[0], key[2]), weight)
        except RuntimeError:  # what a file says may be nothing that this library knows
            self._known[key] = ""
        else:
            self._plans[key] = plan

    def _name(self) -> str:
        assert self._library is not None
        card = "".join(c if c.isalnum() else "-" for c in torch.cuda.get_device_name(self._device))
        return f"products-{card}-{self._library.version}.json"

    def _fastest(self, key: Key, weights: list[Tensor]) -> str:
        """The algorithm that is faster than the first; empty if there is none."""
        assert self._library is not None
        x = torch.randn(key[0], key[2], device=self._device).to(weights[0].dtype)
        out = torch.empty(key[0], key[1], dtype=x.dtype, device=self._device)
        plans = list(self._working(key, x, weights[0], out))
        if len(plans) < 2:
            return ""
        first, *others = plans
        best = min(others, key=lambda plan: self._time(plan, x, weights, out))
        # Anew, and in turns with the first: the least of several times is less than it should be.
        pairs = [
            (self._time(first, x, weights, out), self._time(best, x, weights, out))
            for _ in range(ROUNDS)
        ]
        old, new = (sorted(times)[ROUNDS // 2] for times in zip(*pairs, strict=True))
        return text_of(best) if new < GAIN * old else ""

    def _time(self, plan: Plan, x: Tensor, weights: list[Tensor], out: Tensor) -> float:
        """Milliseconds of a product with each weight."""
        assert self._library is not None
        start, stop = _event(), _event()
        start.record()
        for weight in weights:
            self._library.multiply(plan, x, weight, out)
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop))

    def _working(self, key: Key, x: Tensor, weight: Tensor, out: Tensor) -> Iterator[Plan]:
        """Candidates that give what torch gives."""
        assert self._library is not None
        expected = torch.mm(x, weight.t()).float()
        for plan in self._library.candidates(key):
            out.fill_(torch.nan)
            try:
                self._library.multiply(plan, x, weight, out)
            except RuntimeError:
                continue
            if float((out.float() - expected).norm()) < 1e-2 * float(expected.norm()):
                yield plan


@lru_cache(maxsize=16)
def products_of(device: torch.device) -> Products:
    """What is known of a device's products, one for all models on it."""
    return Products(device)


def _is_plain(matrix: Tensor) -> bool:
    return matrix.is_contiguous() and matrix.data_ptr() % ALIGNED == 0


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _read(path: Path | None) -> dict[Key, str]:
    """What a start before this one has learned; nothing if the file cannot be read."""
    if path is None or not path.is_file():
        return {}
    try:
        lines = json.loads(path.read_text())
        return {(int(m), int(n), int(k), str(dtype)): str(text) for m, n, k, dtype, text in lines}
    except (OSError, ValueError, TypeError):
        return {}


def _write(path: Path, known: dict[Key, str]) -> None:
    """Replaces the file in one step, as another process may read it."""
    lines = [[*key, text] for key, text in sorted(known.items())]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(lines))
    part.replace(path)
