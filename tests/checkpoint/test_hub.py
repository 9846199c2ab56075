"""Hub ids: the local cache, and clear words in seconds when it does not help."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.checkpoint.checkpoint import open_checkpoint
from octavo.errors import CheckpointError
from tests.checkpoint.toys import ToyGguf, expect_error, fresh_seed, random_llama, write_hf

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A hub cache that holds one commit of toy/model, still empty."""
    pytest.importorskip("huggingface_hub")
    root = tmp_path / "hub" / "models--toy--model"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    folder = root / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    return folder


def hub(snapshot: Path) -> Path:
    return snapshot.parents[2]


def test_the_local_cache_is_enough(snapshot: Path) -> None:
    write_hf(snapshot, random_llama(fresh_seed()))
    opened = open_checkpoint("toy/model", download_dir=hub(snapshot))
    assert (opened.name, opened.path, opened.kind) == ("toy/model", snapshot, "hf")
    opened = open_checkpoint("toy/model", download_dir=hub(snapshot), revision=COMMIT)
    assert opened.path == snapshot


def test_a_gguf_in_the_local_cache(snapshot: Path) -> None:
    file = ToyGguf().write(snapshot / "toy.gguf", random_llama(fresh_seed()))
    opened = open_checkpoint("toy/model", download_dir=hub(snapshot))
    assert (opened.path, opened.kind) == (file, "gguf")


def run_unreachable(*arguments: str) -> str:
    """Opens with a hub that refuses connections; the hub's library reads its address once."""
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from octavo.checkpoint.checkpoint import open_checkpoint\n"
        "from octavo.errors import CheckpointError\n"
        "try:\n"
        "    open_checkpoint(sys.argv[1], download_dir=Path(sys.argv[2]))\n"
        "except CheckpointError as error:\n"
        "    print(error)\n"
    )
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,  # a series of retries takes longer
        check=True,
    )
    return done.stdout


def test_out_of_reach_is_said_at_once(snapshot: Path) -> None:
    words = run_unreachable("toy/other", str(hub(snapshot)))
    assert "'toy/other' is not in the local cache and the hub is out of reach" in words


def test_half_a_snapshot_is_not_a_model(snapshot: Path) -> None:
    write_hf(snapshot, random_llama(fresh_seed()))
    (snapshot / "model.safetensors").unlink()
    assert "out of reach" in run_unreachable("toy/model", str(hub(snapshot)))


def test_without_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint("toy/model", download_dir=tmp_path)
    expect_error(caught, "'toy/model'", "octavo[hub]")
