"""MLP: the gated feed-forward of Llama and its kin, down(silu(gate x) * up x), or GELU.

After Shazeer 2020, arXiv:2002.05202. Next file: `models/decoder.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from octavo.layers.build import Build
from octavo.layers.linear import GateUp, Row
from octavo.layers.parameters import Layer
from octavo.models.spec import Activation


class MLP:
    """Two linear layers around a gated activation."""

    __slots__ = ("down", "gate_up")

    def __init__(
        self,
        build: Build,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        activation: Activation = "silu",
        joined: bool = False,
    ) -> None:
        """`joined`: gate and up are one tensor in the checkpoint."""
        self.gate_up = GateUp(
            build,
            hidden_size,
            intermediate_size,
            bias=bias,
            activation=activation,
            joined=joined,
        )
        self.down = Row(build, intermediate_size, hidden_size, bias=bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        return self.down(self.gate_up.gated(x))

    def named_layers(self) -> Iterator[tuple[str, Layer]]:
        """Layers with parameters, in the order of use."""
        yield "gate_up", self.gate_up
        yield "down", self.down
