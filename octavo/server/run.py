"""`serve`: the application on a socket until told to stop.

The socket is bound before anything else, so a taken port is an error at once. Signals are the
launcher's affair. Not for: engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from octavo.errors import ConfigError
from octavo.server.protocol import LimitedProtocol
from octavo.server.settings import HttpLimits

BACKLOG = 2048


@dataclass(frozen=True, slots=True)
class Listen:
    """Where and how to listen. `uds` wins over host and port; port 0 takes a free one."""

    host: str | None = None  # None: all interfaces
    port: int = 8000
    uds: str | None = None
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile_password: str | None = None
    root_path: str = ""
    shared: bool = False  # other processes of this server listen on the same port


class _Server(uvicorn.Server):
    """uvicorn's server, told to stop by an event and not by signals."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves the signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()


async def serve(
    app: ASGIApp,
    *,
    listen: Listen,
    stop: asyncio.Event,
    limits: HttpLimits | None = None,
    on_started: Callable[[str], None] | None = None,
    log_level: str = "warning",
    close_timeout: float = 5.0,
) -> None:
    """Serve until `stop` is set, then finish open answers for at most `close_timeout` seconds.

    `on_started` gets the address. Raises ConfigError if the address cannot be had.
    """
    limits = limits or HttpLimits()
    with contextlib.ExitStack() as held:
        bound = held.enter_context(contextlib.closing(bind(listen)))
        if listen.uds is not None:
            held.callback(_unlink, listen.uds)
        address = address_of(bound, listen)
        config = uvicorn.Config(
            app,
            http=partial(LimitedProtocol, limits=limits),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=log_level,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            root_path=listen.root_path,
            backlog=BACKLOG,
            timeout_keep_alive=limits.keep_alive,  # type: ignore[arg-type]
            timeout_graceful_shutdown=max(1, round(close_timeout)),
            ssl_keyfile=listen.ssl_keyfile,
            ssl_certfile=listen.ssl_certfile,
            ssl_keyfile_password=listen.ssl_keyfile_password,
        )
        _load(config, listen)
        server = _Server(config, lambda: on_started(address) if on_started else None)
        running = asyncio.ensure_future(server.serve([bound]))
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
            server.should_exit = True
            await running
        finally:
            stopping.cancel()
            running.cancel()


def reserve(listen: Listen) -> socket.socket:
    """Holds a port for processes that will share it, without taking connections.

    Raises ConfigError if another program has it, which sharing alone would not show.
    """
    with contextlib.closing(bind(listen)) as alone:
        port = alone.getsockname()[1]
    return bind(replace(listen, port=port, shared=True), listens=False)


def bind(listen: Listen, *, listens: bool = True) -> socket.socket:
    """A bound socket. Raises ConfigError that names the option and the remedy."""
    if listen.uds is not None:
        return _bind_path(listen.uds)
    host = listen.host or "0.0.0.0"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"--host {host} cannot be resolved: {error.strerror}.", "host") from None
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if listen.shared:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind(address)
        if listens:
            bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise _refused(error, host, listen.port) from None
    return bound


def address_of(bound: socket.socket, listen: Listen) -> str:
    """The address to type into a client."""
    if listen.uds is not None:
        return f"unix:{listen.uds}"
    host, port = bound.getsockname()[:2]
    scheme = "https" if listen.ssl_certfile else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _refused(error: OSError, host: str, port: int) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"--port {port} is taken by another program on {host}; choose another, or 0 for any "
            "free one.",
            "port",
        )
    if error.errno == errno.EACCES:
        return ConfigError(f"--port {port} needs privileges; choose one above 1023.", "port")
    return ConfigError(
        f"--host {host} --port {port} cannot be listened on: {error.strerror}.", "host"
    )


def _bind_path(path: str) -> socket.socket:
    """A Unix socket; one that a dead server left behind is replaced."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _left_behind(path):
            os.unlink(path)
        bound.bind(path)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"--uds {path} cannot be used: {error.strerror or error}.", "uds"
        ) from None
    return bound


def _left_behind(path: str) -> bool:
    """True for a socket file to which nobody listens."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return False
    except FileNotFoundError:
        return False
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        return probe.connect_ex(path) == errno.ECONNREFUSED


def _unlink(path: str) -> None:
    Path(path).unlink(missing_ok=True)


def _load(config: uvicorn.Config, listen: Listen) -> None:
    """Let uvicorn read its files now, where an error can be said in our words."""
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"--ssl-certfile {listen.ssl_certfile} --ssl-keyfile {listen.ssl_keyfile}: {error}.",
            "ssl_certfile",
        ) from None
