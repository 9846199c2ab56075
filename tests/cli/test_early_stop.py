"""A stop signal that comes while `octavo serve` still imports its own modules ends it cleanly."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import importlib, os, signal, sys
from octavo.cli import main
real = importlib.import_module
def interrupted(name):
    os.kill(os.getpid(), signal.SIGTERM)
    return real(name)
importlib.import_module = interrupted
sys.exit(main.main([{command!r}, "no-such-model"]))
"""


def stopped(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.format(command=command)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_server_that_does_not_serve_yet_has_nothing_to_drain() -> None:
    done = stopped("serve")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "stopped before it served" in done.stderr


def test_other_commands_keep_the_signal_as_it_is() -> None:
    assert stopped("run").returncode == -15
