"""Several engine cores behind one API process (`--data-parallel-size`), each with its own workers.

Each core has a supervisor of its own, so that one which dies costs its own streams, and the others
serve on. A request goes to the core that has the fewest tokens before it, where what its cache
holds of the prompt counts as done. Not for: several API processes (`fleet.py`).
Next file: `supervisor.py`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b

from octavo.config import WorkerConfig
from octavo.engine.client import EngineClient, Listener, Pulse
from octavo.errors import EngineDead, OctavoError, ServerError
from octavo.frontend import Frontend
from octavo.obs.metrics import Metrics
from octavo.supervisor import CORE_PROGRAM, CoreProcess, Supervisor
from octavo.types import AddRequest, SequenceOutput, StepStats, WorkerInfo

STEP = 64  # tokens between the lengths of prompts that are remembered
REMEMBERED = 65_536  # beginnings of prompts, of all cores
TYPICAL = 512  # most tokens that an answer counts for before it has ended: most end before


class Prefixes:
    """Which core has lately been given a prompt that begins so. The oldest are forgotten."""

    def __init__(self, limit: int = REMEMBERED) -> None:
        self._limit = limit
        self._cores: OrderedDict[bytes, int] = OrderedDict()

    def known(self, digests: Sequence[bytes]) -> dict[int, int]:
        """Tokens of a prompt that each core has been given before, by the prompt's `digests`."""
        found: dict[int, int] = {}
        for number, digest in enumerate(digests, 1):
            core = self._cores.get(digest)
            if core is None:
                break
            found[core] = number * STEP
        return found

    def note(self, digests: Sequence[bytes], core: int) -> None:
        """The prompt goes to this core."""
        for digest in digests:
            self._cores[digest] = core
            self._cores.move_to_end(digest)
        while len(self._cores) > self._limit:
            self._cores.popitem(last=False)

    def forget(self, core: int) -> None:
        """The core is gone, and its cache with it."""
        for digest in [digest for digest, owner in self._cores.items() if owner == core]:
            del self._cores[digest]


def digests_of(prompt: Sequence[int], salt: str) -> list[bytes]:
    """A digest for each beginning of a prompt of 64, 128, ... tokens; chained."""
    chain, found = salt.encode(), []
    for start in range(0, len(prompt) - STEP + 1, STEP):
        part = b"".join(token.to_bytes(4, "little") for token in prompt[start : start + STEP])
        chain = blake2b(chain + part, digest_size=12).digest()
        found.append(chain)
    return found


def cheapest(outstanding: dict[int, int], known: dict[int, int]) -> int:
    """The core with the least to do until a prompt is computed there that it `known` so much of."""
    todo = {core: tokens - known.get(core, 0) for core, tokens in outstanding.items()}
    return min(todo, key=lambda core: (todo[core], core))


@dataclass(slots=True)
class Replica:
    """One core, and the tokens that it has yet to compute of what it was given."""

    supervisor: Supervisor
    outstanding: int = 0


class Tracked:
    """The listener of one request: counts what its core has yet to do."""

    __slots__ = ("_left", "_listener", "_open", "_replica", "client")

    def __init__(
        self,
        listener: Listener,
        replica: Replica,
        requests: Sequence[AddRequest],
        open_: dict[str, Tracked],
        *,
        known: int,
    ) -> None:
        """`open_` has the listener of each sequence that has not ended, `known` is of the prompt.

        Choices of one request share the prompt.
        """
        self.client = replica.supervisor.client
        self._listener = listener
        self._replica = replica
        self._open = open_
        prompts = [len(requests[0].prompt_ids) - known, *(0 for _ in requests[1:])]
        self._left = {
            one.id: (prompt, expected_tokens(one))
            for one, prompt in zip(requests, prompts, strict=True)
        }
        replica.outstanding += sum(map(sum, self._left.values()))
        open_.update(dict.fromkeys(self._left, self))

    def push(self, output: SequenceOutput) -> None:
        """See `Listener`."""
        if output.reason is not None:
            self.drop(output.id)
        elif output.new_ids and output.id in self._left:
            prompt, answer = self._left[output.id]
            left = max(0, answer - len(output.new_ids))
            self._left[output.id] = (0, left)
            self._replica.outstanding -= prompt + answer - left
        self._listener.push(output)

    def fail(self, error: Exception) -> None:
        """See `Listener`."""
        for sequence in tuple(self._left):
            self.drop(sequence)
        self._listener.fail(error)

    def drop(self, sequence: str) -> None:
        """No more news of it will come."""
        self._replica.outstanding -= sum(self._left.pop(sequence, (0, 0)))
        self._open.pop(sequence, None)


