"""One real server for all tests of this folder that do not need their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.servers import RunningServer, serving


@pytest.fixture(scope="session")
def server(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    flags = ("--max-model-len", "1024", "--num-gpu-blocks-override", "512", "--max-num-seqs", "8")
    name = ("--served-model-name", "small", "--enable-prompt-tokens-details")
    with serving(smollm2_gguf, log, *flags, *name) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
