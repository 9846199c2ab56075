"""The program of one API process of a server that has several (`--api-server-count`).

It has its own tokenizer, routes and metrics, shares the port with its siblings, and speaks to the
core directly. What it must know of the core, and when it is to end, the server's own process
tells it (`fleet.py`). Started as `python -m octavo.api`, settings on standard input.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from octavo import log
from octavo.engine.client import EngineClient
from octavo.errors import EngineDead, OctavoError
from octavo.frontend import Frontend
from octavo.hub import (
    BEAT,
    ApiSettings,
    CoreDied,
    CoreStarted,
    Drain,
    Drained,
    Hello,
    Link,
    Listening,
)
from octavo.launch import Launch, keys_in, listen, metrics_of, settings_of, text_engine_of
from octavo.options import EngineArgs, ServerArgs
from octavo.server import resume, timeline
from octavo.server.app import create_app
from octavo.server.context import Serving
from octavo.text.pool import long_texts
from octavo.text_engine import TextEngine
from octavo.types import StepStats

GATHER_SECONDS = 3.0  # for all processes together to answer
LAST_WORDS = 0.1  # seconds in which last events leave before the sockets close
STDERR = 2


class RemoteCore:
    """Where the client of the core is had, in a process that does not own the core."""

    def __init__(self, on_stats: Callable[[StepStats], None]) -> None:
        self._on_stats = on_stats
        self._client: EngineClient | None = None
        self._has_served = False
        self.known = asyncio.Event()  # a core has been started
        self.broken = asyncio.Event()  # this process cannot go on

    @property
    def client(self) -> EngineClient:
        """The client of the core that runs now."""
        if self._client is None:
            raise EngineDead("the engine has not been started")
        return self._client

    @property
    def restarting(self) -> bool:
        """True from the death of a core until the next one takes requests."""
        return self._has_served and not self.client.ready.is_set()

    def start(self, message: CoreStarted) -> None:
        """Another core is being started, or runs already."""
        if self._client is not None:
            self.die("the engine has been started anew")
            self._client.close()
        self._client = EngineClient(message.addresses, self._on_stats, self.broken.set)
        if message.info is not None:
            self._client.welcome(message.info)
        self.known.set()

    def die(self, error: str) -> None:
        """The core is gone."""
        client = self.client
        self._has_served = self._has_served or client.ready.is_set()
        client.fail(EngineDead(error))


class ApiProcess:
    """The parts of one process and what it is told."""

    def __init__(self, settings: ApiSettings, launch: Launch, frontend: Frontend) -> None:
        self._settings = settings
        self._launch = launch
        self._frontend = frontend
        self._metrics = metrics_of(launch, frontend)
        self._core = RemoteCore(self._count)
        self._serving: Serving | None = None
        self._afar: resume.Afar | None = None
        self._engine: TextEngine | None = None
        self._hurry = asyncio.Event()
        self._closing = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Serves until the server's own process says so, or is gone; the exit code."""
        reader, writer = await asyncio.open_unix_connection(self._settings.hub)
        link = Link(reader, writer, self._answer)
        link.send(Hello(self._settings.index))
        hearing = asyncio.create_task(self._hear(link))
        breaking = asyncio.create_task(self._core.broken.wait())
        serving = asyncio.create_task(self._serve(link))
        ends: set[asyncio.Future[Any]] = {hearing, breaking, serving}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()  # raises what kept the port from opening
            if hearing.done() and self._engine is not None and self._engine.num_open:
                await self._engine.drain(0.0)  # the server's own process is gone: say so
                await asyncio.sleep(LAST_WORDS)
            self._closing.set()
            if not self._core.broken.is_set():
                await serving
            return int(self._core.broken.is_set())
        finally:
            for task in ends:
                task.cancel()
            link.close()

    def _count(self, stats: StepStats) -> None:
        """This process's part of what the core computes, to say when its queue will be shorter."""
        tokens = (stats.prompt_tokens + stats.sampled_tokens) // self._settings.count
        self._metrics.throughput.count(tokens, time.monotonic())

    async def _serve(self, link: Link) -> None:
        await self._core.known.wait()
        launch, frontend = self._launch, self._frontend
        engine = text_engine_of(
            launch, frontend, self._core, self._metrics, process=self._settings.index
        )
        self._engine = engine
        app = create_app(engine, settings_of(launch))
        serving: Serving = app.state.serving
        serving.index = self._settings.index
        serving.everybody = lambda op, to=0: link.ask(op, GATHER_SECONDS, to)
        self._afar = resume.Afar(serving)
        self._serving = serving
        gc.freeze()  # what a start leaves stays: looking through it would hold up streams
        async with long_texts(frontend.tokenizer):
            await listen(
                app,
                launch.server,
                self._closing,
                port=self._settings.port,
                on_started=lambda address: link.send(Listening(address)),
            )

    async def _hear(self, link: Link) -> None:
        """Does what it is told; returns when there is nobody left to tell it anything."""
        async for message in link.messages():
            if isinstance(message, CoreStarted):
                self._core.start(message)
            elif isinstance(message, CoreDied):
                self._core.die(message.error)
            elif isinstance(message, Drain):
                self._draining = asyncio.create_task(self._drain(link, message.timeout))
            else:
                self._hurry.set()

    async def _drain(self, link: Link, timeout: float) -> None:
        cut = 0 if self._engine is None else await self._engine.drain(timeout, self._hurry)
        await asyncio.sleep(LAST_WORDS)
        link.send(Drained(cut))

    async def _answer(self, op: str, to: int) -> list[bytes]:
        if op == BEAT:
            return [b""]
        if op == "metrics":
            return [msgspec.msgpack.encode(self._metrics.snapshot())]
        if self._serving is None:
            return [b""]
        if op == "load":
            return [b"%d" % self._serving.in_flight]
        if op.startswith(resume.QUESTION) and self._afar is not None:
            return [await self._afar.answer(op)]
        return [timeline.answer(self._serving, op)]


def main() -> int:
    """Reads the settings, serves until told to stop, and gives the exit code."""
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=ApiSettings)
    # Ctrl-C and service managers signal every process of a group; the server's own process drains.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Written by the signal handler itself, so a thread that holds the interpreter is seen too.
    faulthandler.register(signal.SIGUSR1, file=STDERR, all_threads=True)
    engine, server = EngineArgs(**settings.engine), ServerArgs(**settings.server)
    for record, sources in (
        (engine, settings.engine_sources),
        (server, settings.server_sources),
    ):
        record.sources.clear()
        record.sources.update(sources)
    log.setup(server.log_level)
    try:
        launch = Launch(engine, server, time.monotonic(), keys=keys_in(server))
        frontend = Frontend.open(engine, chat_template=server.chat_template)
        return asyncio.run(_run(settings, launch, frontend))
    except OctavoError as error:
        print(f"octavo: {error.message}", file=sys.stderr)
        return 1


async def _run(settings: ApiSettings, launch: Launch, frontend: Frontend) -> int:
    return await ApiProcess(settings, launch, frontend).run()


if __name__ == "__main__":
    sys.exit(main())
