"""The command line with a real engine and the bundled model, as its users run it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from octavo.fields import options_of
from octavo.options import EngineArgs

pytestmark = pytest.mark.model

LIMITS = ["--kv-cache-memory-bytes", "64M", "--max-model-len", "1024", "--max-num-seqs", "4"]


def environment() -> dict[str, str]:
    """Without options from outside, but for the number of threads."""
    known = {name for details in options_of(EngineArgs).values() for name in details.env}
    kept = {name: value for name, value in os.environ.items() if name not in known}
    return {**kept, "OMP_NUM_THREADS": "1"}


def octavo(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "octavo", *words],
        env=environment(),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_one_question(smollm2_gguf: Path) -> None:
    done = octavo("chat", "--model", str(smollm2_gguf), *LIMITS, "What is the capital of France?")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert done.stderr == ""


def test_completions_in_one_batch(smollm2_gguf: Path) -> None:
    lines = 'The capital of France is\n{"prompt": "One, two, three,", "max_tokens": 2}\n'
    words = ["run", "-", "--model", str(smollm2_gguf), "--temperature", "0", "--max-tokens", "4"]
    done = octavo(*words, *LIMITS, stdin=lines)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert "Paris" in rows[0]["text"]
    assert [row["completion_tokens"] for row in rows] == [4, 2]
    assert [row["finish_reason"] for row in rows] == ["length", "length"]


def test_a_model_that_is_not_there_ends_in_one_line() -> None:
    done = octavo("chat", "--model", "no-such-folder/model.gguf", "hello")
    assert done.returncode == 1
    assert done.stderr.startswith("octavo: ")
    assert "no-such-folder/model.gguf" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_interrupted_answer_leaves_the_conversation_alive(smollm2_gguf: Path) -> None:
    words = ["chat", "--model", str(smollm2_gguf), *LIMITS, "--max-tokens", "800"]
    with subprocess.Popen(
        [sys.executable, "-m", "octavo", *words, "--ignore-eos"],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # the signal goes to all its processes, as from a terminal
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        output: list[bytes] = []
        talking = threading.Event()

        def listen() -> None:
            assert process.stdout is not None
            while data := os.read(process.stdout.fileno(), 4096):
                output.append(data)
                if len(b"".join(output).partition(b"> ")[2].strip()) > 3:
                    talking.set()

        listener = threading.Thread(target=listen)
        listener.start()
        process.stdin.write(b"Tell a long story about the sea.\n")
        process.stdin.flush()
        try:
            assert talking.wait(200), b"".join(output)
            os.killpg(process.pid, signal.SIGINT)
            process.stdin.write(b"/clear\n/exit\n")
            process.stdin.close()
            assert process.wait(60) == 0
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            listener.join(10)
        text = b"".join(output).decode()
        assert "(stopped)" in text
        assert "The conversation is forgotten." in text
