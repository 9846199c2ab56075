"""The server as a Ray Serve application: `import_path: octavo.serve:build_app` of a RayService.

A replica is the same API process as `octavo serve`, with its core and workers; Serve brings it
requests and has as many replicas as the depth of the queues asks for. Its arguments are options of
engine and server, by name, and two more:

    autoscaling   Serve's `autoscaling_config`; the number of requests that a replica should have,
                  waiting ones included, is --max-num-seqs if it is left out
    deployment    other options of the Serve deployment, such as `num_replicas`

Workers of one replica are actors of the same cluster if there are several (`executor/ray.py`).
Not for: HTTP without Ray (`launch.py`). Next file: `launch.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.errors import ConfigError, EngineDead
from octavo.executor.ray import import_ray
from octavo.fields import options_of
from octavo.frontend import Frontend
from octavo.launch import Launch, keys_in, metrics_of, settings_of, text_engine_of, watch_stalls
from octavo.options import EngineArgs, ServerArgs
from octavo.replicas import Replicas, supervise
from octavo.resolve import device_name
from octavo.server.app import create_app
from octavo.supervisor import Supervisor
from octavo.text.pool import long_texts
from octavo.text_engine import TextEngine

OWN = ("autoscaling", "deployment")
QUEUE = 16  # requests that Serve may give to a replica, as a multiple of what can run
RUNNING = 128  # of them, where --max-num-seqs is left out


class Service:
    """An ASGI application that starts its engine when it is started, and drains when it ends."""

    def __init__(self, engine: EngineArgs, server: ServerArgs) -> None:
        self._launch = Launch(engine, server, time.monotonic(), keys=keys_in(server))
        self._source: Supervisor | Replicas | None = None
        self._engine: TextEngine | None = None
        self._app: ASGIApp | None = None
        self._held = contextlib.AsyncExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One exchange, or the application's life."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif self._app is None:
            raise EngineDead("the engine has not been started")
        else:
            await self._app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        answer: Message = {"type": "lifespan.startup.complete"}
        try:
            await self.start()
        except Exception as error:
            answer = {"type": "lifespan.startup.failed", "message": str(error)}
        await send(answer)
        if answer["type"].endswith("complete"):
            await receive()
            await self.stop()
            await send({"type": "lifespan.shutdown.complete"})

    async def start(self) -> None:
        """Loads the model. Raises ConfigError, CheckpointError or EngineDead."""
        launch = self._launch
        frontend = await asyncio.to_thread(
            Frontend.open, launch.engine, chat_template=launch.server.chat_template
        )
        metrics = metrics_of(launch, frontend)
        source = supervise(frontend, metrics, launch.engine.data_parallel_size)
        self._held.push_async_callback(source.stop)
        try:
            await source.start()
            await source.ready()
            self._engine = text_engine_of(launch, frontend, source, metrics)
            self._app = create_app(self._engine, settings_of(launch))
            await self._held.enter_async_context(long_texts(frontend.tokenizer))
            for one in source.supervisors:
                watch = asyncio.ensure_future(watch_stalls(one, launch.server.stall_limit))
                self._held.callback(watch.cancel)
        except BaseException:
            await self._held.aclose()
            raise
        self._source = source

    async def stop(self) -> None:
        """Lets what runs come to its end, then ends the engine."""
        if self._engine is not None:
            await self._engine.drain(self._launch.server.shutdown_timeout)
        await self._held.aclose()

    def check(self) -> None:
        """Raises EngineDead if the replica should be replaced: its engine is not coming back."""
        if self._source is not None and self._source.failure.done():
            raise EngineDead(self._source.failure.result().message)


def build_app(args: Mapping[str, Any]) -> Any:
    """The Serve application of these arguments; see above. Raises ConfigError."""
    import_ray()
    try:
        from ray import serve
    except ImportError:
        raise ConfigError(
            "octavo.serve: Ray Serve is not installed; install it with `pip install 'octavo[ray]'`."
        ) from None
    engine_values, server_values, own = split(args)
    engine, server = EngineArgs(**engine_values), ServerArgs(**server_values)
    engine.check()
    server.check()

    def make() -> Service:
        """In the replica."""
        return Service(on_this_cluster(EngineArgs(**engine_values)), ServerArgs(**server_values))

    @serve.ingress(make)
    class Octavo:
        """One replica."""

        def check_health(self) -> None:
            """Asked by Serve now and then."""
            service = self.app  # type: ignore[attr-defined]
            service.check()

    return serve.deployment(Octavo, name="octavo").options(**deployment_options(engine, own)).bind()


def split(args: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Options of the engine, options of the server, and our own. Raises ConfigError."""
    engine, server = set(options_of(EngineArgs)), set(options_of(ServerArgs))
    unknown = [name for name in args if name not in engine | server | set(OWN)]
    if unknown:
        raise ConfigError(
            f"octavo.serve: {unknown[0]} is not known; use options of `octavo serve` with "
            f"underscores, or {' or '.join(OWN)}."
        )
    return (
        {name: value for name, value in args.items() if name in engine},
        {name: value for name, value in args.items() if name in server and name not in engine},
        {name: args[name] for name in OWN if name in args},
    )


def deployment_options(engine: EngineArgs, own: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the Serve deployment: what a replica takes, holds, and how many there are."""
    running = engine.max_num_seqs or RUNNING
    size = engine.tensor_parallel_size * engine.pipeline_parallel_size
    actor: dict[str, Any] = {"num_cpus": 1}
    if size == 1 and engine.distributed_executor_backend in (None, "uni") and _has_gpu(engine):
        actor["num_gpus"] = engine.data_parallel_size
    options: dict[str, Any] = {
        "max_ongoing_requests": QUEUE * running,
        "graceful_shutdown_timeout_s": 60,
        "ray_actor_options": actor,
    }
    if "autoscaling" in own:
        options["autoscaling_config"] = {"target_ongoing_requests": running, **own["autoscaling"]}
    return {**options, **own.get("deployment", {})}


def on_this_cluster(engine: EngineArgs) -> EngineArgs:
    """With several workers a replica, these are actors of the cluster that it is part of."""
    size = engine.tensor_parallel_size * engine.pipeline_parallel_size
    if size > 1 and engine.distributed_executor_backend is None and engine.ray_address is None:
        engine.ray_address = str(import_ray().get_runtime_context().gcs_address)
    return engine


def _has_gpu(engine: EngineArgs) -> bool:
    if engine.device == "auto":
        ray = import_ray()
        if ray.is_initialized():
            return bool(ray.cluster_resources().get("GPU"))
    return device_name(engine).startswith("cuda")
