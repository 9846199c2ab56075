"""Runs a Serve application in a cluster of its own and prints its answers, a line of JSON each.

python -m tests.parallel.serve_program MODEL '{"option": value}'
"""

from __future__ import annotations

import json
import socket
import sys

import httpx
import ray
from ray import serve

from octavo.serve import build_app

BODY = {"prompt": "The river", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def main() -> None:
    args = {
        "model": sys.argv[1],
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 128 << 20,
        "autoscaling": {"min_replicas": 1, "max_replicas": 2},
        **json.loads(sys.argv[2]),
    }
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray.init(num_cpus=6, include_dashboard=False, log_to_driver=True)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build_app(args), name="octavo")
    url = f"http://127.0.0.1:{port}"
    answers = [
        httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).json(),
        httpx.get(f"{url}/v1/models", timeout=10).json(),
        httpx.post(f"{url}/v1/completions", json={**BODY, "top_p": 7}, timeout=10).json(),
        httpx.get(f"{url}/health/ready", timeout=10).status_code,
    ]
    serve.shutdown()
    ray.shutdown()
    for answer in answers:
        print(json.dumps(answer))


if __name__ == "__main__":
    main()