def expected_tokens(request: AddRequest) -> int:
    """Of the answer; the most that may come is much more than most that do."""
    return min(request.params.max_tokens, TYPICAL)


@dataclass(slots=True)
class AnyReady:
    """An event that is set while any core takes requests."""

    replicas: list[Replica] = field(default_factory=list)

    def is_set(self) -> bool:
        """True if one does."""
        return any(serves(replica.supervisor) for replica in self.replicas)


def serves(supervisor: Supervisor) -> bool:
    """True while its core takes requests."""
    client = supervisor.client
    return client.dead is None and client.ready.is_set()


class ReplicaClient:
    """All cores as one, for `TextEngine`: as `EngineClient`."""

    def __init__(self, replicas: list[Replica]) -> None:
        self._replicas = replicas
        self._prefixes = Prefixes()
        self._open: dict[str, Tracked] = {}
        self._clients: dict[int, EngineClient] = {}  # whose prompts are remembered
        self.ready = AnyReady(replicas)

    @property
    def info(self) -> WorkerInfo | None:
        """Of the first core that is loaded; all have the same settings."""
        infos = (replica.supervisor.client.info for replica in self._replicas)
        return next((info for info in infos if info is not None), None)

    @property
    def dead(self) -> EngineDead | None:
        """Set while no core lives."""
        clients = [replica.supervisor.client for replica in self._replicas]
        return None if any(client.dead is None for client in clients) else clients[0].dead

    @property
    def pulse(self) -> Pulse:
        """Of the core that moved last, among those that serve."""
        serving = [one.supervisor for one in self._replicas if serves(one.supervisor)]
        pulses = [one.client.pulse for one in serving or [self._replicas[0].supervisor]]
        running = [pulse for pulse in pulses if pulse.phase == "running"]
        return max(running or pulses, key=lambda pulse: (pulse.last_step, pulse.heard_at))

    @property
    def stats(self) -> StepStats:
        """Of the first core."""
        return self._replicas[0].supervisor.client.stats

    @property
    def num_open(self) -> int:
        """Sequences that have been submitted and not ended."""
        return len(self._open)

    def submit(self, requests: Sequence[AddRequest], listener: Listener) -> None:
        """Sends the sequences of one request to one core. Raises EngineDead if none lives."""
        replica, known = self._choose(requests[0])
        tracked = Tracked(listener, replica, requests, self._open, known=known)
        try:
            tracked.client.submit(requests, tracked)
        except BaseException:
            for request in requests:
                tracked.drop(request.id)
            raise

    def _choose(self, request: AddRequest) -> tuple[Replica, int]:
        """The core for a request, and the tokens of its prompt that are known there."""
        lives = {index: one.supervisor.client for index, one in enumerate(self._replicas)}
        for index, client in lives.items():
            if self._clients.get(index) is not client:  # a new core's cache is empty
                self._clients[index] = client
                self._prefixes.forget(index)
        candidates = [i for i, one in enumerate(self._replicas) if serves(one.supervisor)]
        if not candidates:  # none is loaded yet: the request will be found in the socket
            candidates = [index for index, client in lives.items() if client.dead is None]
        if not candidates:
            raise self.dead or EngineDead("no engine lives")
        digests = digests_of(request.prompt_ids, request.cache_salt)
        known = self._prefixes.known(digests)
        index = cheapest({i: self._replicas[i].outstanding for i in candidates}, known)
        self._prefixes.note(digests, index)
        return self._replicas[index], known.get(index, 0)

    def abort(self, ids: Sequence[str]) -> None:
        """Ends sequences that are still open, wherever they are; no further news comes."""
        by_client: dict[EngineClient, list[str]] = {}
        for name in ids:
            tracked = self._open.get(name)
            if tracked is not None:
                by_client.setdefault(tracked.client, []).append(name)
                tracked.drop(name)
        for client, names in by_client.items():
            client.abort(names)

    async def control(self, op: str, **args: str) -> dict[str, str]:
        """Runs the operation on every core that serves.

        The first one's result, and with "N/" before the names the result of core N.
        """
        found: dict[str, str] = {}
        for index, replica in enumerate(self._replicas):
            if serves(replica.supervisor):
                result = await replica.supervisor.client.control(op, **args)
                found = {**result, **found}
                found |= {f"{index}/{name}": value for name, value in result.items()}
        if not found and self.dead is not None:
            raise self.dead
        return found

    def cut(self, error: ServerError) -> None:
        """Ends every open stream with `error`; the cores live on."""
        for replica in self._replicas:
            replica.supervisor.client.cut(error)


