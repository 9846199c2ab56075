"""The server as a Ray Serve application."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.options import EngineArgs
from octavo.serve import deployment_options, split


def test_arguments_are_options_by_name() -> None:
    engine, server, own = split(
        {"model": "m", "tensor_parallel_size": 2, "api_key": ["k"], "autoscaling": {"a": 1}}
    )
    assert engine == {"model": "m", "tensor_parallel_size": 2}
    assert server == {"api_key": ["k"]}
    assert own == {"autoscaling": {"a": 1}}
    with pytest.raises(ConfigError, match="max_num_seq is not known"):
        split({"max_num_seq": 3})


def test_a_replica_takes_what_its_workers_need() -> None:
    one = deployment_options(EngineArgs(device="cuda", max_num_seqs=10), {})
    assert one["ray_actor_options"] == {"num_cpus": 1, "num_gpus": 1}
    assert one["max_ongoing_requests"] == 160
    assert "autoscaling_config" not in one
    own = {"autoscaling": {"max_replicas": 3}, "deployment": {"max_ongoing_requests": 9}}
    many = deployment_options(EngineArgs(device="cuda", tensor_parallel_size=8), own)
    assert many["ray_actor_options"] == {"num_cpus": 1}  # the actors have the GPUs
    assert many["autoscaling_config"] == {"target_ongoing_requests": 128, "max_replicas": 3}
    assert many["max_ongoing_requests"] == 9


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("more", [{}, {"pipeline_parallel_size": 2}])
def test_a_replica_answers(more: dict[str, int], smollm2_gguf: Path) -> None:
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("ray.serve") is None:
        pytest.skip("Ray Serve is not installed")
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "b" * 64}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-m", "tests.parallel.serve_program", str(smollm2_gguf)]
    done = subprocess.run(
        [*command, json.dumps(more)], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    answer, models, bad, health = map(json.loads, done.stdout.strip().splitlines()[-4:])
    assert len(answer["choices"][0]["text"]) > 5
    assert models["data"][0]["id"] == str(smollm2_gguf)
    assert bad["error"]["type"] == "BadRequestError"
    assert health == 200
