"""A real server with as much open to callers as it can have, and a way to talk to it below HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cases.client import Box
from tests.e2e.servers import serving
from tests.server.fake_engine import MAX_MODEL_LEN


@pytest.fixture(scope="session")
def target(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """Context as in the tables of bad inputs; templates of callers are allowed."""
    flags = ("--max-model-len", str(MAX_MODEL_LEN), "--num-gpu-blocks-override", "160")
    more = ("--max-num-seqs", "16", "--served-model-name", "small", "--dtype", "float32")
    log = tmp_path_factory.mktemp("target") / "log"
    with serving(smollm2_gguf, log, *flags, *more, "--trust-request-chat-template") as server:
        yield Box(server)
