"""Will it fit, before anything is loaded: memory of each rank, the cache, lengths and requests.

All sizes come of the functions that the engine allocates by (`octavo/worker/`). Not for: time
(`speed.py`), what to change (`advice.py`), printing (`show.py`). Next file: `speed.py`.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace

from octavo.checkpoint.checkpoint import Checkpoint
from octavo.config import WorkerConfig
from octavo.errors import ConfigError
from octavo.models.decoder import Decoder
from octavo.models.registry import read_spec
from octavo.models.spec import ModelSpec
from octavo.options import EngineArgs
from octavo.plan.gpus import gpu_named
from octavo.plan.machine import Machine, planned, this_machine
from octavo.plan.model import Counts, choices_of, counts_of, open_for_plan, spec_of, stages
from octavo.resolve import worker_config
from octavo.worker.assemble import Choices, copies_fit, plain_bytes
from octavo.worker.forecast import Expected, cache_request, expect
from octavo.worker.memory import FIT, GRAPH_BYTES, CachePlan, plan_cache, size_text


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Bytes of the fullest rank of one pipeline stage."""

    stage: int
    layers: int
    weights: int
    tables: int
    step: int
    graphs: int
    context: int
    cache: int  # 0 if it does not fit
    kept_free: int  # of the device's memory, by gpu_memory_utilization
    blocks: int
    kv_token: int  # bytes of one token


@dataclass(frozen=True, slots=True)
class Plan:
    """A deployment, as forecast. `reason` is empty if it fits."""

    model: str
    source: str
    spec: ModelSpec
    config: WorkerConfig
    machine: Machine
    choices: Choices
    counts: Counts
    ranks: tuple[RankPlan, ...]
    blocks: int
    block_size: int
    max_model_len: int  # of a sequence, as asked for or as the model allows
    longest: int  # that would fit, at most what the model allows
    reason: str

    @property
    def fits(self) -> bool:
        """True if an engine would start."""
        return not self.reason

    @property
    def tokens(self) -> int:
        """Of the whole cache."""
        return self.blocks * self.block_size

    def requests(self, length: int) -> int:
        """Sequences of that length that the cache holds, within max_num_seqs."""
        needed = -(-length // self.block_size)
        return min(self.config.max_num_seqs, self.blocks // max(1, needed))

    @property
    def devices(self) -> int:
        """Of one engine."""
        return self.config.parallel.size


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be planned. `gpu` is a known name, or "this" for this machine."""

    args: EngineArgs
    gpu: str = "this"


def make_plan(question: Question) -> Plan:
    """The forecast. Raises ConfigError and CheckpointError; that it does not fit is no error."""
    args = question.args
    checkpoint, source = open_for_plan(args)
    here = question.gpu.lower() == "this"
    if not here:
        args = changed(args, device="cuda")
    longest = read_spec({**checkpoint.config, **args.hf_overrides}).max_model_len
    config = worker_config(args, str(checkpoint.path), model_max_len=longest)
    ranks = config.parallel.size
    machine = this_machine(config) if here else planned(gpu_named(question.gpu), ranks)
    return plan_of(config, checkpoint, machine, source=source)


def changed(args: EngineArgs, **values: object) -> EngineArgs:
    """A copy with other values, as if they were given as flags."""
    other = copy(args)
    other.__dict__["_sources"] = {**args.sources, **dict.fromkeys(values, "flag")}
    for name, value in values.items():
        setattr(other, name, value)
    return other


def plan_of(config: WorkerConfig, checkpoint: Checkpoint, machine: Machine, *, source: str) -> Plan:
    """The plan of a worker's settings on a machine."""
    spec = spec_of(checkpoint, config)
    choices = choices_of(config, checkpoint, spec, machine)
    expected = [
        (len(decoder.layers), _expect(config, choices, machine, decoder))
        for decoder in stages(config, choices, checkpoint)
    ]
    ranks = tuple(
        _rank(stage, layers, one, config, machine) for stage, (layers, one) in enumerate(expected)
    )
    blocks = min(_blocks(one) for _, one in expected)
    reasons = [one.reason for _, one in expected if one.reason]
    wanted = config.max_model_len
    length = spec.max_model_len if wanted in (None, FIT) or not wanted else wanted
    room = blocks * choices.need.block_size
    if wanted == FIT:
        length = min(length, room)
    return Plan(
        model=checkpoint.name,
        source=source,
        spec=spec,
        config=config,
        machine=machine,
        choices=choices,
        counts=counts_of(choices),
        ranks=ranks,
        blocks=blocks,
        block_size=choices.need.block_size,
        max_model_len=length,
        longest=min(spec.max_model_len, room),
        reason=_reason(reasons, ranks, machine),
    )


def _expect(config: WorkerConfig, choices: Choices, machine: Machine, decoder: Decoder) -> Expected:
    one = expect(config, choices, decoder, machine.room)
    if not machine.room.own or not copies_fit(choices.spec, choices.scheme, machine.room.total):
        return one
    # The engine's own weights of 4 bits, and plain ones beside them.
    weights = one.weights + plain_bytes(choices.spec) // config.parallel.size
    request = cache_request(
        config,
        choices,
        machine.room.after(weights),
        num_layers=len(decoder.layers),
        peak=one.step,
    )
    return replace(one, weights=weights, request=request, cache=plan_cache(request))


def _blocks(one: Expected) -> int:
    """Blocks that there is room for, also where one sequence would not fit."""
    return one.cache.num_blocks if one.cache else _fitted(one).num_blocks


def _fitted(one: Expected) -> CachePlan:
    """The cache if sequences were as long as it allows; of no blocks if there is no room."""
    try:
        return plan_cache(replace(one.request, max_model_len=FIT))
    except ConfigError:
        return CachePlan(0, 0, 0, ())


def _rank(
    stage: int, layers: int, one: Expected, config: WorkerConfig, machine: Machine
) -> RankPlan:
    own, total = machine.room.own, machine.room.total
    block = one.request.bytes_per_block
    return RankPlan(
        stage=stage,
        layers=layers,
        weights=one.weights,
        tables=one.tables,
        step=one.step,
        graphs=GRAPH_BYTES if own else 0,
        context=machine.context,
        cache=_blocks(one) * block,
        kept_free=int((1 - config.memory_fraction) * total) if own else 0,
        blocks=_blocks(one),
        kv_token=block // one.request.block_size,
    )


def _reason(reasons: list[str], ranks: tuple[RankPlan, ...], machine: Machine) -> str:
    """Why it does not fit; weights that are too large are named before the cache."""
    fullest = max(ranks, key=lambda rank: rank.weights)
    free = machine.room.free
    if fullest.weights > free:
        return (
            f"The weights of stage {fullest.stage} need {size_text(fullest.weights)} of each "
            f"device, and {size_text(free)} are free on it."
        )
    return reasons[0] if reasons else ""
