"""The real `tritonclient[http]` against a real server with the real model."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import openai
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.e2e.servers import RunningServer

pytestmark = pytest.mark.model
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def remote(server: RunningServer) -> Iterator[triton.InferenceServerClient]:
    client = triton.InferenceServerClient(server.url.removeprefix("http://"))
    yield client
    client.close()


def texts(*rows: str, shape: tuple[int, ...] | None = None, binary: bool = True):
    values = np.array(rows, dtype=object).reshape(shape or (len(rows),))
    tensor = triton.InferInput("text_input", list(values.shape), "BYTES")
    tensor.set_data_from_numpy(values, binary_data=binary)
    return tensor


def number(name: str, value: int | float, kind: str = "INT32"):
    tensor = triton.InferInput(name, [1], kind)
    dtype = {"INT32": np.int32, "FP32": np.float32, "UINT64": np.uint64, "BOOL": bool}[kind]
    tensor.set_data_from_numpy(np.array([value], dtype=dtype))
    return tensor


def test_it_is_there(remote: triton.InferenceServerClient) -> None:
    assert remote.is_server_live()
    assert remote.is_server_ready()
    assert remote.is_model_ready("small")
    assert remote.is_model_ready("small", "1")
    assert not remote.is_model_ready("large")
    assert remote.get_server_metadata()["name"] == "octavo"
    assert remote.get_model_metadata("small")["inputs"][0]["name"] == "text_input"
    assert remote.get_model_config("small", "1")["name"] == "small"
    assert remote.get_model_repository_index()[0]["state"] == "READY"


def test_infer_says_what_completions_say(
    remote: triton.InferenceServerClient, client: openai.OpenAI
) -> None:
    seed = random.randrange(2**31)
    shared = {"model": "small", "temperature": 0.9, "seed": seed, "max_tokens": 12}
    plain = client.completions.create(prompt=PROMPT, **shared).choices[0].text
    inputs = [texts(PROMPT), number("max_tokens", 12), number("seed", seed, "UINT64")]
    warm = {"temperature": 0.9}
    result = remote.infer("small", inputs, request_id="r 1", parameters=warm)
    assert result.as_numpy("text_output").tolist() == [plain.encode()], f"seed {seed}"
    assert result.get_response()["id"] == "r 1"
    wanted = [triton.InferRequestedOutput("text_output", binary_data=False)]
    result = remote.infer("small", inputs, outputs=wanted, parameters=warm)
    assert result.as_numpy("text_output").tolist() == [plain], f"seed {seed}"


def test_a_batch_in_both_forms(remote: triton.InferenceServerClient) -> None:
    rows = (PROMPT, "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,")
    wish = number("exclude_input_in_output", False, "BOOL")
    for binary in (True, False):
        tensor = texts(*rows, shape=(2, 1), binary=binary)
        greedy = {"temperature": 0, "max_tokens": 8}
        found = remote.infer("small", [tensor, wish], parameters=greedy).as_numpy("text_output")
        assert found.shape == (2, 1)
        assert found[0, 0].decode().startswith(PROMPT + " Paris")
        assert found[1, 0].decode().startswith(rows[1] + " 12, 13")


def test_requests_at_once(remote: triton.InferenceServerClient) -> None:
    inputs = [texts(PROMPT), number("max_tokens", 4), number("temperature", 0, "FP32")]
    pending = [remote.async_infer("small", inputs) for _ in range(6)]
    found = {one.get_result().as_numpy("text_output")[0] for one in pending}
    assert len(found) == 1
    assert next(iter(found)).startswith(b" Paris")


def test_refusals_can_be_read(remote: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="does not exist") as missing:
        remote.infer("large", [texts(PROMPT)])
    assert missing.value.status() == "404"
    with pytest.raises(InferenceServerException, match="temperature = -1"):
        remote.infer("small", [texts(PROMPT), number("temperature", -1, "FP32")])
    with pytest.raises(InferenceServerException, match="uncompressed"):
        remote.infer("small", [texts(PROMPT)], request_compression_algorithm="gzip")


def test_counts_grow(remote: triton.InferenceServerClient, server: RunningServer) -> None:
    def counts() -> tuple[int, int, float]:
        (entry,) = remote.get_inference_statistics("small")["model_stats"]
        stats = entry["inference_stats"]
        parts = ("queue", "compute_input", "compute_infer", "compute_output")
        whole = stats["success"]["ns"]
        assert abs(whole - sum(stats[part]["ns"] for part in parts)) <= 1e6 + whole / 1000
        gauge = server.gauge("nv_inference_request_success")
        return entry["inference_count"], entry["execution_count"], gauge

    before = counts()
    remote.infer("small", [texts(PROMPT), number("max_tokens", 5)])
    after = counts()
    assert (after[0] - before[0], after[2] - before[2]) == (1, 1)
    assert 1 <= after[1] - before[1] <= 5
