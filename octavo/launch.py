"""`octavo serve`: builds every process of a server, wires them, watches them, ends them.

The only module, with the command line, that knows all rooms. Order of a start: options are checked,
the core's process is started (it takes longest), which imports while files are opened and the
tokenizer is made; then it is told what to load, routes are made and the port is opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from starlette.types import ASGIApp

from octavo.admission import Admission
from octavo.errors import ConfigError, OctavoError
from octavo.fields import options_of
from octavo.fleet import Fleet
from octavo.frontend import Frontend
from octavo.hub import ApiSettings
from octavo.obs.metrics import Metrics
from octavo.options import EngineArgs, ServerArgs
from octavo.replicas import Replicas, supervise
from octavo.resolve import is_in_core, notes
from octavo.server.app import create_app
from octavo.server.kept import KeepLimits
from octavo.server.keys import Key, keys_of, read_keys
from octavo.server.run import Listen, reserve
from octavo.server.run import serve as serve_http
from octavo.server.settings import HttpLimits, ServerSettings
from octavo.supervisor import CORE_PROGRAM, CoreProcess, Supervisor
from octavo.text.pool import long_texts
from octavo.text_engine import CoreSource, TextEngine, stalled_for
from octavo.types import WorkerInfo

QUEUED_PER_RUNNING = 8  # default bound of the queue, as a multiple of what can run

logger = logging.getLogger("octavo.launch")


@dataclass(frozen=True, slots=True)
class Launch:
    """What a start is told, and when it began."""

    engine: EngineArgs
    server: ServerArgs
    began: float
    program: tuple[str, ...] = CORE_PROGRAM
    keys: tuple[Key, ...] = ()


def serve(
    engine_args: EngineArgs, server_args: ServerArgs, *, program: tuple[str, ...] = CORE_PROGRAM
) -> int:
    """Serves until SIGTERM or Ctrl-C; 0 after a clean end, 1 if it could not start or go on.

    `program` is the command line of the core's process; benchmarks have one of their own.
    """
    began = time.monotonic()
    try:
        server_args.check()
        launch = Launch(engine_args, server_args, began, program, keys_in(server_args))
        several = server_args.api_server_count > 1
        if several and "seed" in engine_args.sources:
            raise ConfigError(
                f"{engine_args.label('seed')}: with {server_args.label('api_server_count')} the "
                "kernel chooses the process that answers, so the seeds of requests without one "
                "would not repeat; use one process, or leave it out and send seeds.",
                "seed",
            )
        engine_args.check()
        if several and engine_args.data_parallel_size > 1:
            raise ConfigError(
                f"{engine_args.label('data_parallel_size')}: several engines have one API process; "
                "leave --api-server-count out.",
                "data_parallel_size",
            )
        core = CoreProcess(program, prepares=is_in_core(engine_args))
        try:
            frontend = Frontend.open(engine_args, chat_template=server_args.chat_template)
        except BaseException:
            core.discard()
            raise
        return asyncio.run((_serve_several if several else _serve)(launch, frontend, core))
    except OctavoError as error:
        print(f"octavo: {error.message}", file=sys.stderr)
        return 1


async def _serve(launch: Launch, frontend: Frontend, core: CoreProcess) -> int:
    stop, hurry = _signals()
    metrics = metrics_of(launch, frontend)
    supervisor = supervise(
        frontend, metrics, launch.engine.data_parallel_size, program=launch.program, process=core
    )
    await supervisor.start()
    try:
        engine = text_engine_of(launch, frontend, supervisor, metrics)
        app = create_app(engine, settings_of(launch))
        closing = asyncio.Event()
        http = asyncio.create_task(listen(app, launch.server, closing))
        ready = asyncio.create_task(_announce(launch, supervisor, metrics))
        watches = [
            asyncio.create_task(watch_stalls(one, launch.server.stall_limit))
            for one in supervisor.supervisors
        ]
        try:
            async with long_texts(frontend.tokenizer):
                return await _until_end(launch, engine, supervisor, http, stop=stop, hurry=hurry)
        finally:
            closing.set()
            for task in (ready, *watches):
                task.cancel()
            with contextlib.suppress(OctavoError):
                await http
    finally:
        await supervisor.stop()


async def _serve_several(launch: Launch, frontend: Frontend, core: CoreProcess) -> int:
    """As `_serve`, with HTTP in processes of their own that share the port; see `fleet.py`."""
    stop, hurry = _signals()
    metrics = metrics_of(launch, frontend)
    with contextlib.closing(reserve(_address_of(launch.server))) as held:
        fleet = Fleet(launch.server.api_server_count, metrics)
        supervisor = Supervisor(
            frontend.worker,
            frontend.scheduler,
            on_stats=metrics.step,
            on_death=metrics.core_died,
            program=launch.program,
            others=fleet,
            process=core,
        )
        fleet.supervisor = supervisor
        watches: list[asyncio.Task[None]] = []
        try:
            fleet.open()
            await supervisor.start()
            watches.append(asyncio.create_task(_announce(launch, supervisor, metrics)))
            watches.append(asyncio.create_task(watch_stalls(supervisor, launch.server.stall_limit)))
            await fleet.start(_process_settings(launch, fleet, held.getsockname()[1]))
            return await _until_fleet_ends(launch, fleet, supervisor, stop=stop, hurry=hurry)
        finally:
            for watch in watches:
                watch.cancel()
            await fleet.stop()
            await supervisor.stop()


async def _until_fleet_ends(
    launch: Launch,
    fleet: Fleet,
    supervisor: Supervisor,
    *,
    stop: asyncio.Event,
    hurry: asyncio.Event,
) -> int:
    stopping = asyncio.create_task(stop.wait())
    listening = asyncio.create_task(fleet.listening())
    ends: set[asyncio.Future[Any]] = {stopping, supervisor.failure, fleet.failure}
    await asyncio.wait({*ends, listening}, return_when=asyncio.FIRST_COMPLETED)
    if listening.done():
        logger.info("event=listening address=%s", listening.result())
    listening.cancel()
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    for failure in (supervisor.failure, fleet.failure):
        if failure.done():
            await asyncio.sleep(0.5)  # open streams get their error event first
            raise failure.result()
    logger.info("event=draining processes=%d", fleet.count)
    cut = await fleet.drain(launch.server.shutdown_timeout, hurry)
    logger.info("event=drained cut=%d", cut)
    return 0


async def _until_end(
    launch: Launch,
    engine: TextEngine,
    supervisor: Supervisor | Replicas,
    http: asyncio.Task[None],
    *,
    stop: asyncio.Event,
    hurry: asyncio.Event,
) -> int:
    """Waits for a signal or a failure, whichever comes first; drains after a signal."""
    stopping = asyncio.create_task(stop.wait())
    first: set[asyncio.Future[Any]] = {stopping, http, supervisor.failure}
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if http.done():
        await http  # raises what kept the port from opening
    if supervisor.failure.done():
        await asyncio.sleep(0.5)  # open streams get their error event first
        raise supervisor.failure.result()
    logger.info("event=draining open=%d", engine.num_open)
    cut = await engine.drain(launch.server.shutdown_timeout, hurry)
    logger.info("event=drained cut=%d", cut)
    await asyncio.sleep(0.1)  # last events leave before the sockets close
    return 0


async def watch_stalls(supervisor: Supervisor, limit: float) -> None:
    """Logs the stacks of a core that has not moved for `limit` seconds, once for each stall."""
    told = False
    while True:
        await asyncio.sleep(min(1.0, limit / 4))
        pulse = supervisor.client.pulse
        seconds = stalled_for(pulse, time.monotonic())
        stalled = seconds > limit and pulse.phase in ("idle", "running")
        if stalled and not told:
            logger.error(
                "event=stalled seconds=%.1f phase=%s pending=%d; the stacks of the core follow",
                seconds,
                pulse.phase,
                pulse.pending,
            )
            supervisor.dump_stacks()
        elif told and not stalled:
            logger.info("event=moving_again")
        told = stalled


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Set by the first and by the second SIGTERM or Ctrl-C: end politely, end now."""
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return stop, hurry


