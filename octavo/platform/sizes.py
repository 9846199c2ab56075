"""What manifests take from a plan: whether it fits, and how long a start and a drain may last.

Not for: the plan itself (`octavo/plan/`). Next file: `manifests.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from octavo.errors import CheckpointError, ConfigError
from octavo.options import EngineArgs
from octavo.platform.spec import Spec

PERIOD = 10  # seconds between probes
START_SECONDS = 60  # of imports, kernels and graphs, beside the weights
SLACK = 2.0
UNKNOWN_SECONDS = 1800  # to load weights whose size is not known


@dataclass(frozen=True, slots=True)
class Sizes:
    """Seconds, and what the plan said."""

    load_seconds: float
    startup_failures: int  # probes of PERIOD seconds
    grace_seconds: int
    storage: str  # that weights and compiled kernels need
    note: str


def sizes_of(spec: Spec) -> Sizes:
    """Raises ConfigError if a plan says that the model does not fit."""
    weights, note = _planned(spec)
    seconds = UNKNOWN_SECONDS
    if weights:
        seconds = START_SECONDS + int(SLACK * weights / (spec.drain.load_bandwidth * 1e9))
    failures = math.ceil(seconds / PERIOD)
    # Before SIGTERM endpoints must have heard of it; after the drain, processes must end.
    grace = spec.drain.seconds + PRE_STOP + 20
    storage = f"{max(20, math.ceil(1.3 * weights / 2**30) + 10)}Gi" if weights else "500Gi"
    return Sizes(seconds, failures, grace, storage, note)


PRE_STOP = 10  # seconds before SIGTERM in which routers notice that a pod goes


def _planned(spec: Spec) -> tuple[int, str]:
    """Bytes of weights that one node loads (0: not known), and a note."""
    from octavo.plan.advice import require_fit
    from octavo.plan.forecast import Question, changed, make_plan

    names = {"tensor_parallel_size", "pipeline_parallel_size", "max_model_len", "dtype"}
    names |= {"gpu_memory_utilization", "kv_cache_dtype", "block_size", "max_num_batched_tokens"}
    names |= {"max_num_seqs", "quantization", "kv_cache_memory_bytes"}
    options = {key: value for key, value in spec.engine.options.items() if key in names}
    device = {} if spec.gpu.kind else {"device": "cpu"}
    args = changed(EngineArgs(), model=spec.model.name, **options, **device)
    question = Question(args, spec.gpu.kind or "this")
    try:
        plan = make_plan(question)
    except CheckpointError as error:
        return 0, f"not planned: {error.message}"
    except ConfigError as error:
        if error.option != "architectures":
            raise
        return 0, f"not planned: {error.message}"
    if spec.gpu.kind:
        require_fit(question, plan)
    on_a_node = min(spec.gpu.per_node, spec.gpus) if spec.gpus else 1
    weights = max(rank.weights for rank in plan.ranks) * on_a_node
    # A claim is shared by all nodes and holds the model once; each node reads its part.
    return weights, (
        f"planned: {weights / 1e9:.0f} GB of weights on a node, {plan.tokens:,} tokens of cache, "
        f"max_model_len up to {plan.longest:,}"
    )
