"""Fills a built model from a checkpoint, layer by layer, and accounts for every tensor.

The model says what it needs (each layer's ParamSpecs, with the rows and columns of this rank);
a family's name map says where that lies. A layer is finished right after it is filled, so that
raw and packed weights of the whole model never exist together. Anything missing, left over or of
another shape is an error before the first weight is read.
Not for: reading (`tensors.py`) or formats (`checkpoint/`, `gguf_blocks.py`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from math import prod
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from octavo.checkpoint.records import Checkpoint, TensorEntry
from octavo.errors import CheckpointError
from octavo.weights.spec import ParamSpec, Part
from octavo.weights.tensors import PLAIN, read_tensor

Names: TypeAlias = Callable[[str, str], str]  # (our dotted parameter, part) -> checkpoint tensor
Progress: TypeAlias = Callable[[int, int], None]  # (bytes done, bytes in all) of the files

SHOWN = 20  # names in one error
NOISE_LENGTH = 1_000_003  # prime, so that rows of equal length do not repeat each other
NOISE_SCALE = 0.02
FP8_WIDTH = 80.0  # of noise in 8-bit floats, whose scales make it as small as other noise
UNIFORM_SCALE = 0.03  # of noise that is drawn on a device
# A rope table that some checkpoints carry; it follows from the config.
ALWAYS_IGNORED = (r".*\.rotary_emb\.inv_freq",)


class FillableLayer(Protocol):
    """A layer between construction and use."""

    def param_specs(self) -> dict[str, ParamSpec]:
        """What it needs, by parameter name."""

    def set_param(self, name: str, tensor: Tensor) -> None:
        """Takes one parameter, of its spec's shape and dtype."""

    def finish(self) -> None:
        """Once, after all are set."""


class FillableModel(Protocol):
    """A model whose layers can be listed by name, in an order in which they can be finished."""

    def named_layers(self) -> Iterator[tuple[str, FillableLayer]]:
        """(our dotted name, layer)."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did. Bytes are those read of the files, and those of the raw parameters."""

    num_tensors: int
    file_bytes: int
    param_bytes: int
    ignored: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Piece:
    """One rectangle of a checkpoint tensor and where its rows go in the parameter."""

    entry: TensorEntry
    part: Part
    at: int  # first row, or index along the output dimension, in the parameter


@dataclass(frozen=True, slots=True)
class _Param:
    """One parameter to fill."""

    layer: str
    name: str
    spec: ParamSpec
    pieces: tuple[_Piece, ...]


def load(
    model: FillableModel,
    checkpoint: Checkpoint,
    names: Names,
    *,
    ignored: Sequence[str] = (),
    elsewhere: Set[str] = frozenset(),
    progress: Progress | None = None,
    device: str = "cpu",
) -> LoadReport:
    """Fills and finishes every layer of `model` on `device`, as torch names it.

    `names("blocks.0.attention.qkv.weight", "q")` gives the checkpoint's name of one part (the part
    is "" if not fused). `ignored` are regular expressions of checkpoint names that may be left
    over (a tied head's copy), and `elsewhere` names that other stages read. Raises CheckpointError
    with the names that are missing, left over, or of the wrong shape.
    """
    params = _plan(model, checkpoint, names)
    used = {piece.entry.name: piece.entry for param in params for piece in param.pieces}
    left = _left_over(checkpoint, used.keys() | elsewhere, (*ALWAYS_IGNORED, *ignored))
    total = sum(_piece_bytes(piece) for param in params for piece in param.pieces)
    done, param_bytes = 0, 0
    by_layer: dict[str, list[_Param]] = {}
    for param in params:
        by_layer.setdefault(param.layer, []).append(param)
    for name, layer in model.named_layers():
        for param in by_layer.get(name, ()):
            tensor = _fill(param).to(device)
            param_bytes += tensor.numel() * tensor.element_size()
            layer.set_param(param.name, tensor)
            done += sum(_piece_bytes(piece) for piece in param.pieces)
            if progress is not None:
                progress(done, total)
        layer.finish()
    return LoadReport(len(used), done, param_bytes, left)


def checkpoint_names(model: FillableModel, names: Names) -> Iterator[str]:
    """What the checkpoint calls all that `model` needs."""
    for layer_name, layer in model.named_layers():
        for name, spec in layer.param_specs().items():
            for part in spec.parts:
                yield names(f"{layer_name}.{name}", part.name)


def load_dummy(model: FillableModel, *, seed: int = 0, device: str = "cpu") -> LoadReport:
    """Fills every layer with small random values that depend on `seed` and the parameter's name.

    Vectors called "weight" are the norms' and lie about one, so that activations keep their
    size. On the CPU the values are a stretch of one noise, so this runs at the speed of copying;
    elsewhere they are drawn on the device, where that is as fast. On "meta" there are no values,
    and the report says what would be allocated.
    """
    noise = _maker(seed, device)
    param_bytes = 0
    for prefix, layer in model.named_layers():
        for name, spec in layer.param_specs().items():
            tensor = _made_up(noise, f"{prefix}.{name}", spec, device)
            if name == "weight" and tensor.dim() == 1:
                tensor += 1
            param_bytes += tensor.numel() * tensor.element_size()
            layer.set_param(name, tensor)
        layer.finish()
    return LoadReport(0, 0, param_bytes, ())


