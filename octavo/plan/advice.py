"""The smallest change with which a model fits, found by planning anew; and what rules kernels out.

Not for: deciding. Next file: `show.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from octavo.errors import ConfigError, OctavoError
from octavo.fields import flag_of
from octavo.models.divide import even_sizes
from octavo.plan.forecast import Plan, Question, changed, make_plan
from octavo.worker.memory import FIT

MOST = 3  # changes that are told
MAX_TENSOR = 8  # devices of one host


def remedies(question: Question, plan: Plan) -> list[str]:
    """Changes, each of which alone makes it fit, the smallest first; at most MOST."""
    found: list[str] = []
    for text, other in _changes(question, plan):
        if len(found) == MOST:
            break
        try:
            fits = make_plan(other).fits
        except OctavoError:
            continue
        if fits:
            found.append(text)
    return found


def _changes(question: Question, plan: Plan) -> Iterator[tuple[str, Question]]:
    args, config = question.args, plan.config
    if plan.longest and config.max_model_len != FIT:
        yield _change(question, max_model_len=plan.longest)
    if plan.longest and args.kv_cache_dtype == "auto":
        yield _change(question, kv_cache_dtype="fp8")
    if args.gpu_memory_utilization < 0.95:
        yield _change(question, gpu_memory_utilization=0.95)
    if plan.longest and config.max_num_batched_tokens > 2048:
        seqs = min(config.max_num_seqs, 256)
        yield _change(question, max_num_batched_tokens=2048, max_num_seqs=seqs)
    if plan.choices.scheme is None and args.quantization is None:
        yield _change(question, quantization="fp8")
    yield from _more_devices(question, plan)


def _more_devices(question: Question, plan: Plan) -> Iterator[tuple[str, Question]]:
    """With at least as many as the weights alone need."""
    tensor = question.args.tensor_parallel_size
    needed = sum(rank.weights for rank in plan.ranks) * tensor / plan.machine.room.free
    for size in even_sizes(plan.spec):
        if max(tensor + 1, needed) <= size <= MAX_TENSOR and size % tensor == 0:
            yield _change(question, tensor_parallel_size=size)
    for stages in (2, 4, 8):
        enough = stages * tensor >= needed and stages <= plan.spec.num_layers
        if stages > question.args.pipeline_parallel_size and enough:
            yield _change(question, pipeline_parallel_size=stages)
    for stages in (2, 4):
        if stages * MAX_TENSOR >= needed and stages <= plan.spec.num_layers:
            yield _change(question, tensor_parallel_size=MAX_TENSOR, pipeline_parallel_size=stages)


def _change(question: Question, **values: object) -> tuple[str, Question]:
    text = " ".join(f"{flag_of(name)} {value}" for name, value in values.items())
    return text, Question(changed(question.args, **values), question.gpu)


def kernel_rules(plan: Plan) -> list[tuple[str, str]]:
    """(attention kernel, "yes" or why not) for these settings on that GPU; our own and others'.

    The rules are those of `octavo/attention/`, stated for a GPU that need not be here; of kernels
    that Octavo does not have, those of their makers.
    """
    need, gpu = plan.choices.need, plan.machine.gpu
    if plan.machine.device is not None and not plan.machine.room.own:
        return [(plan.choices.attention.name, "yes")]
    hopper = gpu.capability[0] == 9
    eight_bits = need.cache_dtype.itemsize == 1
    fp8 = "no: the cache is FP8, it takes 16-bit caches alone; --kv-cache-dtype auto allows it"
    sizes = (16, 32, 64, 128)
    page = need.block_size not in sizes and f"no: pages of {need.block_size}; use 16, 32, 64 or 128"
    if need.latent:
        return [
            ("mla_triton", _first(page)),
            ("mla_sdpa", "yes, slowly"),
            ("triton", "no: it has no multi-head latent attention"),
            ("FlashAttention-3 for latents", _first(not hopper and _OLD, eight_bits and fp8)),
            (
                "FlashMLA",
                _first(
                    not hopper and _OLD,
                    need.block_size != 64
                    and f"no: its pages hold 64 tokens, not "
                    f"{need.block_size}; --block-size 64 allows it",
                ),
            ),
        ]
    head = need.head_dim % 16 and f"no: heads of {need.head_dim}, no multiple of 16"
    wide = need.head_dim > 256 and f"no: heads of {need.head_dim}, 256 at most"
    odd = need.head_dim not in (64, 128, 256) and f"no: heads of {need.head_dim}"
    return [
        ("triton", _first(page, head, wide)),
        ("fa3", _first(not hopper and _OLD, eight_bits and fp8, page, head, wide)),
        ("flashinfer", _first(not hopper and _OLD, eight_bits and fp8, page, odd)),
        ("sdpa", "yes, slowly"),
    ]


_OLD = "no: it is for compute capability 9 (Hopper)"


def _first(*reasons: str | bool | int) -> str:
    return next((reason for reason in reasons if isinstance(reason, str) and reason), "yes")


def require_fit(question: Question, plan: Plan) -> None:
    """Raises ConfigError if it does not fit, with what would."""
    if plan.fits:
        return
    found = remedies(question, plan)
    how = f" Smallest changes that fit: {'; '.join(found)}." if found else ""
    raise ConfigError(f"{plan.model} does not fit: {plan.reason}{how}", "model")
