"""A plan as a table with bars, and as JSON. Not for: computing anything."""

from __future__ import annotations

from typing import Any

from octavo.plan.advice import kernel_rules
from octavo.plan.forecast import Plan, RankPlan
from octavo.plan.speed import Speed, assumed
from octavo.worker.memory import size_text

WIDTH = 56  # characters of a bar
PARTS = (
    ("weights", "█", "weights"),
    ("cache", "▓", "KV cache"),
    ("step", "▒", "a step's activations and logits"),
    ("graphs", "░", "graphs"),
    ("context", "╳", "context, libraries, NCCL"),
)


def as_table(plan: Plan, rows: list[Speed], found: list[str], length: int | None) -> str:
    """What a person reads."""
    lines = [*_head(plan), "", *_bars(plan), "", *_cache(plan, length), ""]
    lines += ["attention kernels:", *(f"  {name:<30}{text}" for name, text in kernel_rules(plan))]
    lines += ["", f"speed, forecast ({assumed(plan)}):"]
    for row in rows:
        lines.append(
            f"  first token of {row.prompt} tokens {_ms(row.first)}; between tokens of "
            f"{row.batch} sequences of {row.context} tokens {_ms(row.next_token)}, "
            f"{row.tokens_per_second:,.0f} tokens/s"
        )
    if plan.fits:
        lines += ["", "It fits."]
    else:
        lines += ["", f"It does not fit: {plan.reason}"]
        lines += [f"  would fit with {text}" for text in found]
        lines += [] if found else ["  no single change that is known makes it fit"]
    return "\n".join(lines)


def _head(plan: Plan) -> list[str]:
    parallel, gpu = plan.config.parallel, plan.machine.gpu
    active = "" if plan.counts.active == plan.counts.total else _billions(plan.counts.active)
    return [
        f"{plan.model} on {plan.devices} x {gpu.name} "
        f"(TP {parallel.tensor}, PP {parallel.pipeline})",
        plan.source,
        f"{_billions(plan.counts.total)} parameters{f', {active} a token' if active else ''}; "
        f"weights {plan.choices.scheme or str(plan.choices.dtype).removeprefix('torch.')}, "
        f"cache {str(plan.choices.need.cache_dtype).removeprefix('torch.')}",
    ]


def _bars(plan: Plan) -> list[str]:
    total = plan.machine.room.total
    lines = [f"each device has {size_text(total)}; the fullest rank of each stage:"]
    for rank in plan.ranks:
        named = f"stage {rank.stage}, " if len(plan.ranks) > 1 else ""
        lines.append(f"  {named}{rank.layers} layers")
        lines.append(f"  |{bar(rank, total)}|")
        lines += [
            f"   {sign} {name:<34}{size_text(_size(rank, field)):>12}"
            for field, sign, name in PARTS
            if _size(rank, field)
        ]
        if rank.kept_free:
            lines.append(f"     {'left free':<34}{size_text(rank.kept_free):>12}")
    return lines


def bar(rank: RankPlan, total: int) -> str:
    """The parts of a rank's memory, to scale; what is over the edge is drawn as "!"."""
    drawn = ""
    for field, sign, _ in PARTS:
        drawn += sign * round(WIDTH * _size(rank, field) / max(1, total))
    if len(drawn) > WIDTH:
        return drawn[: WIDTH - 1] + "!"
    return drawn.ljust(WIDTH, "·")


def _size(rank: RankPlan, field: str) -> int:
    sizes = {
        "weights": rank.weights + rank.tables,
        "cache": rank.cache,
        "step": rank.step,
        "graphs": rank.graphs,
        "context": rank.context,
    }
    return sizes[field]


def _cache(plan: Plan, length: int | None) -> list[str]:
    token = max(rank.kv_token for rank in plan.ranks)
    tensor = plan.config.parallel.tensor
    whole = sum(rank.kv_token for rank in plan.ranks)
    if plan.spec.latent is not None and tensor > 1:
        how = f"latents are kept whole on each of {tensor} ranks, not divided"
    elif tensor > 1:
        how = f"of a model's heads, a {tensor}th on each rank where they divide"
    else:
        how = "all layers"
    lines = [
        f"a token takes {token:,} bytes of cache on the fullest rank ({whole:,} over the stages; "
        f"{how})",
        f"the cache holds {plan.tokens:,} tokens in {plan.blocks:,} blocks of {plan.block_size}",
        f"longest max_model_len that fits: {plan.longest:,} (the model's own is "
        f"{plan.spec.max_model_len:,})",
    ]
    lengths = [length] if length else _lengths(plan)
    return lines + [
        f"requests of {one:,} tokens at once: {plan.requests(one):,}" for one in lengths
    ]


def _lengths(plan: Plan) -> list[int]:
    asked = plan.max_model_len
    return sorted({min(asked, one) for one in (1024, 8192, asked)})


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 1e9 else f"{count / 1e6:.1f} million"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 10 else f"{seconds:.0f} s"


def as_json(plan: Plan, rows: list[Speed], found: list[str], length: int | None) -> dict[str, Any]:
    """What a program reads: bytes, tokens, seconds."""
    lengths = [length] if length else _lengths(plan)
    return {
        "model": plan.model,
        "source": plan.source,
        "gpu": plan.machine.gpu.name,
        "tensor_parallel_size": plan.config.parallel.tensor,
        "pipeline_parallel_size": plan.config.parallel.pipeline,
        "fits": plan.fits,
        "reason": plan.reason,
        "remedies": found,
        "parameters": plan.counts.total,
        "active_parameters": plan.counts.active,
        "device_bytes": plan.machine.room.total,
        "ranks": [
            {
                "stage": rank.stage,
                "layers": rank.layers,
                "weight_bytes": rank.weights,
                "table_bytes": rank.tables,
                "step_bytes": rank.step,
                "graph_bytes": rank.graphs,
                "context_bytes": rank.context,
                "cache_bytes": rank.cache,
                "kv_bytes_per_token": rank.kv_token,
                "blocks": rank.blocks,
            }
            for rank in plan.ranks
        ],
        "block_size": plan.block_size,
        "blocks": plan.blocks,
        "tokens": plan.tokens,
        "max_model_len": plan.max_model_len,
        "longest_max_model_len": plan.longest,
        "requests": {str(one): plan.requests(one) for one in lengths},
        "attention": dict(kernel_rules(plan)),
        "speed": {
            "assumed": assumed(plan),
            "forecasts": [
                {
                    "prompt": row.prompt,
                    "first_token_seconds": row.first,
                    "batch": row.batch,
                    "context": row.context,
                    "next_token_seconds": row.next_token,
                }
                for row in rows
            ],
        },
    }
