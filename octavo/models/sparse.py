"""The block of models with routed experts, latent attention, or both.

Like the plain block in its norms and residuals; which attention and which feed-forward a layer has
is the spec's to say. Not for: decoders without either (`decoder.py`).
Next file: `deepseek.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from octavo.forward import ForwardBatch
from octavo.layers.attention import Attention, chosen
from octavo.layers.build import Build
from octavo.layers.experts import MoE
from octavo.layers.latent import LatentAttention
from octavo.layers.mlp import MLP
from octavo.layers.norm import RMSNorm
from octavo.layers.parameters import Layer
from octavo.layers.rope import Rope
from octavo.models.spec import ModelSpec


class SparseBlock:
    """One decoder block: attention of either kind, then an MLP or experts."""

    __slots__ = ("attention", "attention_norm", "mlp", "mlp_norm")

    attention: Attention | LatentAttention
    mlp: MLP | MoE

    def __init__(self, spec: ModelSpec, build: Build, rope: Rope, layer: int) -> None:
        hidden = spec.hidden_size
        self.attention_norm = RMSNorm(build, hidden, spec.rms_eps)
        kind = Attention if spec.latent is None else LatentAttention
        self.attention = kind(build, spec, rope, layer)
        self.mlp_norm = RMSNorm(build, hidden, spec.rms_eps)
        if spec.moe is not None and spec.moe.layers[layer]:
            self.mlp = MoE(build, hidden, spec.moe)
        else:
            self.mlp = MLP(build, hidden, spec.intermediate_size, bias=spec.mlp_bias)

    def __call__(
        self,
        change: Tensor | None,
        residual: Tensor,
        batch: ForwardBatch,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Takes and gives (change, residual), both [T, H]; see `decoder.Block`."""
        if change is None:
            normed = self.attention_norm(residual)
        else:
            normed, residual = self.attention_norm.add(change, residual)
        change, residual = self.attention(normed, batch, rows), chosen(residual, rows)
        normed, residual = self.mlp_norm.add(change, residual)
        return self.mlp(normed), residual

    def named_layers(self) -> Iterator[tuple[str, Layer]]:
        """Layers with parameters, in the order of use."""
        yield "attention_norm", self.attention_norm
        for name, layer in self.attention.named_layers():
            yield f"attention.{name}", layer
        yield "mlp_norm", self.mlp_norm
        for name, layer in self.mlp.named_layers():
            yield f"mlp.{name}", layer
