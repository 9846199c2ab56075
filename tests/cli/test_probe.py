"""Whether a GPU can be used, found out without torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.options import EngineArgs
from octavo.probe import built_for_cuda, has_gpu
from octavo.resolve import worker_config


def test_a_gpu_is_there_if_the_driver_shows_one(tmp_path: Path) -> None:
    assert not has_gpu(tmp_path, None)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert not has_gpu(tmp_path, None)
    (tmp_path / "dev/nvidia3").touch()
    assert has_gpu(tmp_path, None)
    assert has_gpu(tmp_path, "1")
    assert not has_gpu(tmp_path, "")
    assert not has_gpu(tmp_path, "-1")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cuda: Optional[str] = '13.0'\nhip = None\n", True),
        ('cuda = "12.8"\n', True),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n", False),
        ("", False),
    ],
)
def test_how_torch_was_built(tmp_path: Path, text: str, expected: bool) -> None:
    (tmp_path / "version.py").write_text(text)
    assert built_for_cuda(tmp_path) == expected
    assert not built_for_cuda(tmp_path / "nowhere")
    assert not built_for_cuda(None)


def test_defaults_follow_the_device() -> None:
    gpu = worker_config(EngineArgs(device="cuda:1"))
    assert (gpu.device, gpu.max_num_seqs, gpu.max_num_batched_tokens) == ("cuda:1", 512, 8192)
    assert worker_config(EngineArgs(device="cuda"), offline=True).max_num_batched_tokens == 16384
    cpu = worker_config(EngineArgs(device="cpu"), offline=True)
    assert (cpu.device, cpu.max_num_seqs, cpu.max_num_batched_tokens) == ("cpu", 128, 2048)
    for device in ("cuda", "cpu"):
        fp8 = worker_config(EngineArgs(device=device, kv_cache_dtype="fp8"))
        assert fp8.kv_cache_dtype == "fp8"