async def _announce(launch: Launch, supervisor: Supervisor | Replicas, metrics: Metrics) -> None:
    """Says what was chosen and what the start took, once the model is there."""
    try:
        info = await supervisor.ready()
    except OctavoError:
        return  # the failure is dealt with where it is awaited
    gc.freeze()  # what a start leaves stays: looking through it would hold up streams
    metrics.set_cache_config(_cache_config(info, launch.engine))
    if len(launch.keys) > 1 and launch.engine.scheduling_policy != "fair":
        logger.info(
            "event=choice requests of %d keys are served by %s; --scheduling-policy fair shares "
            "the engine between them",
            len(launch.keys),
            launch.engine.scheduling_policy,
        )
    for note in notes(launch.engine, info):
        logger.info("event=choice %s", note)
    for phase, seconds in info.timings:
        logger.info("event=started phase=%s seconds=%.2f", phase, seconds)
    logger.info(
        "event=ready model=%s device=%s dtype=%s kv_blocks=%d block_size=%d max_model_len=%d "
        "seconds=%.2f",
        launch.engine.model,
        info.device,
        info.dtype,
        info.num_blocks,
        info.block_size,
        info.max_model_len,
        time.monotonic() - launch.began,
    )


async def listen(
    app: ASGIApp,
    args: ServerArgs,
    stop: asyncio.Event,
    *,
    port: int | None = None,
    on_started: Callable[[str], None] | None = None,
) -> None:
    """Serves HTTP until `stop`; a `port` is one that other processes of this server have too."""
    where = _address_of(args)
    await serve_http(
        app,
        listen=where if port is None else replace(where, port=port, shared=True),
        stop=stop,
        limits=HttpLimits(keep_alive=args.timeout_keep_alive),
        on_started=on_started
        or (lambda address: logger.info("event=listening address=%s", address)),
        log_level=args.uvicorn_log_level,
    )


