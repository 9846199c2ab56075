"""Attention: project, normalize heads if the model does, rotate, attend, project back.

Storing keys and values and attending over pages is the backend's work (`attention/base.py`).
Next file: `mlp.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from octavo.attention.base import AttentionNeed, FusedAttention, HeadRules
from octavo.forward import ForwardBatch
from octavo.layers.build import Build
from octavo.layers.linear import QKV, Row
from octavo.layers.norm import RMSNorm
from octavo.layers.parameters import Layer, Parameters
from octavo.layers.rope import Rope, head_order
from octavo.models.spec import ModelSpec
from octavo.weights.spec import ParamSpec, Part


class Sinks:
    """A learned score for each head, by which it attends to nothing. `scores` f32[Q]."""

    __slots__ = ("_parameters", "scores")

    scores: Tensor

    def __init__(self, build: Build, num_heads: int) -> None:
        start, count = build.mesh.tp.share(num_heads)
        part = (Part("", count, num_heads, start),)
        spec = ParamSpec((count,), torch.float32, part, out_dim=0)
        self._parameters = Parameters({"scores": spec})

    def param_specs(self) -> dict[str, ParamSpec]:
        """One vector, "scores"."""
        return self._parameters.specs

    def set_param(self, name: str, tensor: Tensor) -> None:
        """Takes the vector; see `Layer`."""
        self._parameters.set(name, tensor)

    def finish(self) -> None:
        """Takes the scores into use."""
        self.scores = self._parameters.take()["scores"]


class Attention:
    """Grouped-query attention of one decoder block.

    `query_norm` and `key_norm` are None in models without head norms, `sinks` in those without.
    Whoever fills the layer sets the scales of an FP8 cache in `need`.
    """

    __slots__ = (
        *("_backend", "_fused", "_layer", "key_norm", "need", "output", "qkv", "query_norm"),
        *("rope", "sinks"),
    )

    def __init__(self, build: Build, spec: ModelSpec, rope: Rope, layer: int) -> None:
        """`layer` is the block's index in the model, counted from 0."""
        self._backend = build.attention
        self._fused = build.attention if isinstance(build.attention, FusedAttention) else None
        self._layer = layer - build.first_layer
        self.need = layer_need(build.need, spec, layer)
        self.rope = rope
        self.sinks = Sinks(build, spec.num_heads) if spec.sinks else None
        self.qkv = QKV(
            build,
            spec.hidden_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            bias=spec.qkv_bias,
            joined=spec.fused_qkv,
            order=head_order(spec.rope),
        )
        self.query_norm = self._head_norm(build, spec)
        self.key_norm = self._head_norm(build, spec)
        self.output = Row(
            build, spec.num_heads * spec.head_dim, spec.hidden_size, bias=spec.output_bias
        )

    def __call__(self, x: Tensor, batch: ForwardBatch, rows: Tensor | None = None) -> Tensor:
        """x [T, H] -> [T, H]; stores the keys and values of all T tokens.

        With `rows` i32[S], tokens of which alone the result is wanted: [S, H].
        """
        if self._fused is not None:
            attended = self._fused.forward_fused(
                self.qkv(x), self._rules(), self._layer, self.need, batch, rows
            )
            return self.output(attended)
        q, k, v = self.qkv.split(self.qkv(x))
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm.heads(q), self.key_norm.heads(k)
        q, k = self.rope(q, k, batch.positions)
        scores = self._scores()
        attended = self._backend.forward(q, k, v, self._layer, self.need, batch, sinks=scores)
        return self.output(chosen(attended, rows))

    def named_layers(self) -> Iterator[tuple[str, Layer]]:
        """Layers with parameters, in the order of use."""
        yield "qkv", self.qkv
        if self.query_norm is not None and self.key_norm is not None:
            yield "query_norm", self.query_norm
            yield "key_norm", self.key_norm
        if self.sinks is not None:
            yield "sinks", self.sinks
        yield "output", self.output

    def _scores(self) -> Tensor | None:
        return None if self.sinks is None else self.sinks.scores

    def _head_norm(self, build: Build, spec: ModelSpec) -> RMSNorm | None:
        if not spec.qk_norm:
            return None
        return RMSNorm(build, spec.head_dim, spec.rms_eps, offset=spec.norm_offset)

    def _rules(self) -> HeadRules:
        if self.query_norm is None or self.key_norm is None:
            return HeadRules(self.rope.cos_sin, sinks=self._scores())
        return HeadRules(
            self.rope.cos_sin,
            self.query_norm.weight,
            self.key_norm.weight,
            self.query_norm.eps,
            self._scores(),
        )


def chosen(x: Tensor, rows: Tensor | None) -> Tensor:
    """Rows i32[S] of x, or all of it."""
    return x if rows is None else x.index_select(0, rows)


def layer_need(need: AttentionNeed, spec: ModelSpec, layer: int) -> AttentionNeed:
    """The need of one layer: the model's, without the window where this layer has none."""
    windowed = spec.window_layers[layer] if spec.window_layers else True
    return need if windowed else replace(need, window=0)
