"""Fixtures for all tests: the bundled model, as a GGUF file and as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.checkpoint.checkpoint import open_checkpoint
from octavo.checkpoint.pull import pull
from octavo.errors import CheckpointError

BUNDLED = "smollm2-135m"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a Q4_1 GGUF file; skips if it is not there and cannot be fetched."""
    try:
        return pull(BUNDLED)
    except CheckpointError as error:
        if "could not fetch" not in error.message:
            raise
        pytest.skip(f"offline: {error.message}")


@pytest.fixture(scope="session")
def smollm2_folder(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as a Hugging Face folder in bf16."""
    import torch

    from octavo.weights.export import write_folder

    out = tmp_path_factory.mktemp("smollm2") / "SmolLM2-135M-Instruct"
    return write_folder(open_checkpoint(str(smollm2_gguf)), out, torch.bfloat16)
