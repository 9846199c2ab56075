"""How fast it could be, from bytes and operations alone: first token, and time between tokens.

A roofline with fixed shares of the data sheet's rates, which are stated with the figures. It knows
nothing of kernels, and says nothing of queues. Not for: promises; `octavo bench` measures.
Next file: `advice.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.plan.forecast import Plan

BANDWIDTH_SHARE = 0.75
FLOPS_SHARE = 0.55
HOP_SECONDS = 12e-6  # of one collective over a few devices, however small
STEP_SECONDS = 0.8e-3  # of the host's work that nothing hides


def assumed(plan: Plan) -> str:
    """What the figures rest on, in words."""
    gpu = plan.machine.gpu
    return (
        f"{BANDWIDTH_SHARE:.0%} of {gpu.bandwidth / 1e9:,.0f} GB/s and {FLOPS_SHARE:.0%} of "
        f"{_rate(plan) / 1e12:,.1f} TFLOP/s a device, {HOP_SECONDS * 1e6:.0f} µs a collective, "
        f"{STEP_SECONDS * 1e3:.1f} ms of the host a step"
    )


def _rate(plan: Plan) -> float:
    """Operations a second: of 8 bits where weights and activations are."""
    scheme, gpu = plan.choices.scheme, plan.machine.gpu
    eight = scheme is not None and scheme.kind == "fp8" and scheme.activations != "plain"
    return gpu.flops_8 if eight and gpu.flops_8 else gpu.flops


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds. `first` of a prompt alone on an idle engine, `next_token` within a batch."""

    prompt: int
    first: float
    batch: int
    context: int
    next_token: float

    @property
    def tokens_per_second(self) -> float:
        """Of the whole batch."""
        return self.batch / self.next_token


def speeds(
    plan: Plan, prompts: tuple[int, ...], batches: tuple[int, ...], context: int
) -> list[Speed]:
    """One forecast a pair of prompt and batch, the shorter list's last repeated."""
    count = max(len(prompts), len(batches))
    pairs = [
        (prompts[min(at, len(prompts) - 1)], batches[min(at, len(batches) - 1)])
        for at in range(count)
    ]
    return [
        Speed(prompt, first_token(plan, prompt), batch, context, next_token(plan, batch, context))
        for prompt, batch in pairs
    ]


def first_token(plan: Plan, prompt: int) -> float:
    """Seconds from an idle engine to the first token of a prompt of so many tokens.

    Stages of a pipeline take turns at one prompt's chunk, and chunks follow each other.
    """
    spec, parallel = plan.spec, plan.config.parallel
    gpu = plan.machine.gpu
    chunk = min(prompt, plan.config.max_num_batched_tokens)
    chunks = -(-prompt // chunk)
    heads = spec.num_heads * spec.head_dim
    attention = 2 * 2 * spec.num_layers * heads * prompt * prompt / 2
    operations = 2 * plan.counts.active * prompt + attention
    computed = operations / (parallel.tensor * _rate(plan) * FLOPS_SHARE)
    if parallel.pipeline > 1:  # full of chunks, but for the way in
        computed *= (chunks + parallel.pipeline - 1) / (chunks * parallel.pipeline)
    read = chunks * _weights_read(plan, chunk) / (gpu.bandwidth * BANDWIDTH_SHARE)
    sent = _collectives(plan, chunk) * chunks
    return max(computed, read) + sent + STEP_SECONDS * chunks * parallel.pipeline


def next_token(plan: Plan, batch: int, context: int) -> float:
    """Seconds of a decode step of `batch` sequences that are `context` tokens long each."""
    gpu, parallel = plan.machine.gpu, plan.config.parallel
    cached = sum(rank.kv_token for rank in plan.ranks) * batch * context
    weights = _weights_read(plan, batch)
    read = (weights + cached) / (gpu.bandwidth * BANDWIDTH_SHARE)
    operations = 2 * plan.counts.active * batch / parallel.tensor
    computed = operations / (_rate(plan) * FLOPS_SHARE)
    return max(read, computed) + _collectives(plan, batch) + STEP_SECONDS


def _weights_read(plan: Plan, tokens: int) -> float:
    """Bytes of weights that a step of so many tokens reads on each rank of its stages, summed.

    Of experts, as many as so many tokens choose if each is as likely as the others.
    """
    total = float(sum(rank.weights for rank in plan.ranks))
    moe, counts = plan.spec.moe, plan.counts
    if moe is None:
        return total
    met = 1 - (1 - moe.top_k / moe.num_experts) ** tokens
    return total * (1 - counts.experts / counts.total * (1 - met))


def _collectives(plan: Plan, tokens: int) -> float:
    """Seconds of the sums over tensor-parallel ranks, two a layer, and of handing on."""
    parallel, spec = plan.config.parallel, plan.spec
    item = plan.choices.dtype.itemsize
    hidden = tokens * spec.hidden_size * item
    hops = (parallel.pipeline - 1) * (HOP_SECONDS + hidden / 10e9)
    if parallel.tensor == 1:
        return hops
    moved = 2 * hidden * (parallel.tensor - 1) / parallel.tensor
    return hops + 2 * spec.num_layers * (HOP_SECONDS + moved / plan.machine.gpu.link)
