"""`octavo serve`: builds every process of a server, wires them, watches them, ends them.

The only module, with the command line, that knows all rooms. Order of a start: options and files
are checked, the core's process is started (it takes longest), then tokenizer and routes are made
and the port is opened while the model still loads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp

from octavo.errors import OctavoError
from octavo.frontend import Frontend
from octavo.obs.metrics import Metrics
from octavo.options import EngineArgs, ServerArgs
from octavo.resolve import notes
from octavo.server.app import create_app
from octavo.server.keys import Key, keys_of, read_keys
from octavo.server.run import Listen
from octavo.server.run import serve as serve_http
from octavo.server.settings import HttpLimits, ServerSettings
from octavo.supervisor import CORE_PROGRAM, Supervisor
from octavo.text.pool import EncoderPool
from octavo.text_engine import Admission, TextEngine
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
        launch = Launch(engine_args, server_args, began, program, _keys(server_args))
        frontend = Frontend.open(engine_args, chat_template=server_args.chat_template)
        return asyncio.run(_serve(launch, frontend))
    except OctavoError as error:
        print(f"octavo: {error.message}", file=sys.stderr)
        return 1


async def _serve(launch: Launch, frontend: Frontend) -> int:
    stop, hurry = _signals()
    metrics = _metrics(launch, frontend)
    supervisor = Supervisor(
        frontend.worker,
        frontend.scheduler,
        on_stats=metrics.step,
        on_death=metrics.core_died,
        program=launch.program,
    )
    await supervisor.start()
    try:
        engine = _text_engine(launch, frontend, supervisor, metrics)
        app = create_app(engine, _settings(launch))
        closing = asyncio.Event()
        http = asyncio.create_task(_listen(app, launch.server, closing))
        ready = asyncio.create_task(_announce(launch, supervisor, metrics))
        watch = asyncio.create_task(watch_stalls(engine, supervisor, launch.server.stall_limit))
        pool = EncoderPool(frontend.tokenizer)
        frontend.tokenizer.send_long_texts(pool.encode)
        preparing = asyncio.create_task(asyncio.to_thread(pool.prepare))
        try:
            return await _until_end(launch, engine, supervisor, http, stop=stop, hurry=hurry)
        finally:
            closing.set()
            ready.cancel()
            watch.cancel()
            await preparing
            await pool.close()
            with contextlib.suppress(OctavoError):
                await http
    finally:
        await supervisor.stop()


async def _until_end(
    launch: Launch,
    engine: TextEngine,
    supervisor: Supervisor,
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


async def watch_stalls(engine: TextEngine, supervisor: Supervisor, limit: float) -> None:
    """Logs the stacks of a core that has not moved for `limit` seconds, once for each stall."""
    told = False
    while True:
        await asyncio.sleep(min(1.0, limit / 4))
        health = engine.health
        stalled = health.stalled_for > limit and health.phase != "loading"
        if stalled and not told:
            logger.error(
                "event=stalled seconds=%.1f phase=%s open=%d; the stacks of the core follow",
                health.stalled_for,
                health.phase,
                engine.num_open,
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


async def _announce(launch: Launch, supervisor: Supervisor, metrics: Metrics) -> None:
    """Says what was chosen and what the start took, once the model is there."""
    try:
        info = await supervisor.ready()
    except OctavoError:
        return  # the failure is dealt with where it is awaited
    metrics.set_cache_config(_cache_config(info, launch.engine))
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


async def _listen(app: ASGIApp, args: ServerArgs, stop: asyncio.Event) -> None:
    await serve_http(
        app,
        listen=Listen(
            host=args.host,
            port=args.port,
            uds=args.uds,
            ssl_keyfile=args.ssl_keyfile,
            ssl_certfile=args.ssl_certfile,
            root_path=args.root_path,
        ),
        stop=stop,
        limits=HttpLimits(keep_alive=args.timeout_keep_alive),
        on_started=lambda address: logger.info("event=listening address=%s", address),
        log_level=args.uvicorn_log_level,
    )


def _keys(args: ServerArgs) -> tuple[Key, ...]:
    """The keys of the file, if there is one. Raises ConfigError."""
    return () if args.api_keys_file is None else read_keys(args.api_keys_file)


def _weights(launch: Launch) -> dict[str, float]:
    """Shares of the queue by name of a key, where it is shared fairly."""
    if launch.engine.scheduling_policy != "fair":
        return {}
    return {key.name: key.weight for key in (*keys_of(launch.server.api_key), *launch.keys)}


def _settings(launch: Launch) -> ServerSettings:
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


def _metrics(launch: Launch, frontend: Frontend) -> Metrics:
    longest = frontend.worker.max_model_len or 0
    if longest < 1:
        longest = frontend.longest or 2048
    return Metrics(
        _names(launch)[0],
        max_model_len=longest,
        aliases=frozenset(launch.server.metric_aliases),
    )


def _text_engine(
    launch: Launch, frontend: Frontend, supervisor: Supervisor, metrics: Metrics
) -> TextEngine:
    args = launch.engine
    running = frontend.scheduler.max_num_seqs
    seeded = "seed" in args.sources
    return TextEngine(
        supervisor,
        tokenizer=frontend.tokenizer,
        chat_template=frontend.chat_template,
        model_names=_names(launch),
        max_logprobs=args.max_logprobs,
        admission=Admission(
            running,
            QUEUED_PER_RUNNING * running
            if args.max_num_queued_reqs is None
            else args.max_num_queued_reqs,
            args.max_num_queued_tokens,
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
    )
