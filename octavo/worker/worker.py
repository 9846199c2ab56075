"""Worker: one device's model, cache and slots. Loads once, then runs plans in order.

Not for: deciding what runs (`engine/`) or in which process (`executor/`). Next file: `runner.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter

from octavo.config import Place, WorkerConfig
from octavo.device.base import Device
from octavo.errors import ConfigError
from octavo.grammar.matcher import Grammars
from octavo.layers.rope import length_note
from octavo.parallel.world import World, join
from octavo.types import (
    PREPARE,
    SAMPLE,
    Admit,
    StepPlan,
    StepResult,
    TokenParams,
    WorkerInfo,
    pack,
)
from octavo.weights.loader import LoadReport
from octavo.worker.assemble import (
    Choices,
    build,
    check_room,
    choose,
    fill,
    finish,
    open_device,
    open_model,
    scale_cache,
    scheme_of,
    shortened,
)
from octavo.worker.forecast import against, cache_request, expect
from octavo.worker.memory import CachePlan, CacheRequest, Room, plan_cache
from octavo.worker.parts import Parts, make_parts
from octavo.worker.runner import Model, Runner, StepHandle

Report = Callable[[str], None]
WARM_UP_TOKENS = 4
LONG_PROMPT = 2048  # tokens, from which kernels for long prompts serve, if there are any


class Worker:
    """Serves plans on one device. `load` comes first and once; `step` and `control` follow.

    With a `place` it is one of several ranks, all of which must get the same plans in one order.
    """

    def __init__(
        self, config: WorkerConfig, device: Device | None = None, place: Place | None = None
    ) -> None:
        self._config = config
        self._place = place or Place()
        self._device: Device = open_device(config, place) if device is None else device
        self.world = World()
        self._runner: Runner | None = None
        self._grammars: Grammars | None = None
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
        if self._place.size > 1:
            with self._phase("join"):
                self.world = join(self._place, device.name)
        mesh = self.world.mesh
        with self._phase("kernels"):
            scheme = scheme_of(config, checkpoint)
            choices = choose(config, spec, device, scheme, mesh)
            # What cannot fit now will not fit after loading: say so before that takes its time.
            plan_cache(self._cache_request(choices, free_at_start))
        if config.vocabulary is not None and mesh.samples:
            size, threads = choices.spec.vocab_size, min(8, device.threads)
            self._grammars = Grammars(config.vocabulary, size, threads)
        with self._phase("build"):
            decoder = build(config, choices, device.name, checkpoint, mesh)
            check_room(decoder, device.free_memory())
            expected = expect(config, choices, decoder, self._room(free_at_start))
            rope_note = length_note(decoder.spec.rope, decoder.spec.max_model_len)
        with self._phase("load"):
            loaded = fill(decoder, checkpoint, config, device, self._bytes)
            cache_note = scale_cache(decoder, checkpoint, choices)
        with self._phase("fuse"):
            model, fuse_note = finish(decoder, choices.ops)
        if choices.ops.name != "native":
            device.compute_in_torch()
        peak = 0
        if device.own_memory:
            with self._phase("profile"):
                peak = self._peak_of_a_step(shortened(decoder), choices)
                device.trim()
        with self._phase("cache"):
            cache = self._agree(self._cache_request(choices, free_at_start, peak))
            parts = self._make_parts(model, choices, cache.num_blocks, cache.max_model_len)
            self._runner = parts.runner
        with self._phase("warm-up"):
            warm_up_notes = self._warm_up(cache, choices.need.block_size)
        notes = [
            *device.notes,
            *choices.notes,
            *filter(None, (cache_note, rope_note)),
            fuse_note,
            *cache.notes,
            against(expected, loaded.param_bytes, peak, cache),
            *warm_up_notes,
        ]
        if device.asynchronous:
            with self._phase("graphs"):
                notes.append(parts.capture())
        return self._info(choices, loaded, cache, tuple(notes))

    def submit(self, plan: StepPlan) -> StepHandle:
        """Starts one plan; see `Runner.submit`."""
        assert self._runner is not None, "load comes first"
        return self._runner.submit(plan)

    def prepare(self, plan: StepPlan) -> None:
        """Lays out a plan that is likely to be submitted; see `Runner.prepare`."""
        if self._runner is not None:
            self._runner.prepare(plan)

    def step(self, plan: StepPlan) -> StepResult:
        """Runs one plan to its end."""
        return self.submit(plan).result()

    @property
    def asynchronous(self) -> bool:
        """True if the device works while the host goes on."""
        return self._device.asynchronous

    def usable(self) -> bool:
        """False once the device answers nothing but errors."""
        try:
            self._device.synchronize()
        except RuntimeError:  # what a failed kernel leaves behind, for good
            return False
        return True

    def trim(self) -> None:
        """After a failed step: gives back the memory that it no longer needs."""
        self._device.trim()

    def control(self, op: str, **args: str) -> dict[str, str]:
        """`memory` gives the device's free and total bytes.

        `grammar` begins to compile a `text`, and says if it is `ready` after at most `seconds`.
        Raises ConfigError for other names.
        """
        if op == PREPARE:
            grammars, seconds = self._grammars, float(args["seconds"])
            done = grammars is None or grammars.prepare(args["text"], seconds)
            return {"ready": "true" if done else "false"}
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

    def _cache_request(self, choices: Choices, free_at_start: int, peak: int = 0) -> CacheRequest:
        return cache_request(
            self._config,
            choices,
            self._room(free_at_start),
            num_layers=self._num_layers(choices),
            peak=peak,
        )

    def _room(self, free_at_start: int) -> Room:
        device = self._device
        return Room(device.total_memory(), free_at_start, device.free_memory(), device.own_memory)

    def _num_layers(self, choices: Choices) -> int:
        """Of this rank's stage."""
        return len(self.world.mesh.pp.stretch(choices.spec.num_layers))

    def _agree(self, request: CacheRequest) -> CachePlan:
        """The cache that every rank has room for: blocks are numbered alike on all of them."""
        cache = plan_cache(request)
        least = self.world.least(cache.num_blocks)
        if least == cache.num_blocks:
            return cache
        return plan_cache(replace(request, num_blocks=least, kv_cache_memory_bytes=None))

    def _make_parts(
        self, model: Model, choices: Choices, num_blocks: int, max_model_len: int
    ) -> Parts:
        return make_parts(
            model,
            choices,
            self._config,
            self._device,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            mesh=self.world.mesh,
            grammars=self._grammars,
        )

    def _peak_of_a_step(self, short: Model, choices: Choices) -> int:
        """Bytes that the largest step takes for a while: one prompt beside as many answers as can.

        It runs on a cache of one block, which all of its rows write to. `short` is the model with
        one layer of each kind.
        """
        config = self._config
        longest = choices.spec.max_model_len
        if config.max_model_len is not None and config.max_model_len > 0:
            longest = min(longest, config.max_model_len)
        rehearsed = self._make_parts(short, choices, 1, longest)
        rows, tokens = config.max_num_seqs, config.max_num_batched_tokens
        largest = _plan_of(largest_step(rows, tokens, longest))

        def rehearsal() -> None:
            for plan in rehearsals(rows, tokens, longest):
                rehearsed.runner.step(plan)
            rehearsed.rehearse()

        self._device.rehearse(rehearsal)
        # Layers run one after the other, so one of each kind takes at its highest what all do.
        return self._device.peak_of(lambda: _do(rehearsed.runner, largest))

    def _warm_up(self, cache: CachePlan, block_size: int) -> tuple[str, ...]:
        """A short prompt, then one more token: what is made on first use is made now.

        It writes into blocks that nobody owns yet; they are written anew before they are read.
        """
        length = min(WARM_UP_TOKENS, cache.max_model_len, self._config.max_num_batched_tokens)
        blocks = -(-min(length + 1, cache.max_model_len) // block_size)
        params = TokenParams(max_tokens=2, temperature=0.0)
        result = self.step(_prompt(length, params, range(blocks)))
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
        depth, lookahead = self._device.depth, self._device.lookahead
        if self.world.mesh.size > 1:
            # Plans carry every token: one rank draws, and the others need not hear of it.
            depth, lookahead = self.world.mesh.pp.size, 0
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
            depth=depth,
            lookahead=lookahead,
        )


