"""Mixture of experts: a router picks a few of many gated MLPs for each token.

After Shazeer et al. 2017 (arXiv:1701.06538); groups and shared experts after DeepSeek-V2
(arXiv:2405.04434), sigmoid scores with a bias of choice after DeepSeek-V3 (arXiv:2412.19437).
Not for: how tokens and weights are multiplied (`kernels/experts.py`).
Next file: `models/sparse.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from octavo.kernels.experts import ClampedExperts as ClampedProduct
from octavo.kernels.experts import looped
from octavo.kernels.ops import ClampedForm, ExpertProduct, JoiningExperts, RouteRules
from octavo.layers.build import Build
from octavo.layers.linear import Replicated, even_part
from octavo.layers.mlp import MLP
from octavo.layers.parameters import Layer, Parameters
from octavo.models.spec import MoeSpec
from octavo.parallel.collectives import all_reduce
from octavo.quant.base import QuantMethod
from octavo.weights.spec import ParamSpec, Part


class Router:
    """Which experts a token goes to, and how much each counts; alike on every rank."""

    __slots__ = ("_bias", "_linear", "_ops", "_parameters", "_rules", "_spec", "correction")

    correction: Tensor | None

    def __init__(self, build: Build, hidden_size: int, spec: MoeSpec) -> None:
        count = spec.num_experts
        part = (Part("", count, count, 0),)
        specs = {"weight": ParamSpec((count, hidden_size), build.dtype, part, out_dim=0)}
        if spec.correction:
            specs["correction"] = ParamSpec((count,), torch.float32, part)
        if spec.clamp:
            specs["bias"] = ParamSpec((count,), build.dtype, part)
        self._ops = build.ops
        self._spec = spec
        self._rules = RouteRules(
            top_k=spec.top_k,
            scoring=spec.scoring,
            renormalise=spec.renormalise,
            scale=spec.scale,
            groups=spec.groups,
            top_groups=spec.top_groups,
        )
        self._parameters = Parameters(specs)

    def param_specs(self) -> dict[str, ParamSpec]:
        """A matrix, "weight", "correction" f32[E] where choice has a bias, and perhaps "bias"."""
        return self._parameters.specs

    def set_param(self, name: str, tensor: Tensor) -> None:
        """Takes one parameter; see `Layer`."""
        self._parameters.set(name, tensor)

    def finish(self) -> None:
        """Repacks the matrix for the kernels."""
        tensors = self._parameters.take()
        self.correction = tensors.pop("correction", None)
        self._bias = tensors.pop("bias", None)
        self._linear = self._ops.pack(tensors["weight"])

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> (experts i64[T, k], their weights f32[T, k])."""
        logits = self._ops.linear(x, self._linear, self._bias, torch.float32)
        if self._ops.route is not None:
            return self._ops.route(logits, self._rules, self.correction)
        return route(logits, self._spec, self.correction)


