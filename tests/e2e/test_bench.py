"""The benchmark commands, small, against a real server and the real engine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.servers import RunningServer

pytestmark = pytest.mark.model
SMALL = ["--max-model-len", "512", "--num-gpu-blocks-override", "128", "--max-num-seqs", "8"]


def octavo(*arguments: str, module: str = "octavo") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_serve_prints_the_block_and_saves(
    server: RunningServer, smollm2_gguf: Path, tmp_path: Path, backend: str
) -> None:
    done = octavo(
        *("bench", "serve", "--base-url", server.url, "--backend", backend),
        *("--tokenizer", str(smollm2_gguf), "--num-prompts", "6", "--request-rate", "20"),
        *("--input-len", "24", "--output-len", "8", "--ignore-eos", "--temperature", "0"),
        *("--save-result", "--result-filename", "result.json", "--result-dir", str(tmp_path)),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--goodput", "e2el:60000"),
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[-1] == "=" * 50
    assert "Successful requests:                     6" in lines
    assert "Total generated tokens:                  48" in lines
    assert any(re.fullmatch(r"P99 E2EL \(ms\): {27}\S+", line) for line in lines), done.stdout
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == 6
    assert result["total_output_tokens"] == 48
    assert result["median_ttft_ms"] > 0
    if backend == "openai":
        assert result["total_input_tokens"] == 6 * 24


def test_serve_says_when_nobody_answers() -> None:
    done = octavo("serve", "--port", "1", module="octavo.benchmarks.benchmark_serving")
    assert done.returncode in (1, 2)
    done = octavo("bench", "serve", "--port", "1")
    assert done.returncode == 1
    assert "no server answers" in done.stderr
    assert "Traceback" not in done.stderr


def test_throughput(smollm2_gguf: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = octavo(
        *("bench", "throughput", "--model", str(smollm2_gguf), *SMALL, "--num-prompts", "4"),
        *("--input-len", "16", "--output-len", "8", "--output-json", str(out)),
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"Throughput: \S+ requests/s, \S+ total tokens/s, \S+ output", done.stdout)
    assert "Total num prompt tokens:  64" in done.stdout
    assert "Total num output tokens:  32" in done.stdout
    assert json.loads(out.read_text())["total_num_tokens"] == 96


def test_latency(smollm2_gguf: Path) -> None:
    done = octavo(
        *("bench", "latency", "--model", str(smollm2_gguf), *SMALL, "--batch-size", "2"),
        *("--output-len", "4", "--num-iters", "2", "--num-iters-warmup", "1"),
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"Avg latency: \S+ seconds", done.stdout)
    assert "99% percentile latency:" in done.stdout


def test_startup(smollm2_gguf: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = octavo(
        *("bench", "startup", "--model", str(smollm2_gguf), *SMALL, "--num-iters", "1"),
        *("--output-json", str(out)),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert len(found["startup_times"]) == 2
    for seconds, phases in zip(found["startup_times"], found["phases"], strict=True):
        assert sum(phases.values()) == pytest.approx(seconds, rel=0.02)
        assert phases["import"] > 0
        assert phases["load"] > 0
    assert f"first start: {found['first_startup_time']:.2f} s to ready on cpu" in done.stdout