def largest_step(max_rows: int, max_tokens: int, max_length: int) -> list[int]:
    """Lengths of the rows of a step of `max_tokens` tokens, decode rows first."""
    rows = min(max_rows, max_tokens)
    lengths = [1] * rows
    left = max_tokens - rows
    for row in reversed(range(rows)):
        more = min(left, max_length - 1)
        lengths[row] += more
        left -= more
    return lengths


def rehearsals(max_rows: int, max_tokens: int, max_length: int) -> list[StepPlan]:
    """Steps that together launch every kernel that steps without special wishes do, but decode.

    A short prompt, with and without filters of its logits; a long one; one with decode rows. All
    write to the first block.
    """
    short = min(WARM_UP_TOKENS, max_tokens, max_length)
    greedy = TokenParams(max_tokens=2, temperature=0.0)
    filtered = TokenParams(max_tokens=2, top_p=0.9, top_k=50)
    return [
        *(_prompt(short, params, [0]) for params in (greedy, filtered)),
        _plan_of(largest_step(1, min(max_tokens, LONG_PROMPT), max_length)),
        _plan_of(largest_step(max_rows, min(max_tokens, 2 * max_rows + 64), max_length)),
    ]


def _prompt(length: int, params: TokenParams, blocks: Sequence[int]) -> StepPlan:
    """A new sequence of tokens 0 in slot 0."""
    return StepPlan(
        step=0,
        epoch=0,
        slots=pack([0]),
        starts=pack([0]),
        lengths=pack([length]),
        flags=bytes([SAMPLE]),
        tokens=pack([0] * length),
        block_rows=pack([0] * len(blocks)),
        block_at=pack(range(len(blocks))),
        block_ids=pack(blocks),
        admits=(Admit(0, length, params),),
    )


def _plan_of(lengths: list[int]) -> StepPlan:
    """Prompts of tokens 0, all in the first block."""
    return StepPlan(
        step=0,
        epoch=0,
        slots=pack(range(len(lengths))),
        starts=pack([0] * len(lengths)),
        lengths=pack(lengths),
        flags=bytes([SAMPLE] * len(lengths)),
        tokens=pack([0] * sum(lengths)),
    )


def _do(runner: Runner, plan: StepPlan) -> None:
    runner.step(plan)


def _silent(_: str) -> None:
    """The report of a start that nobody watches."""
