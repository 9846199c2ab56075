"""Gluon's operations on a CPU, in plain torch: enough of them for kernels without roles of warps.

`install` puts these in the place of triton, so it belongs into a process of its own. A program runs
by itself, as one thread; copies are done at once. What is checked is arithmetic: where things lie,
which turn waits for which barrier (a wait that would never end fails), that loads and stores stay
within their tensors. What is not: races, layouts, precision. Not for: kernels in Triton's own
language, which has an interpreter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import product
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes that they expect are there."""

    def __init__(self) -> None:
        self.count = self.arrived = self.missing = self.phases = 0

    def expect(self, size: int) -> None:
        """One arrival that also expects bytes."""
        self.missing += size
        self.arrived += 1

    def receive(self, size: int) -> None:
        """Bytes are there."""
        self.missing -= size
        assert self.missing >= 0, "more bytes than expected"
        if self.missing == 0 and self.arrived == self.count:
            self.phases, self.arrived = self.phases + 1, 0


class Shared:
    """Shared memory: NaN until it is written."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def index(self, at: int | Tensor) -> Shared:
        """A slot."""
        assert 0 <= int(at) < len(self.tensor)
        return Shared(self.tensor[int(at)])

    def permute(self, order: tuple[int, ...]) -> Shared:
        """Another view."""
        return Shared(self.tensor.permute(order))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: object) -> Shared:
        """The same memory in other slots."""
        assert dtype == self.tensor.dtype
        return Shared(self.tensor.view(shape))


class Pointer:
    """Into flat memory, at one place or many."""

    def __init__(self, memory: Tensor, at: Any = 0) -> None:
        self.memory, self.at = memory, torch.as_tensor(at)
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.at + more)

    def places(self, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """(places, mask) of one shape; those that are not masked lie within the memory."""
        at, inside = torch.broadcast_tensors(
            self.at.long(), torch.tensor(True) if mask is None else mask
        )
        used = at[inside]
        assert used.numel() == 0 or (used.min() >= 0 and used.max() < self.memory.numel())
        return at, inside


class Descriptor:
    """Of a matrix that is copied in blocks; zeros where it ends."""

    def __init__(self, matrix: Tensor, block: list[int]) -> None:
        self.matrix, self.block, self.dtype, self.layout = matrix, block, matrix.dtype, None

    @staticmethod
    def from_tensor(matrix: Tensor, block: list[int], _: object) -> Descriptor:
        """As Gluon's."""
        return Descriptor(matrix, block)


class Kernel:
    """Launches one program after the other, in an order of chance."""

    def __init__(self, body: Callable[..., None], random: Random) -> None:
        self._body, self._random = body, random
        self.grid, self.program = (1, 1, 1), (0, 0, 0)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grid = tuple([*grid, 1, 1][:3])

        def launch(*given: Any, num_warps: int, launch_pdl: bool, **constants: Any) -> None:
            del num_warps, launch_pdl
            values = [Pointer(g.view(-1)) if isinstance(g, Tensor) else g for g in given]
            programs = list(product(*map(range, self.grid)))
            self._random.shuffle(programs)
            for self.program in programs:
                self._body(*values, **constants)

        return launch


def load(
    pointer: Pointer, mask: Tensor | None = None, other: float = 0.0, cache_modifier: str = ""
) -> Tensor:
    """gl.load."""
    del cache_modifier
    at, inside = pointer.places(mask)
    found = pointer.memory[torch.where(inside, at, 0)]
    return torch.where(inside, found, torch.tensor(other, dtype=found.dtype))


def store(
    pointer: Pointer, value: Any, mask: Tensor | None = None, cache_modifier: str = ""
) -> None:
    """gl.store."""
    del cache_modifier
    at, inside = pointer.places(mask)
    value = torch.as_tensor(value).expand(at.shape)
    pointer.memory[at[inside]] = value[inside].to(pointer.memory.dtype)


def atomic_add(pointer: Pointer, value: int, sem: str) -> Tensor:
    """gl.atomic_add at one place."""
    del sem
    before = load(pointer)
    store(pointer, before + value)
    return before