class Replicas:
    """As many supervisors as there are cores; as one `Supervisor`."""

    def __init__(self, supervisors: Sequence[Supervisor]) -> None:
        self._replicas = [Replica(supervisor) for supervisor in supervisors]
        self.client = ReplicaClient(self._replicas)
        self.failure: asyncio.Future[OctavoError] = asyncio.get_running_loop().create_future()
        self._watch: asyncio.Task[None] | None = None

    @property
    def supervisors(self) -> list[Supervisor]:
        """Of each core, in order."""
        return [replica.supervisor for replica in self._replicas]

    @property
    def restarting(self) -> bool:
        """True while no core takes requests and one is being started anew."""
        return not self.client.ready.is_set() and any(
            supervisor.restarting for supervisor in self.supervisors
        )

    async def start(self) -> None:
        """Starts all cores and returns at once."""
        for supervisor in self.supervisors:
            await supervisor.start()
        self._watch = asyncio.get_running_loop().create_task(self._until_failure())

    async def ready(self) -> WorkerInfo:
        """Waits until all cores take requests; raises what kept one from starting."""
        infos = [await supervisor.ready() for supervisor in self.supervisors]
        return infos[0]

    async def stop(self) -> None:
        """Ends all cores."""
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.gather(*(supervisor.stop() for supervisor in self.supervisors))
        self._give_up(EngineDead("the engine has been stopped"))

    def kill(self) -> None:
        """Ends all cores at once, without waiting."""
        for supervisor in self.supervisors:
            supervisor.kill()

    async def _until_failure(self) -> None:
        """One that fails before any has served ends the start; later it takes all of them."""
        waiting = {supervisor.failure for supervisor in self.supervisors}
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not waiting or not self.client.ready.is_set():
                self._give_up(done.pop().result())
                return

    def _give_up(self, error: OctavoError) -> None:
        if not self.failure.done():
            self.failure.set_result(error)


def supervise(
    frontend: Frontend,
    metrics: Metrics,
    count: int,
    *,
    program: Sequence[str] = CORE_PROGRAM,
    process: CoreProcess | None = None,
) -> Supervisor | Replicas:
    """Who keeps the core running, or each of `count` cores; `process` is the first one's."""
    if count == 1:
        return Supervisor(
            frontend.worker,
            frontend.scheduler,
            on_stats=metrics.step,
            on_death=metrics.core_died,
            program=program,
            process=process,
        )
    return Replicas(
        [
            Supervisor(
                worker_of(frontend.worker, index),
                frontend.scheduler,
                on_stats=partial(metrics.step, engine=str(index)),
                on_death=partial(metrics.core_died, engine=str(index)),
                program=program,
                process=process if index == 0 else None,
            )
            for index in range(count)
        ]
    )


def worker_of(worker: WorkerConfig, index: int) -> WorkerConfig:
    """The settings of replica `index`: GPUs of this machine are dealt out in order.

    In a Ray cluster each worker is given one, and the main memory and the cores of this machine
    are divided by the worker itself (`ParallelConfig.replicas`).
    """
    if worker.device != "cuda" or worker.parallel.backend == "ray":
        return worker
    return replace(worker, device=f"cuda:{index * worker.parallel.size}")
