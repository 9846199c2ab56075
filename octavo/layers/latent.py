"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), with its projections absorbed.

A head's key is a projection of the token's latent, so its product with a query is that of the
latent with the query projected back; likewise a sum of values is the projection of a sum of
latents. So only latents are stored, once for all heads, and attention can run over one key head.
A backend that is a `LatentAttentionBackend` is given the projections and decides for itself when
it makes keys and values of them instead, which is less work where many queries share them.
Not for: storing and attending (`attention/mla_sdpa.py`). Next file: `models/sparse.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from octavo.attention.base import (
    FusedLatent,
    LatentAttentionBackend,
    LatentFactors,
    LatentRules,
)
from octavo.forward import ForwardBatch
from octavo.layers.attention import chosen
from octavo.layers.build import Build
from octavo.layers.linear import Linear, Row, movable
from octavo.layers.norm import RMSNorm
from octavo.layers.parameters import Layer, Parameters
from octavo.layers.rope import Rope
from octavo.models.spec import LatentSpec, ModelSpec
from octavo.quant.base import QuantMethod
from octavo.quant.turned import Turned
from octavo.weights.spec import ParamSpec, Part

INNER_EPS = 1e-6  # of the norms inside attention, whatever the model's other norms have


class Reordered(Linear):
    """A Linear some of whose output rows are put into another order as they are loaded."""

    __slots__ = ("_order",)

    def __init__(
        self, build: Build, parts: tuple[Part, ...], in_features: int, order: Tensor | None
    ) -> None:
        """`order` i64[rows]: which of the checkpoint's rows stands at each place; None is as is."""
        self._order = order
        super().__init__(build, parts, in_features, bias=False)

    @property
    def turns(self) -> bool:
        """Whether there is an order."""
        return self._order is not None

    def set_param(self, name: str, tensor: Tensor) -> None:
        """Takes one parameter, all of which have their rows along the first dimension."""
        late = isinstance(self._quant, Turned)
        super().set_param(name, tensor if late else self.turn(tensor))

    def turn(self, tensor: Tensor) -> Tensor:
        """Rows of the checkpoint's order in the layer's."""
        if self._order is None:
            return tensor
        order = self._order.to(tensor.device)
        return movable(tensor).index_select(0, order).view(tensor.dtype)


class Absorbed:
    """The projection from latents to keys and values, as one factor a head for either side.

    `factors` exist after `finish`.
    """

    __slots__ = ("_apart", "_latent", "_parameters", "_part", "_quant", "factors")

    factors: LatentFactors

    def __init__(self, build: Build, num_heads: int, latent: LatentSpec) -> None:
        """`num_heads` is the whole model's."""
        start, count = build.mesh.tp.share(num_heads)
        height = latent.plain_dim + latent.value_dim
        part = Part("", count * height, num_heads * height, start * height)
        spec = ParamSpec(
            (part.size, latent.rank),
            build.dtype,
            (part,),
            out_dim=0,
            in_dim=1,
            in_full=latent.rank,
        )
        self._apart = build.ops.apart
        self._latent = latent
        self._quant: QuantMethod | None = None
        self._part = part
        self._parameters = Parameters({"weight": spec})

    def use(self, unpacked: QuantMethod) -> None:
        """Takes quantized parameters, by a method whose weights come out plain."""
        rank = self._latent.rank
        self._quant = unpacked
        self._parameters = Parameters(unpacked.params(rank, (self._part,), 0, rank))

    @property
    def parts(self) -> tuple[Part, ...]:
        """The checkpoint's one tensor."""
        return (self._part,)

    def param_specs(self) -> dict[str, ParamSpec]:
        """One matrix, "weight" [Q * (plain + V), L]."""
        return self._parameters.specs

    def set_param(self, name: str, tensor: Tensor) -> None:
        """Takes the matrix; see `Layer`."""
        self._parameters.set(name, tensor)

    def finish(self) -> None:
        """Divides the matrix into keys' and values' factors."""
        latent = self._latent
        tensors = self._parameters.take()
        weight = tensors["weight"] if self._quant is None else self._quant.finish(tensors).data
        heads = weight.view(-1, latent.plain_dim + latent.value_dim, latent.rank)
        keys, values = torch.split(heads, [latent.plain_dim, latent.value_dim], dim=1)
        self.factors = LatentFactors(
            keys.contiguous(),
            values.transpose(1, 2).contiguous(),
            self._apart(keys.transpose(1, 2)) if self._apart else None,
            self._apart(values) if self._apart else None,
        )


class LatentAttention:
    """Latent attention of one decoder block; `query` and `query_norm` are None without a rank."""

    __slots__ = (
        *("_backend", "_fused", "_given", "_latent", "_layer", "absorbed", "input", "latent_norm"),
        *("need", "output", "query", "query_norm", "rope"),
    )

    query: Reordered | None
    query_norm: RMSNorm | None

    def __init__(self, build: Build, spec: ModelSpec, rope: Rope, layer: int) -> None:
        """`layer` is the block's index in the model, counted from 0."""
        latent = spec.latent
        assert latent is not None, "the model has no latent attention"
        self._backend = build.attention
        given = build.attention
        self._given = given if isinstance(given, LatentAttentionBackend) else None
        self._fused = given if isinstance(given, FusedLatent) else None
        self._latent = latent
        self._layer = layer - build.first_layer
        self.need = build.need
        self.rope = rope
        queries = query_part(build, spec.num_heads, latent)
        turns = head_order(queries.size, latent)
        cached = latent.rank + latent.rope_dim
        rest = Part("latent", cached, cached, 0)
        if latent.query_rank:
            first = Part("query_low", latent.query_rank, latent.query_rank, 0)
            order = torch.arange(first.size)
            self.query_norm = RMSNorm(build, latent.query_rank, INNER_EPS)
            self.query = Reordered(build, (queries,), latent.query_rank, turns)
        else:
            first, order = queries, torch.arange(queries.size) if turns is None else turns
            self.query_norm = self.query = None
        rest_order = rope_order(cached, latent)
        whole = torch.cat((order, first.size + rest_order)) if latent.interleaved else None
        self.input = Reordered(build, (first, rest), spec.hidden_size, whole)
        self.latent_norm = RMSNorm(build, latent.rank, INNER_EPS)
        self.absorbed = Absorbed(build, spec.num_heads, latent)
        self.output = Row(build, spec.num_heads * latent.value_dim, spec.hidden_size)

    def __call__(self, x: Tensor, batch: ForwardBatch, rows: Tensor | None = None) -> Tensor:
        """x [T, H] -> [T, H]; stores the latents of all T tokens. `rows` as in `Attention`."""
        latent = self._latent
        sizes = [self.input.parts[0].size, latent.rank + latent.rope_dim]
        first, rest = torch.split(self.input(x), sizes, dim=1)
        if self.query_norm is not None and self.query is not None:
            first = self.query(self.query_norm(first.contiguous()))
        if self._fused is not None:
            attended = self._fused.forward_fused_latent(
                first, rest, self._rules(), self._layer, self.need, batch
            )
            return self.output(chosen(attended, rows))
        vector, key = torch.split(rest, [latent.rank, latent.rope_dim], dim=1)
        heads = first.view(len(x), -1, latent.plain_dim + latent.rope_dim)
        plain, turning = torch.split(heads, [latent.plain_dim, latent.rope_dim], dim=2)
        turned, key = self.rope(
            turning.contiguous(), key.unsqueeze(1).contiguous(), batch.positions
        )
        query = torch.cat((plain, turned), dim=2)
        stored = torch.cat((self.latent_norm(vector.contiguous()).unsqueeze(1), key), dim=2)
        factors = self.absorbed.factors
        if self._given is not None:
            attended = self._given.forward_latent(
                query, stored, factors, self._layer, self.need, batch
            )
            return self.output(chosen(attended, rows))
        attended = self._backend.forward(
            factors.absorb(query), stored, stored[..., : latent.rank], self._layer, self.need, batch
        )
        attended = chosen(attended, rows)
        return self.output(factors.value(attended.view(len(attended), -1, latent.rank)))

    def _rules(self) -> LatentRules:
        return LatentRules(
            self.rope.cos_sin,
            self.latent_norm.weight,
            self.latent_norm.eps,
            self.absorbed.factors,
        )

    def named_layers(self) -> Iterator[tuple[str, Layer]]:
        """Layers with parameters, in the order of use."""
        yield "input", self.input
        if self.query_norm is not None and self.query is not None:
            yield "query_norm", self.query_norm
            yield "query", self.query
        yield "latent_norm", self.latent_norm
        yield "absorbed", self.absorbed
        yield "output", self.output


def query_part(build: Build, num_heads: int, latent: LatentSpec) -> Part:
    """This rank's rows of the last projection to queries, whole heads."""
    start, count = build.mesh.tp.share(num_heads)
    size = latent.plain_dim + latent.rope_dim
    return Part("query", count * size, num_heads * size, start * size)


def head_order(rows: int, latent: LatentSpec) -> Tensor | None:
    """i64[rows]: the order that puts the rotated pairs of each head apart; None if they are."""
    if not latent.interleaved:
        return None
    size = latent.plain_dim + latent.rope_dim
    starts = torch.arange(0, rows, size).unsqueeze(1)
    return (starts + rope_order(size, latent)).flatten()


def rope_order(size: int, latent: LatentSpec) -> Tensor:
    """i64[size], of which the last `rope_dim` are rotated: first all of each pair's first ones."""
    plain = size - latent.rope_dim
    pairs = plain + torch.arange(latent.rope_dim).view(-1, 2).t().flatten()
    return torch.cat((torch.arange(plain), pairs))
