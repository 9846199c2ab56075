"""Routing and the products of experts on a GPU, on fresh random shapes, beside the reference."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.experts import clamped_mul
from octavo.kernels.ops import ClampedForm, PackedWeight, RouteRules
from octavo.layers.experts import route as plain_route
from octavo.models.spec import MoeSpec
from tests.gpu.measure import bound, distance, poison_allocator

pytest.importorskip("triton")

from octavo.kernels.triton import experts as products
from octavo.kernels.triton import moe, routing
from octavo.kernels.triton.pairs import Shared, Sorted

# Triton's interpreter has no products of bf16.
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
RULES = [
    (64, RouteRules(6)),
    (10, RouteRules(2, renormalise=True)),
    (160, RouteRules(6, scale=16.0, groups=8, top_groups=3)),
    (20, RouteRules(3, groups=5, top_groups=2)),
    (256, RouteRules(8, "sigmoid", renormalise=True, scale=2.5, groups=8, top_groups=4)),
    (16, RouteRules(4, "sigmoid", groups=4, top_groups=2)),
]


def skip_narrow(device: torch.device, dtype: torch.dtype) -> None:
    if device.type != "cuda" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter has no products of bf16")


@pytest.mark.parametrize(("count", "rules"), RULES)
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 600])
def test_routing_chooses_and_weighs(
    device: torch.device, count: int, rules: RouteRules, corrected: bool, tokens: int
) -> None:
    if device.type != "cuda":
        tokens = min(tokens, 9)
    logits = 2 * torch.randn(tokens, count, device=device)
    correction = torch.randn(count, device=device) if corrected else None
    spec = MoeSpec(
        count,
        rules.top_k,
        8,
        (True,),
        rules.scoring,
        rules.renormalise,
        rules.scale,
        rules.groups,
        rules.top_groups,
        corrected,
    )
    experts, weights = plain_route(logits, spec, correction)
    poison_allocator(device)
    found, weighed = routing.route(logits, rules, correction)
    assert distance(weighed, weights) < 1e-5
    # Two scores may differ by less than the exponentials' last digit.
    assert int((found.long() != experts).any(dim=1).sum()) <= tokens // 200


def test_routing_of_nan_stays_among_the_experts(device: torch.device) -> None:
    """So that no kernel after it reads what is not there."""
    logits = torch.full((3, 12), torch.nan, device=device)
    found, _ = routing.route(logits, RouteRules(4), None)
    assert bool(((found >= 0) & (found < 12)).all())


def random_pairs(
    device: torch.device, tokens: int, count: int, top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Experts i32[T, k], some of which nobody chose, weights, and the experts as columns."""
    liked = torch.randperm(count)[: max(top, count - 2)]
    chosen = [liked[torch.randperm(len(liked))[:top]] for _ in range(tokens)]
    experts = torch.stack(chosen).to(device, torch.int32)
    return experts, torch.rand(tokens, top, device=device), liked