def copy(desc: Descriptor, at: list[Any], barrier: Any, into: Shared, *, pred: Any = True) -> None:
    """The copy engine's, of a block."""
    if not pred:
        return
    row, column = (int(place) for place in at)
    height, width = desc.block
    block = torch.zeros(height, width, dtype=desc.dtype)
    source = desc.matrix[row : row + height, column : column + width]
    block[: source.shape[0], : source.shape[1]] = source
    into.tensor.copy_(block)
    barrier.receive(block.numel() * block.element_size())


def expect(barrier: Barrier, size: int, *, pred: Any = True) -> None:
    """mbarrier.expect."""
    if pred:
        barrier.expect(size)


def wait(barrier: Barrier, phase: Any) -> None:
    """mbarrier.wait."""
    assert barrier.phases % 2 != int(phase), "this wait would never end"


def multiply(
    left: Shared, right: Shared, acc: Tensor, *, use_acc: Any = True, is_async: bool = False
) -> Tensor:
    """warpgroup_mma."""
    del is_async
    found = left.tensor.float() @ right.tensor.float()
    return acc + found if use_acc else found


def counted(*bounds: Any) -> Iterator[Tensor]:
    """`range` whose numbers are tensors, as a kernel's are."""
    yield from map(torch.tensor, range(*map(int, bounds)))


def allocate(dtype: torch.dtype, shape: list[int], layout: object) -> Any:
    """Shared memory, or barriers."""
    if layout == "barriers":
        barriers = [Barrier() for _ in range(shape[0])]
        return SimpleNamespace(index=lambda at: barriers[int(at)])
    return Shared(torch.full(shape, torch.nan, dtype=dtype))


def language(launched: Callable[[], Kernel]) -> dict[str, Any]:
    """What a kernel finds in `gl`."""
    nothing = dict.fromkeys(
        ("NVMMASharedLayout", "NVMMADistributedLayout", "BlockedLayout", "SliceLayout")
    )
    tensors = {
        "where": torch.where,
        "exp": torch.exp,
        "reshape": torch.reshape,
        "permute": torch.permute,
        "split": lambda value: value.unbind(-1),
    }
    kinds = {"float32": torch.float32, "int32": torch.int32, "int64": torch.int64}
    return {
        **{name: lambda *_, **__: None for name in nothing},
        **tensors,
        **kinds,
        "constexpr": None,
        "static_range": range,
        "program_id": lambda axis: torch.tensor(launched().program[axis]),
        "num_programs": lambda axis: torch.tensor(launched().grid[axis]),
        "cdiv": lambda value, size: -(-value // size),
        "minimum": lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
        "maximum": lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
        "arange": lambda first, end, _: torch.arange(first, end),
        "zeros": lambda shape, dtype, _: torch.zeros(shape, dtype=dtype),
        "convert_layout": lambda value, _: value,
        "thread_barrier": lambda: None,
        "allocate_shared_memory": allocate,
        "load": load,
        "store": store,
        "atomic_add": atomic_add,
    }


def install(launched: Callable[[], Kernel]) -> None:
    """Puts modules of these names into place; `launched` gives the kernel that runs."""

    def module(name: str, **names: Any) -> None:
        made = ModuleType(name)
        made.__dict__.update(names)
        sys.modules[name] = made
        above, _, last = name.rpartition(".")
        if above:
            setattr(sys.modules[above], last, made)

    def jit(body: Any = None, **_: Any) -> Any:
        return body or (lambda given: given)

    module("triton", __version__="3.6.0")
    module("triton.experimental")
    module("triton.experimental.gluon", jit=jit)
    module("triton.experimental.gluon.language", **language(launched))
    module("triton.experimental.gluon.language.nvidia")
    module(
        "triton.experimental.gluon.language.nvidia.hopper",
        mbarrier=SimpleNamespace(
            MBarrierLayout=lambda: "barriers",
            init=lambda barrier, count: setattr(barrier, "count", count),
            expect=expect,
            wait=wait,
        ),
        tma=SimpleNamespace(async_copy_global_to_shared=copy),
        warpgroup_mma=multiply,
        warpgroup_mma_wait=lambda _, deps: deps[0] if len(deps) == 1 else tuple(deps),
    )
    module("triton.experimental.gluon.nvidia")
    module("triton.experimental.gluon.nvidia.hopper", TensorDescriptor=Descriptor)
    module("triton.language")
    module("triton.language.extra")
    module(
        "triton.language.extra.cuda",
        gdc_launch_dependents=lambda: None,
        gdc_wait=lambda: None,
    )