def route(logits: Tensor, spec: MoeSpec, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """f32[T, E] -> (experts i64[T, k], weights f32[T, k]).

    `correction` f32[E] is added to the scores to choose by, and not to the weights. With groups,
    the best `top_groups` of them are chosen first, by their best score, or with a correction by the
    sum of their best two, and experts of the others are out.
    """
    scores = logits.softmax(dim=-1) if spec.scoring == "softmax" else logits.sigmoid()
    choice = scores if correction is None else scores + correction
    if spec.top_groups < spec.groups:
        by_group = choice.view(len(choice), spec.groups, -1)
        best = 1 if correction is None else 2
        value = by_group.topk(best, dim=-1).values.sum(dim=-1)
        chosen = value.topk(spec.top_groups, dim=-1).indices
        out = torch.ones_like(value, dtype=torch.bool).scatter(1, chosen, False)
        choice = by_group.masked_fill(out.unsqueeze(-1), -torch.inf).flatten(1)
    experts = choice.topk(spec.top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    if spec.renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return experts, weights * spec.scale


class Experts:
    """All experts' weights: rows of all gates and ups, columns of all downs cut over the ranks.

    Each expert is a part of two tall matrices, so a checkpoint's tensors for each expert are read
    into their places like those of any fused layer. `run` exists after `finish`.
    """

    __slots__ = ("_axis", "_cuts", "_make", "_parameters", "_quant", "_shape", "run")

    run: ExpertProduct

    def __init__(self, build: Build, hidden_size: int, spec: MoeSpec) -> None:
        axis, count, width = build.mesh.tp, spec.num_experts, spec.intermediate_size
        self._quant: QuantMethod | None = None
        self._axis = axis
        start, share = axis.share(width)
        sides = [
            even_part(f"{expert}.{side}", width, axis)
            for expert in range(count)
            for side in ("gate", "up")
        ]
        whole = [Part(str(expert), hidden_size, hidden_size, 0) for expert in range(count)]
        self._shape = (count, share, hidden_size)
        self._make = build.ops.experts or looped(build.ops)
        gate_up = ParamSpec(
            (count * 2 * share, hidden_size),
            build.dtype,
            tuple(sides),
            out_dim=0,
            in_dim=1,
            in_full=hidden_size,
        )
        down = ParamSpec(
            (count * hidden_size, share),
            build.dtype,
            tuple(whole),
            out_dim=0,
            in_dim=1,
            in_start=start,
            in_full=width,
        )
        self._cuts = {
            "gate_up": (hidden_size, tuple(sides), 0, hidden_size),
            "down": (share, tuple(whole), start, width),
        }
        self._parameters = Parameters({"gate_up": gate_up, "down": down})

    def use(self, unpacked: QuantMethod) -> None:
        """Takes quantized parameters, "gate_up.weight" and so on; their weights come out plain.

        Raises ConfigError if the method cannot cut them so.
        """
        self._quant = unpacked
        specs = {
            f"{side}.{name}": spec
            for side, cut in self._cuts.items()
            for name, spec in unpacked.params(*cut).items()
        }
        self._parameters = Parameters(specs)

    def modules(self) -> Iterator[tuple[str, str]]:
        """(side, part) of every expert's tensors."""
        for side, (_, parts, _, _) in self._cuts.items():
            yield from ((side, part.name) for part in parts)

    def param_specs(self) -> dict[str, ParamSpec]:
        """ "gate_up" [E * 2 * I, H], parts "0.gate", "0.up", ...; "down" [E * H, I], parts "0"."""
        return self._parameters.specs

    def set_param(self, name: str, tensor: Tensor) -> None:
        """Takes one parameter; see `Layer`."""
        self._parameters.set(name, tensor)

    def finish(self) -> None:
        """Repacks the weights for the kernels."""
        count, share, hidden = self._shape
        tensors = self._parameters.take()
        if self._quant is not None:
            tensors = {side: self._unpacked(side, tensors) for side in self._cuts}
        # Popped, so that a kernel that repacks may free what it has taken.
        gate_up = tensors.pop("gate_up").view(count, 2 * share, hidden)
        self.run = self._make(gate_up, tensors.pop("down").view(count, hidden, share))

    def _unpacked(self, side: str, tensors: dict[str, Tensor]) -> Tensor:
        assert self._quant is not None
        mine = {n.removeprefix(f"{side}."): t for n, t in tensors.items() if n.startswith(side)}
        return self._quant.finish(mine).data

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], experts [T, k], weights f32[T, k] -> [T, H], the weighted sum."""
        return all_reduce(self.run(x, experts, weights), self._axis)

    def joined(self, x: Tensor, experts: Tensor, weights: Tensor, shared: MLP) -> Tensor | None:
        """The same plus the shared experts' results, if the kernels take both in one."""
        gate_up, down = shared.gate_up.packed, shared.down.packed
        run = self.run
        if isinstance(run, JoiningExperts) and run.joins(len(x), gate_up, down):
            return all_reduce(run.joined(x, experts, weights, gate_up, down), self._axis)
        return None


class ClampedExperts:
    """Experts with biases and a bounded gate (gpt-oss), which checkpoints hold in one tensor each.

    There the columns of gate and up take turns. Each rank reads all and keeps its share.
    """

    __slots__ = ("_axis", "_make", "_parameters", "_spec", "run")

    run: ExpertProduct

    def __init__(self, build: Build, hidden_size: int, spec: MoeSpec) -> None:
        count, width = spec.num_experts, spec.intermediate_size
        self._axis = build.mesh.tp
        self._spec = spec
        self._make = build.ops.clamped_experts or ClampedProduct
        shapes = {
            "gate_up": (count, hidden_size, 2 * width),
            "gate_up_bias": (count, 2 * width),
            "down": (count, width, hidden_size),
            "down_bias": (count, hidden_size),
        }
        part = (Part("", count, count, 0),)
        self._parameters = Parameters(
            {name: ParamSpec(shape, build.dtype, part) for name, shape in shapes.items()}
        )

    def param_specs(self) -> dict[str, ParamSpec]:
        """ "gate_up" [E, H, 2 * I], "down" [E, I, H], and a bias of each."""
        return self._parameters.specs

    def set_param(self, name: str, tensor: Tensor) -> None:
        """Takes one parameter; see `Layer`."""
        self._parameters.set(name, tensor)

    def finish(self) -> None:
        """Puts this rank's share in order and repacks it for the kernels."""
        tensors = self._parameters.take()
        start, share = self._axis.share(self._spec.intermediate_size)
        own = torch.arange(start, start + share, device=tensors["down"].device)
        turns = torch.cat((2 * own, 2 * own + 1))
        gate_up = tensors.pop("gate_up").index_select(2, turns).transpose(1, 2).contiguous()
        down = tensors.pop("down")[:, start : start + share].transpose(1, 2).contiguous()
        bias = tensors["down_bias"]
        form = ClampedForm(
            tensors["gate_up_bias"].index_select(1, turns),
            bias if self._axis.rank == 0 else torch.zeros_like(bias),  # the ranks' sums are added
            self._spec.clamp_alpha,
            self._spec.clamp,
        )
        self.run = self._make(gate_up, down, form)

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], experts i64[T, k], weights f32[T, k] -> [T, H], the weighted sum."""
        return all_reduce(self.run(x, experts, weights), self._axis)


class SharedExperts:
    """Experts that every token goes to: one MLP, with a gate of its own in some models."""

    __slots__ = ("gate", "mlp")

    def __init__(self, build: Build, hidden_size: int, spec: MoeSpec) -> None:
        self.mlp = MLP(build, hidden_size, spec.shared_size, bias=False)
        self.gate = Replicated(build, hidden_size, 1) if spec.shared_gate else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        out = self.mlp(x)
        return out if self.gate is None else out * self.gate(x).sigmoid()


class MoE:
    """Router, routed experts, and shared ones where the model has them; in place of an MLP."""

    __slots__ = ("experts", "router", "shared")

    experts: Experts | ClampedExperts

    def __init__(self, build: Build, hidden_size: int, spec: MoeSpec) -> None:
        self.router = Router(build, hidden_size, spec)
        self.experts = (ClampedExperts if spec.clamp else Experts)(build, hidden_size, spec)
        self.shared = SharedExperts(build, hidden_size, spec) if spec.shared_size else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        experts, weights = self.router(x)
        if self.shared is None:
            return self.experts(x, experts, weights)
        if self.shared.gate is None and isinstance(self.experts, Experts):
            found = self.experts.joined(x, experts, weights, self.shared.mlp)
            if found is not None:
                return found
        return self.experts(x, experts, weights) + self.shared(x)

    def named_layers(self) -> Iterator[tuple[str, Layer]]:
        """Layers with parameters, in the order of use."""
        yield "router", self.router
        yield "experts", self.experts
        if self.shared is not None:
            yield "shared.gate_up", self.shared.mlp.gate_up
            yield "shared.down", self.shared.mlp.down
            if self.shared.gate is not None:
                yield "shared.gate", self.shared.gate
