"""What a caller asks of an embedding, and the last step from hidden states to a vector.

Not for: running the model; a text to embed is a request of one token (`SamplingParams.pooling`).
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass

from octavo.errors import InvalidRequest
from octavo.sampling_params import POOLINGS


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """`pooling`: the "last" hidden state of a text, or the "mean" of all; then length 1."""

    pooling: str = "last"
    normalize: bool = True

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise InvalidRequest(
                f"pooling = {self.pooling!r} is not allowed: use {' or '.join(POOLINGS)}.",
                "pooling",
            )


def vector_of(pooled: bytes, *, normalize: bool) -> array[float]:
    """The f32 numbers in `pooled`, at length 1 if asked for; a vector of zeros stays."""
    vector = array("f", pooled)
    if not normalize:
        return vector
    length = math.sqrt(math.fsum(value * value for value in vector))
    return array("f", (value / length for value in vector)) if length else vector