@pytest.mark.parametrize("shared", [0, 1, 2])
@pytest.mark.parametrize("tokens", [1, 7, 70, 900])
def test_sorting(device: torch.device, seed: int, tokens: int, shared: int) -> None:
    """Every pair has a place, by expert and then by token; tiles cover all places once."""
    if device.type != "cuda":
        tokens = min(tokens, 70)
    source = random.Random(seed)
    count, top = source.choice([3, 20, 64]), source.choice([1, 2, 3])
    size, rows = source.choice([40, 600]), source.choice([16, 64])
    x = torch.randn(tokens, size, device=device)
    experts, weights, _ = random_pairs(device, tokens, count, top)
    poison_allocator(device)
    found = routing.sort(x, experts, weights, count=count, tile_rows=rows, copy=True, shared=shared)
    more = torch.arange(count, count + shared, device=device).expand(tokens, shared)
    every = torch.cat((experts, more), dim=1).flatten()
    chosen, order = every.sort(stable=True)
    assert torch.equal(found.order.long(), order)
    assert torch.equal(found.place.long()[order], torch.arange(len(order), device=device))
    ones = torch.ones(tokens, shared, device=device)
    assert torch.equal(found.weights, torch.cat((weights, ones), dim=1).flatten()[order])
    assert found.rows is not None
    assert torch.equal(found.rows, x[order[: tokens * top] // (top + shared)])
    assert torch.equal(routing.gather(x, found), x[order // (top + shared)])
    ends = torch.bincount(chosen, minlength=count + shared).cumsum(0)
    assert torch.equal(found.ends.long(), ends)
    check_tiles(found, chosen.cpu(), rows)


@pytest.mark.parametrize("tokens", [1, 400, 5000])
def test_sorting_of_many(device: torch.device, seed: int, tokens: int) -> None:
    """The same places, found by chunks of pairs."""
    source = random.Random(seed)
    if device.type != "cuda":
        tokens = min(tokens, 400)
    count, top = source.choice([3, 64, 100, 256]), source.choice([1, 2, 3])
    logits = torch.randn(tokens, count, device=device)
    experts = logits.topk(top, dim=1).indices.int()
    weights = torch.rand(tokens, top, device=device)
    poison_allocator(device)
    found = routing.sort_many(experts, weights, count=count)
    chosen, order = experts.flatten().sort(stable=True)
    assert torch.equal(found.order.long(), order)
    assert torch.equal(found.place.long()[order], torch.arange(len(order), device=device))
    assert torch.equal(found.weights, weights.flatten()[order])
    assert torch.equal(found.ends.long(), torch.bincount(chosen, minlength=count).cumsum(0))


def check_tiles(found: Sorted, chosen: Tensor, rows: int) -> None:
    room = len(found.tiles) // 3
    number = int(found.tiles[-1])
    covered: list[int] = []
    for expert, first, stop in found.tiles[:-1].view(3, room)[:, :number].t().tolist():
        places = list(range(first, min(first + rows, stop)))
        covered += places
        assert {int(chosen[place]) for place in places} == {expert}
    assert covered == list(range(len(chosen)))


@pytest.mark.parametrize(
    ("dtype", "tokens", "number"),
    [
        *((torch.bfloat16, tokens, 0) for tokens in (1, 2, 64, 200, 700, 2000)),
        *((torch.bfloat16, tokens, 2) for tokens in (1, 9, 64, 700, 2000)),
        *((torch.float16, tokens, number) for tokens, number in ((1, 1), (30, 0), (64, 1))),
        *((torch.float32, tokens, 0) for tokens in (1, 70)),
    ],
)
def test_products(
    device: torch.device, seed: int, dtype: torch.dtype, tokens: int, number: int
) -> None:
    """Whatever serves so many tokens; shared experts in the same launches where it takes them."""
    skip_narrow(device, dtype)
    source = random.Random(seed)
    if device.type != "cuda":
        tokens = min(tokens, 20)
    count, top = source.choice([4, 9, 16]), source.choice([1, 2, 4])
    hidden, size = source.choice([(64, 200), (520, 64), (200, 96)])
    gate_up = (torch.randn(count + number, 2 * size, hidden, device=device) / hidden**0.5).to(dtype)
    down = (torch.randn(count + number, hidden, size, device=device) / size**0.5).to(dtype)
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    experts, weights, _ = random_pairs(device, tokens, count, top)
    product = moe.TritonExperts(gate_up[:count], down[:count])
    more = torch.arange(count, count + number, device=device).expand(tokens, number)
    every = torch.cat((experts, more), dim=1)
    ones = torch.ones(tokens, number, device=device)
    exact = reference.experts(gate_up, down)(x.float(), every, torch.cat((weights, ones), dim=1))
    poison_allocator(device)
    if number == 0:
        found = product(x, experts, weights)
    else:
        shared = side_by_side(gate_up[count:], down[count:], number)
        tall = PackedWeight(shared.gate_up, 2 * number * size, hidden, dtype, "plain")
        wide = PackedWeight(shared.down, hidden, number * size, dtype, "plain")
        if not product.joins(tokens, tall, wide):
            pytest.skip("shared experts go their own way")
        found = product.joined(x, experts, weights, tall, wide)
    assert distance(found, exact) < 2 * bound(device, dtype)


def side_by_side(gate_up: Tensor, down: Tensor, number: int) -> Shared:
    """Experts gate_up [n, 2 * I, H], down [n, H, I] as one MLP."""
    count, double, hidden = gate_up.shape
    tall = gate_up.view(count, 2, double // 2, hidden).transpose(0, 1).reshape(-1, hidden)
    return Shared(tall.contiguous(), down.transpose(0, 1).reshape(hidden, -1).contiguous(), number)


@pytest.mark.parametrize("tokens", [1, 30])
def test_weights_that_nobody_chose_are_not_read(device: torch.device, tokens: int) -> None:
    dtype = torch.float16
    gate_up = torch.randn(8, 128, 64, device=device).to(dtype) / 8
    down = torch.randn(8, 64, 64, device=device).to(dtype) / 8
    x = torch.randn(tokens, 64, device=device).to(dtype)
    experts, weights, liked = random_pairs(device, tokens, 8, 2)
    exact = reference.experts(gate_up, down)(x.float(), experts, weights)
    unliked = torch.tensor(sorted(set(range(8)) - set(liked.tolist())), device=device)
    gate_up[unliked] = torch.nan
    down[unliked] = torch.nan
    found = moe.TritonExperts(gate_up, down)(x, experts, weights)
    assert distance(found, exact) < 2 * bound(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_broken_token_spoils_no_other(device: torch.device, dtype: torch.dtype) -> None:
    skip_narrow(device, dtype)
    tokens = 40 if device.type == "cuda" else 12
    gate_up = (torch.randn(6, 128, 64, device=device) / 8).to(dtype)
    down = (torch.randn(6, 64, 64, device=device) / 8).to(dtype)
    x = torch.randn(tokens, 64, device=device).to(dtype)
    experts, weights, _ = random_pairs(device, tokens, 6, 2)
    product = moe.TritonExperts(gate_up, down)
    found = product(x, experts, weights)
    x[1:] = torch.nan
    assert torch.equal(product(x, experts, weights)[0], found[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_general_tiles(device: torch.device, dtype: torch.dtype) -> None:
    """The kernel of GPUs that are not Hopper, on those that are too."""
    skip_narrow(device, dtype)
    tokens, count, top, hidden, size = 37, 5, 2, 72, 40
    gate_up = (torch.randn(count, 2 * size, hidden, device=device) / hidden**0.5).to(dtype)
    down = (torch.randn(count, hidden, size, device=device) / size**0.5).to(dtype)
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    experts, weights, _ = random_pairs(device, tokens, count, top)
    order = routing.sort(x, experts, weights, count=count, tile_rows=16, copy=False)
    poison_allocator(device)
    inner = products.in_tiles(x, gate_up, order, tile_rows=16, silu=True)
    parts = products.in_tiles(inner, down, order, tile_rows=16, silu=False)
    found = products.sum_of(parts, order)
    exact = reference.experts(gate_up, down)(x.float(), experts, weights)
    assert distance(found, exact) < 2 * bound(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 37, 400])
def test_clamped_experts(device: torch.device, dtype: torch.dtype, tokens: int) -> None:
    """With biases and a bounded gate."""
    skip_narrow(device, dtype)
    if device.type != "cuda":
        tokens = min(tokens, 9)
    count, top, hidden, size = 5, 2, 72, 40
    gate_up = (torch.randn(count, 2 * size, hidden, device=device) / hidden**0.5).to(dtype)
    down = (torch.randn(count, hidden, size, device=device) / size**0.5).to(dtype)
    biases = [torch.randn(count, width, device=device).to(dtype) for width in (2 * size, hidden)]
    form = ClampedForm(biases[0], biases[1], 1.7, 1.5)
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    experts, weights, _ = random_pairs(device, tokens, count, top)
    exact = torch.zeros(tokens, hidden, device=device)
    for token in range(tokens):
        for expert, weight in zip(experts[token].tolist(), weights[token], strict=True):
            both = gate_up[expert].float() @ x[token].float() + biases[0][expert].float()
            inner = clamped_mul(both[None], form.alpha, form.limit)[0]
            exact[token] += weight * (down[expert].float() @ inner + biases[1][expert].float())
    poison_allocator(device)
    found = moe.TritonClampedExperts(gate_up, down, form)(x, experts, weights)
    assert distance(found, exact) < 2 * bound(device, dtype)