def _maker(seed: int, device: str) -> _Noise | _DeviceNoise | _NoNoise:
    if device == "meta":
        return _NoNoise()
    return _Noise(seed) if device == "cpu" else _DeviceNoise(seed, device)


def _made_up(
    noise: _Noise | _DeviceNoise | _NoNoise, name: str, spec: ParamSpec, device: str
) -> Tensor:
    if spec.dummy is not None:
        return torch.full(spec.shape, spec.dummy, dtype=spec.dtype, device=device)
    return noise.stretch(name, spec)


class _Noise:
    """One stretch of normal noise in each number format that is asked for."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._normal = torch.randn(NOISE_LENGTH, generator=generator)
        self._by_dtype: dict[torch.dtype, Tensor] = {}

    def stretch(self, name: str, spec: ParamSpec) -> Tensor:
        """As much noise as `spec` needs, over and over, from a place that the name decides."""
        noise = self._as(spec.dtype)
        count = prod(spec.shape)
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        start = int.from_bytes(digest, "little") % NOISE_LENGTH
        values = torch.empty(count, dtype=spec.dtype)
        done = 0
        while done < count:
            size = min(count - done, NOISE_LENGTH - start)
            values[done : done + size] = noise[start : start + size]
            done, start = done + size, 0
        return values.view(spec.shape)

    def _as(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._by_dtype:
            if dtype.is_floating_point:
                wide = FP8_WIDTH if dtype.itemsize == 1 else NOISE_SCALE
                scaled = (self._normal * wide).to(dtype)
            else:  # packed weights: all bits count
                scaled = (self._normal * 1e6).to(torch.int64).to(dtype)
            self._by_dtype[dtype] = scaled
        return self._by_dtype[dtype]


class _NoNoise:
    """Sizes alone."""

    def stretch(self, name: str, spec: ParamSpec) -> Tensor:
        """A tensor of `spec` without memory."""
        return torch.empty(spec.shape, dtype=spec.dtype, device="meta")


class _DeviceNoise:
    """Uniform noise, drawn on a device."""

    def __init__(self, seed: int, device: str) -> None:
        self._device = device
        self._generator = torch.Generator(device)
        self._seed = seed

    def stretch(self, name: str, spec: ParamSpec) -> Tensor:
        """As much noise as `spec` needs, from a seed that the name takes part in; norms are 0."""
        values = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
        if values.dim() == 1:
            return values.zero_()
        digest = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=7).digest()
        self._generator.manual_seed(int.from_bytes(digest, "little"))
        if not spec.dtype.is_floating_point:  # packed weights: all bits count
            least, most = torch.iinfo(spec.dtype).min, torch.iinfo(spec.dtype).max
            return values.random_(least, most, generator=self._generator)
        if spec.dtype.itemsize == 1:
            for row in torch.split(values, 4096):  # torch draws no 8-bit floats
                wide = torch.empty(row.shape, dtype=torch.bfloat16, device=self._device)
                row.copy_(wide.normal_(0, FP8_WIDTH, generator=self._generator))
            return values
        return values.uniform_(-UNIFORM_SCALE, UNIFORM_SCALE, generator=self._generator)


def _plan(model: FillableModel, checkpoint: Checkpoint, names: Names) -> list[_Param]:
    """What fills what, checked whole before anything is read."""
    params: list[_Param] = []
    missing: list[str] = []
    wrong: list[str] = []
    kinds: list[str] = []
    for layer_name, layer in model.named_layers():
        for name, spec in layer.param_specs().items():
            pieces: list[_Piece] = []
            at = 0
            for part in spec.parts:
                theirs = names(f"{layer_name}.{name}", part.name)
                entry = checkpoint.tensors.get(theirs)
                if entry is None:
                    missing.append(theirs)
                    continue
                expected = _expected_shape(spec, part)
                if not _same_shape(entry.shape, expected, scales=spec.dummy is not None):
                    wrong.append(
                        f"{theirs}: the config expects {list(expected)}, "
                        f"{entry.file.name} has {list(entry.shape)}"
                    )
                if _is_float(entry) != spec.dtype.is_floating_point:
                    kinds.append(f"{theirs} ({entry.encoding} in {entry.file.name})")
                pieces.append(_Piece(entry, part, at))
                at += part.size
            params.append(_Param(layer_name, name, spec, tuple(pieces)))
    if missing:
        raise CheckpointError(
            f"{checkpoint.path}: {len(missing)} tensors that the model needs are missing: "
            f"{_shown(missing)}; the download is incomplete or config.json is another model's"
        )
    if wrong:
        raise CheckpointError(
            f"{checkpoint.path}: {len(wrong)} tensors have another shape than config.json says: "
            f"{_shown(wrong, '; ')}"
        )
    if kinds:
        raise CheckpointError(
            f"{checkpoint.path}: {len(kinds)} tensors hold whole numbers where the model has "
            f"fractions, or the other way round: {_shown(kinds)}; config.json lacks or misnames "
            "the quantization"
        )
    return params


def _is_float(entry: TensorEntry) -> bool:
    """True for floats of any size and for GGUF's blocks, which are read as floats."""
    stored = PLAIN.get(entry.encoding)
    return stored is None or stored.is_floating_point


