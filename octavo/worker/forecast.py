"""What a rank will take of its device, before any of it is taken.

The worker makes a forecast when its model is built and still empty, and prints it against what
came; `octavo plan` makes the same one of a model built without memory. Not for: the sizing of the
cache itself (`memory.py`), whose functions both use. Next file: `octavo/plan/forecast.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config import WorkerConfig
from octavo.errors import ConfigError
from octavo.models.decoder import Decoder
from octavo.models.spec import ModelSpec
from octavo.worker.assemble import Choices, weight_bytes
from octavo.worker.memory import CachePlan, CacheRequest, Room, budget_of, plan_cache, size_text

WORKSPACE_BYTES = 96 * 2**20  # of matrix products and of attention's partial results
LOGIT_COPIES = 3  # of a step's logits in f32: as multiplied, as settings change them, as sorted


@dataclass(frozen=True, slots=True)
class Expected:
    """Bytes of one rank, and the cache that they leave room for."""

    weights: int
    tables: int  # of rotary positions
    step: int  # what the largest step takes for a while
    request: CacheRequest
    cache: CachePlan | None  # None: it does not fit, for the `reason`
    reason: str = ""


def cache_request(
    config: WorkerConfig, choices: Choices, room: Room, *, num_layers: int, peak: int = 0
) -> CacheRequest:
    """What is asked of a rank's cache of `num_layers` layers; `peak` bytes are left to steps."""
    layout = choices.attention.layout(choices.need, 1)
    return CacheRequest(
        block_size=choices.need.block_size,
        bytes_per_block=layout.layer_bytes * num_layers,
        model_max_len=choices.spec.max_model_len,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        free_bytes=room.free,
        total_bytes=room.total,
        budget_bytes=budget_of(room, config.memory_fraction, peak),
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        num_blocks=config.num_blocks,
        own_memory=room.own,
    )


def expect(config: WorkerConfig, choices: Choices, decoder: Decoder, room: Room) -> Expected:
    """The forecast for a decoder that is built and has no weights yet, on a device with `room`."""
    weights = weight_bytes(decoder)
    asked = config.max_model_len or 0
    longest = asked if 0 < asked < choices.spec.max_model_len else choices.spec.max_model_len
    tables = longest * decoder.rope.cos_sin.shape[1] * 4
    if decoder.local_rope is not decoder.rope:
        tables *= 2
    step = step_bytes(config, choices) if room.own else 0
    request = cache_request(
        config, choices, room.after(weights), num_layers=len(decoder.layers), peak=step
    )
    try:
        return Expected(weights, tables, step, request, plan_cache(request))
    except ConfigError as error:
        return Expected(weights, tables, step, request, None, error.message)


def step_bytes(config: WorkerConfig, choices: Choices) -> int:
    """Bytes that the largest step takes for a while, of activations and of logits.

    A layer's widest moment is its MLP, its experts or its attention; the residual and its norm are
    kept meanwhile. Logits come when layers are done.
    """
    spec, item = choices.spec, choices.dtype.itemsize
    tokens, rows = config.max_num_batched_tokens, config.max_num_seqs
    ranks = config.parallel.tensor
    stream = 3 * tokens * spec.hidden_size * item
    layer = max(_attention_width(choices), *_mlp_widths(spec, ranks))
    logits = LOGIT_COPIES * rows * spec.vocab_size * 4
    return WORKSPACE_BYTES + max(stream + tokens * layer * item, logits)


def _attention_width(choices: Choices) -> int:
    """Numbers a token at once in attention, on this rank."""
    need, latent = choices.need, choices.spec.latent
    if latent is None:
        return (2 * need.num_heads + 2 * need.num_kv_heads) * need.head_dim
    # Queries as they are and as they meet the latents, and what comes back of them.
    plain = latent.plain_dim + latent.rope_dim
    return need.num_heads * (plain + need.head_dim + latent.rank + latent.value_dim)


def _mlp_widths(spec: ModelSpec, ranks: int) -> list[int]:
    """Numbers a token at once in a dense MLP and in routed experts, on one of `ranks`."""
    moe = spec.moe
    dense = 0 if moe is not None and all(moe.layers) else 3 * spec.intermediate_size // ranks
    if moe is None:
        return [dense]
    routed = moe.top_k * (3 * moe.intermediate_size // ranks + 2 * spec.hidden_size)
    return [dense, routed + 3 * moe.shared_size // ranks]


def against(expected: Expected, weights: int, peak: int, cache: CachePlan) -> str:
    """One line: what was forecast, and what came."""
    parts = [f"weights {size_text(expected.weights)} (came {size_text(weights)})"]
    if peak:
        parts.append(f"a step {size_text(expected.step)} (came {size_text(peak)})")
    planned = expected.cache.num_blocks if expected.cache else 0
    off = 100 * (planned - cache.num_blocks) / max(1, cache.num_blocks)
    parts.append(f"{planned} blocks (came {cache.num_blocks}, {off:+.1f} %)")
    return f"plan: {', '.join(parts)}"
