"""Worker: one device's model, cache and slots. Loads once, then runs plans in order.

Not for: deciding what runs (`engine/`) or in which process (`executor/`). Next file: `runner.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from octavo.config import WorkerConfig
from octavo.device.base import Device
from octavo.device.cpu import CpuDevice
from octavo.errors import ConfigError
from octavo.types import SAMPLE, Admit, StepPlan, StepResult, TokenParams, WorkerInfo, pack
from octavo.weights.loader import LoadReport
from octavo.worker.assemble import Choices, build, check_room, choose, fill, finish, open_model
from octavo.worker.buffers import InputBuffers
from octavo.worker.cache import allocate_cache
from octavo.worker.memory import CachePlan, CacheRequest, plan_cache
from octavo.worker.runner import Model, Runner
from octavo.worker.slots import SlotTable

Report = Callable[[str], None]
WARM_UP_TOKENS = 4


class Worker:
    """Serves plans on one device. `load` comes first and once; `step` and `control` follow."""

    def __init__(self, config: WorkerConfig, device: Device | None = None) -> None:
        self._config = config
        self._device: Device = CpuDevice(config.threads) if device is None else device
        self._runner: Runner | None = None
        self._timings: list[tuple[str, float]] = []
        self._report: Report = _silent

    def load(self, report: Report | None = None) -> WorkerInfo:
        """Loads weights, takes the cache and runs a first small step.

        `report` is told what is being done, in a few words, as it changes. Raises ConfigError and
        CheckpointError.
        """
        self._report = report or _silent
        config, device = self._config, self._device
        device.start()
        free_at_start = device.free_memory()
        with self._phase("open"):
            checkpoint, spec = open_model(config)
        with self._phase("kernels"):
            choices = choose(config, spec, device)
            # What cannot fit now will not fit after loading: say so before that takes its time.
            plan_cache(self._cache_request(choices, free_at_start))
        with self._phase("build"):
            decoder = build(config, choices, device)
            check_room(decoder, device.free_memory())
        with self._phase("load"):
            loaded = fill(decoder, checkpoint, config, self._bytes)
        with self._phase("fuse"):
            model, fuse_note = finish(decoder, choices.ops)
        if choices.ops.name != "native":
            device.compute_in_torch()
        with self._phase("cache"):
            cache = plan_cache(self._cache_request(choices, free_at_start))
            self._runner = self._make_runner(model, choices, cache)
        with self._phase("warm-up"):
            warm_up_notes = self._warm_up(cache, choices.need.block_size)
        notes = (*device.notes, *choices.notes, fuse_note, *cache.notes, *warm_up_notes)
        return self._info(choices, loaded, cache, notes)

    def step(self, plan: StepPlan) -> StepResult:
        """Runs one plan; see `Runner.step`."""
        assert self._runner is not None, "load comes first"
        return self._runner.step(plan)

    def control(self, op: str, **args: str) -> dict[str, str]:
        """`memory` gives the device's free and total bytes. Raises ConfigError for other names."""
        if op != "memory" or args:
            raise ConfigError(f"worker operation {op!r} with {args} is not known; use memory")
        device = self._device
        return {"free": str(device.free_memory()), "total": str(device.total_memory())}

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Reports and times a part of the start."""
        self._report(name)
        started = perf_counter()
        yield
        self._timings.append((name, perf_counter() - started))

    def _bytes(self, done: int, total: int) -> None:
        self._report(f"load {done * 100 // max(1, total)}%")

    def _cache_request(self, choices: Choices, free_at_start: int) -> CacheRequest:
        config, device = self._config, self._device
        free = device.free_memory()
        layout = choices.attention.layout(choices.need, 1)
        taken = max(0, free_at_start - free)
        return CacheRequest(
            block_size=choices.need.block_size,
            bytes_per_block=layout.layer_bytes * choices.spec.num_layers,
            model_max_len=choices.spec.max_model_len,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            free_bytes=free,
            total_bytes=device.total_memory(),
            budget_bytes=int(config.memory_fraction * free_at_start) - taken,
            kv_cache_memory_bytes=config.kv_cache_memory_bytes,
            num_blocks=config.num_blocks,
        )

    def _make_runner(self, model: Model, choices: Choices, cache: CachePlan) -> Runner:
        config, block_size = self._config, choices.need.block_size
        layout = choices.attention.layout(choices.need, cache.num_blocks)
        max_blocks = -(-cache.max_model_len // block_size)
        return Runner(
            model=model,
            sample=choices.ops.sample,
            attention=choices.attention,
            kv=allocate_cache(layout, num_layers=choices.spec.num_layers, block_size=block_size),
            slots=SlotTable(
                num_slots=config.max_num_seqs,
                max_blocks=max_blocks,
                vocab_size=choices.spec.vocab_size,
            ),
            buffers=InputBuffers(
                max_tokens=config.max_num_batched_tokens,
                max_rows=config.max_num_seqs,
                max_blocks=max_blocks,
            ),
        )

    def _warm_up(self, cache: CachePlan, block_size: int) -> tuple[str, ...]:
        """A short prompt, then one more token: what is made on first use is made now.

        It writes into blocks that nobody owns yet; they are written anew before they are read.
        """
        length = min(WARM_UP_TOKENS, cache.max_model_len, self._config.max_num_batched_tokens)
        blocks = -(-min(length + 1, cache.max_model_len) // block_size)
        params = TokenParams(max_tokens=2, temperature=0.0)
        prompt = StepPlan(
            step=0,
            epoch=0,
            slots=pack([0]),
            starts=pack([0]),
            lengths=pack([length]),
            flags=bytes([SAMPLE]),
            tokens=pack([0] * length),
            block_rows=pack([0] * blocks),
            block_at=pack(range(blocks)),
            block_ids=pack(range(blocks)),
            admits=(Admit(0, length, params),),
        )
        result = self.step(prompt)
        if length < cache.max_model_len:
            self.step(
                StepPlan(
                    step=0,
                    epoch=0,
                    slots=pack([0]),
                    starts=pack([length]),
                    lengths=pack([1]),
                    flags=bytes([SAMPLE]),
                    tokens=pack([0]),
                )
            )
        return tuple(
            f"warm-up: {reason}: the weights may be damaged" for reason in result.bad_reasons
        )

    def _info(
        self, choices: Choices, loaded: LoadReport, cache: CachePlan, notes: tuple[str, ...]
    ) -> WorkerInfo:
        return WorkerInfo(
            num_blocks=cache.num_blocks,
            block_size=choices.need.block_size,
            max_model_len=cache.max_model_len,
            vocab_size=choices.spec.vocab_size,
            device=self._device.name,
            dtype=str(choices.dtype).removeprefix("torch."),
            weight_bytes=loaded.param_bytes,
            kv_bytes=cache.num_bytes,
            notes=notes,
            timings=tuple(self._timings),
        )


def _silent(_: str) -> None:
    """The report of a start that nobody watches."""