def _expected_shape(spec: ParamSpec, part: Part) -> tuple[int, ...]:
    """The whole checkpoint tensor's shape."""
    if spec.repeat == 0:
        return ()
    shape = list(spec.shape)
    if shape:
        shape[spec.out_dim or 0] = -(-part.full // spec.repeat)
    if spec.in_dim is not None:
        shape[spec.in_dim] = spec.in_full or shape[spec.in_dim]
    return tuple(shape)


def _same_shape(found: tuple[int, ...], expected: tuple[int, ...], *, scales: bool) -> bool:
    """True if they are alike; writers of scales differ in dimensions of 1."""
    if not scales:
        return found == expected
    return [size for size in found if size != 1] == [size for size in expected if size != 1]


def _left_over(checkpoint: Checkpoint, used: Set[str], ignored: Sequence[str]) -> tuple[str, ...]:
    """Names that may be left over. Raises CheckpointError if there are others."""
    patterns = [re.compile(pattern) for pattern in ignored]
    left: list[str] = []
    unexpected: list[str] = []
    for name in checkpoint.tensors:
        if name in used:
            continue
        known = any(pattern.fullmatch(name) for pattern in patterns)
        (left if known else unexpected).append(name)
    if unexpected:
        raise CheckpointError(
            f"{checkpoint.path}: {len(unexpected)} tensors have no place in the model: "
            f"{_shown(unexpected)}; leaving them out would change its answers, so config.json "
            "and weights do not belong together"
        )
    return tuple(left)


def _shown(names: list[str], separator: str = ", ") -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return separator.join(names[:SHOWN]) + more


def _piece_bytes(piece: _Piece) -> int:
    """Bytes of the file that this piece's rows take."""
    return piece.entry.nbytes * piece.part.size // max(1, piece.part.full)


def _fill(param: _Param) -> Tensor:
    """One parameter in its own memory."""
    spec = param.spec
    if not spec.shape:
        return read_tensor(param.pieces[0].entry, spec.dtype)
    columns = None
    if spec.in_dim is not None:
        columns = slice(spec.in_start, spec.in_start + spec.shape[spec.in_dim])
    if len(param.pieces) == 1 and param.pieces[0].part.size == spec.shape[spec.out_dim or 0]:
        return _read_piece(param.pieces[0], spec, columns)
    tensor = torch.empty(spec.shape, dtype=spec.dtype)
    along = spec.out_dim or 0
    for piece in param.pieces:
        tensor.narrow(along, piece.at, piece.part.size).copy_(_read_piece(piece, spec, columns))
    return tensor


def _read_piece(piece: _Piece, spec: ParamSpec, columns: slice | None) -> Tensor:
    """This rank's rectangle. Output rows are the first dimension, inputs the last, in all files."""
    part = piece.part
    if spec.repeat != 1:
        return _read_repeated(piece, spec, columns)
    rows = slice(part.start, part.start + part.size)
    if spec.out_dim not in (None, 0):
        # A transposed layout, as some packed formats have: the parts lie along another dimension.
        whole = read_tensor(piece.entry, spec.dtype)
        cut = whole.narrow(spec.out_dim or 0, rows.start, part.size)
        if columns is None or spec.in_dim is None:
            return cut.contiguous()
        return cut.narrow(spec.in_dim, columns.start, columns.stop - columns.start).contiguous()
    if len(piece.entry.shape) != len(spec.shape):  # scales with or without dimensions of 1
        whole = read_tensor(piece.entry, spec.dtype).view(_expected_shape(spec, part))
        cut = whole[rows]
        return (cut if columns is None else cut[..., columns]).contiguous()
    return read_tensor(piece.entry, spec.dtype, rows=rows, columns=columns)


def _read_repeated(piece: _Piece, spec: ParamSpec, columns: slice | None) -> Tensor:
    """A rectangle whose rows each stand for several of the checkpoint's tensor's."""
    part = piece.part
    whole = read_tensor(piece.entry, spec.dtype)
    if spec.repeat == 0:
        return whole.view(1).expand(part.size, *spec.shape[1:]).contiguous()
    first, last = part.start // spec.repeat, -(-(part.start + part.size) // spec.repeat)
    every = whole[first:last].repeat_interleave(spec.repeat, 0)
    cut = every.narrow(0, part.start - first * spec.repeat, part.size)
    return (cut if columns is None else cut[..., columns]).contiguous()
