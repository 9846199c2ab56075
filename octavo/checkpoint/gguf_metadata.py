"""Typed reading of a GGUF file's metadata, under the prefix of its architecture.

Not for: what the keys mean (`gguf_families.py`). Next file: `gguf_families.py`.
"""

from __future__ import annotations

import math
import struct
from typing import Any

from octavo.checkpoint.gguf_file import GgufFile
from octavo.errors import CheckpointError


class Metadata:
    """Reads keys of the file's architecture and says which one is missing or wrong."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.prefix = str(file.metadata.get("general.architecture"))

    def get(self, key: str) -> Any:
        """A key of this architecture, or None."""
        return self.file.metadata.get(f"{self.prefix}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; CheckpointError if missing without default."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]  # one number a layer, all equal
        if type(value) is not int or value <= 0:
            raise CheckpointError(
                f"{self.file.path}: metadata key {self.prefix}.{key} must be a positive integer "
                f"and is {value!r}"
            )
        return value

    def number(self, key: str, default: float) -> float:
        """A finite positive number."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise CheckpointError(
                f"{self.file.path}: metadata key {self.prefix}.{key} must be a positive number "
                f"and is {value!r}"
            )
        return float(value)

    def vector(self, name: str, size: int) -> tuple[float, ...]:
        """The numbers of a small tensor, which must be `size` in f32."""
        tensor = self.file.tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self.file.path}: the tensor {name!r} is missing")
        if tensor.encoding != "F32" or tensor.shape != (size,):
            raise CheckpointError(f"{self.file.path}: {name} is {tensor.encoding} {tensor.shape}")
        with self.file.path.open("rb") as stream:
            stream.seek(tensor.offset)
            return struct.unpack(f"<{size}f", stream.read(tensor.nbytes))