def _address_of(args: ServerArgs) -> Listen:
    return Listen(
        host=args.host,
        port=args.port,
        uds=args.uds,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        root_path=args.root_path,
    )


def _process_settings(launch: Launch, fleet: Fleet, port: int) -> list[bytes]:
    """What each API process gets on its standard input."""
    engine, server = launch.engine, launch.server
    return [
        msgspec.json.encode(
            ApiSettings(
                index=number + 1,
                count=fleet.count,
                hub=fleet.hub,
                port=port,
                engine={name: engine.__dict__[name] for name in options_of(type(engine))},
                engine_sources=engine.sources,
                server={name: server.__dict__[name] for name in options_of(type(server))},
                server_sources=server.sources,
            )
        )
        for number in range(fleet.count)
    ]


def keys_in(args: ServerArgs) -> tuple[Key, ...]:
    """The keys of the file, if there is one. Raises ConfigError."""
    return () if args.api_keys_file is None else read_keys(args.api_keys_file)


def _weights(launch: Launch) -> dict[str, float]:
    """Shares of the queue by name of a key, where it is shared fairly.

    Keys that are for other things than asking, such as reading metrics, have none.
    """
    if launch.engine.scheduling_policy != "fair":
        return {}
    keys = (*keys_of(launch.server.api_key), *launch.keys)
    return {key.name: key.weight for key in keys if "inference" in key.scopes}


def settings_of(launch: Launch) -> ServerSettings:
    """What the routes need of the options."""
    args = launch.server
    return ServerSettings(
        api_keys=tuple(args.api_key),
        keys=launch.keys,
        request_timeout=args.request_timeout,
        stall_limit=args.stall_limit,
        timelines=launch.engine.timeline_requests,
        log_requests=launch.engine.enable_log_requests,
        allowed_origins=tuple(args.allowed_origins),
        allowed_methods=tuple(args.allowed_methods),
        allowed_headers=tuple(args.allowed_headers),
        allow_credentials=args.allow_credentials,
        strict_fields=args.strict_fields,
        trust_request_chat_template=args.trust_request_chat_template,
        default_chat_template_kwargs=tuple(args.default_chat_template_kwargs.items()),
        force_include_usage=args.enable_force_include_usage,
        response_role=args.response_role,
        enable_auto_tool_choice=args.enable_auto_tool_choice,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        max_body_bytes=args.max_body_bytes,
        keep_alive_interval=args.sse_keep_alive_interval,
        keep=KeepLimits(
            args.max_resume_seconds,
            -(-args.max_held_streams // args.api_server_count),
            -(-args.max_held_bytes // args.api_server_count),
        ),
    )


def _cache_config(info: WorkerInfo, args: EngineArgs) -> dict[str, str]:
    return {
        "block_size": str(info.block_size),
        "num_gpu_blocks": str(info.num_blocks),
        "cache_dtype": args.kv_cache_dtype,
        "enable_prefix_caching": str(args.enable_prefix_caching),
        "gpu_memory_utilization": str(args.gpu_memory_utilization),
        "kv_cache_memory_bytes": str(info.kv_bytes),
    }


def _names(launch: Launch) -> tuple[str, ...]:
    return tuple(launch.server.served_model_name) or (launch.engine.model,)


def metrics_of(launch: Launch, frontend: Frontend) -> Metrics:
    """The metrics of this process."""
    longest = frontend.worker.max_model_len or 0
    if longest < 1:
        longest = frontend.longest or 2048
    return Metrics(
        _names(launch)[0],
        max_model_len=longest,
        aliases=frozenset(launch.server.metric_aliases),
    )


def text_engine_of(
    launch: Launch, frontend: Frontend, source: CoreSource, metrics: Metrics, *, process: int = 0
) -> TextEngine:
    """The engine that the routes speak to. `process` is 0, or the number of this API process.

    Several API processes have an equal share of the queue each.
    """
    args = launch.engine
    share = max(1, launch.server.api_server_count) if process else 1
    running = -(-frontend.scheduler.max_num_seqs * args.data_parallel_size // share)
    queued, queued_tokens = args.max_num_queued_reqs, args.max_num_queued_tokens
    seeded = "seed" in args.sources
    return TextEngine(
        source,
        tokenizer=frontend.tokenizer,
        chat_template=frontend.chat_template,
        model_names=_names(launch),
        max_logprobs=args.max_logprobs,
        admission=Admission(
            running,
            QUEUED_PER_RUNNING * running if queued is None else -(-queued // share),
            None if queued_tokens is None else -(-queued_tokens // share),
            _weights(launch),
        ),
        metrics=metrics,
        generation_defaults=frontend.sampling_defaults,
        settings=[
            (name, str(value), source)
            for record in (args, launch.server)
            for name, value, source in record.effective()
        ],
        seed=args.seed if seeded else None,
        first_number=process << 48,
    )
