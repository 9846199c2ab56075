"""Runs LiteLLM's proxy as a child: writes its settings, starts it, watches it, ends it.

Not for: the settings (`litellm.py`). Next file: `lint.py`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from octavo.errors import ConfigError
from octavo.options import environment_with, unset_variables
from octavo.platform.litellm import backends_of, config_of
from octavo.platform.spec import Spec
from octavo.platform.yaml_text import as_yaml

LOOK_SECONDS = 5.0  # between looks at the child
ANSWER_SECONDS = 10.0  # in which it must answer
MISSES = 6  # looks without an answer, after which it is taken for hung
START_SECONDS = 180.0
RESTARTS = 5  # within RESTART_WINDOW seconds, before it is given up
RESTART_WINDOW = 600.0
LIVE = "/health/liveliness"  # as LiteLLM spells it
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Launch:
    """What is started: the program, its settings' file and where it listens."""

    program: str
    config: Path
    host: str
    port: int

    @property
    def url(self) -> str:
        """Where clients go."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{host}:{self.port}"

    def words(self) -> list[str]:
        """The command line."""
        where = ["--host", self.host, "--port", str(self.port)]
        return [self.program, "--config", str(self.config), *where, "--telemetry", "False"]


def prepare(spec: Spec, config: Path | None = None, program: str | None = None) -> Launch:
    """Checks what the proxy needs and writes its settings. Raises ConfigError."""
    if not spec.gateway.backends:
        raise ConfigError(
            "the spec has no [[gateway.backends]]: name at least one, with url = "
            '"http://HOST:PORT/v1" of a running engine.',
            "spec",
        )
    found = program or _program()
    names = [spec.gateway.master_key_env]
    names += [one.key_env for one in backends_of(spec, []) if one.key_env]
    missing = unset_variables(names)
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} must be set: the spec names them for keys. Without a master "
            "key the gateway would be open to all.",
            missing[0],
        )
    path = config or Path(tempfile.mkdtemp(prefix="octavo-gateway-")) / "litellm.yaml"
    _write(path, as_yaml(config_of(spec, [])))
    return Launch(found, path, spec.gateway.host, spec.gateway.port)


def _program() -> str:
    beside = Path(sys.executable).parent / "litellm"
    found = str(beside) if beside.is_file() else shutil.which("litellm")
    if found is None:
        raise ConfigError(
            "the gateway is LiteLLM's proxy, which is not installed; install octavo[gateway], or "
            "name it with --litellm PATH.",
            "litellm",
        )
    return found


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        fresh.write_text(text, encoding="utf-8")
        os.replace(fresh, path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}", "config-out") from None


class Gateway:
    """The child, and a watch over it. `run` returns when `stop` was called or it was given up."""

    def __init__(self, launch: Launch, *, drain_seconds: float, say: Say) -> None:
        self._launch = launch
        self._drain = drain_seconds
        self._say = say
        self._stopping = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._starts: deque[float] = deque()

    def stop(self) -> None:
        """Ends the child after what runs has ended; may be called from a signal's handler."""
        self._stopping.set()

    def run(self) -> int:
        """0 after a stop; 1 if the proxy did not start or died too often."""
        while not self._stopping.is_set():
            now = time.monotonic()
            while self._starts and now - self._starts[0] > RESTART_WINDOW:
                self._starts.popleft()
            if len(self._starts) > RESTARTS:
                self._say(f"the proxy ended {RESTARTS} times in {RESTART_WINDOW:.0f} s: given up")
                return 1
            if self._starts:
                self._stopping.wait(min(30.0, 2.0 ** len(self._starts) - 1))
            self._starts.append(now)
            self._child = subprocess.Popen(
                self._launch.words(), env=environment_with(LITELLM_LOCAL_MODEL_COST_MAP="True")
            )
            try:
                self._watch(self._child)
            finally:
                self._end(self._child)
        return 0

    def _watch(self, child: subprocess.Popen[bytes]) -> None:
        """Until it ended, hangs, or is to be ended."""
        started, ready, missed = time.monotonic(), False, 0
        while not self._stopping.wait(0.25 if not ready else LOOK_SECONDS):
            code = child.poll()
            if code is not None:
                self._say(f"the proxy ended with {code}; it is started anew")
                return
            alive = self._answers()
            if alive and not ready:
                ready = True
                took = time.monotonic() - started
                self._say(f"ready at {self._launch.url} after {took:.1f} s")
            missed = 0 if alive or not ready else missed + 1
            late = not ready and time.monotonic() - started > START_SECONDS
            if late or missed >= MISSES:
                self._say("the proxy does not answer; it is started anew")
                return

    def _answers(self) -> bool:
        try:
            return httpx.get(self._launch.url + LIVE, timeout=ANSWER_SECONDS).status_code == 200
        except httpx.HTTPError:
            return False

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        """What runs may end within the drain's time."""
        if child.poll() is not None:
            return
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(self._drain)
        except subprocess.TimeoutExpired:
            self._say(f"the proxy did not end within {self._drain:.0f} s; it is killed")
            child.kill()
            child.wait()
