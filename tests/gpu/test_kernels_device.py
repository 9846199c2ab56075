"""The CUDA device: what it measures, what it copies, and how it refuses."""

from __future__ import annotations

import pytest
import torch

from octavo.device.cuda import CudaDevice, PinnedColumn, explain
from octavo.errors import ConfigError


@pytest.fixture
def cuda(device: torch.device) -> CudaDevice:
    if device.type != "cuda":
        pytest.skip("no CUDA device")
    return CudaDevice()


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        CudaDevice(99)
    assert raised.value.option == "device"
    if torch.version.cuda is None:
        assert "built without CUDA" in raised.value.message


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("The NVIDIA driver on your system is too old (found version 11040).", "update the driver"),
        ("Found no NVIDIA driver on your system.", "install one"),
        ("No CUDA GPUs are available", "CUDA_VISIBLE_DEVICES"),
        ("something else", "something else"),
    ],
)
def test_refusals_say_what_to_do(error: str, words: str) -> None:
    assert words in explain(error)


def test_the_peak_is_measured_not_the_rest(cuda: CudaDevice) -> None:
    size = 64 << 20

    def work() -> torch.Tensor:
        kept = torch.empty(size, dtype=torch.uint8, device=cuda.torch_device)
        for _ in range(3):
            torch.empty(2 * size, dtype=torch.uint8, device=cuda.torch_device).fill_(1)
        return kept

    kept, peak = cuda.measure(work)
    assert kept.numel() == size
    assert peak.torch_bytes == 3 * size
    assert 0 <= peak.other_bytes < size


def test_memory_that_is_taken_is_no_longer_free(cuda: CudaDevice) -> None:
    before = cuda.free_memory()
    taken = torch.empty(256 << 20, dtype=torch.uint8, device=cuda.torch_device)
    assert before - cuda.free_memory() >= taken.numel()
    del taken
    assert abs(before - cuda.free_memory()) < 64 << 20
    assert before < cuda.total_memory()


def test_a_column_is_copied_without_a_wait(cuda: CudaDevice) -> None:
    column = PinnedColumn(100, torch.int32, cuda.torch_device)
    address = column.device.data_ptr()
    for start in range(3):
        column.array[:10] = range(start, start + 10)
        sent = column.send(10)
        assert sent.tolist() == list(range(start, start + 10))
        assert sent.data_ptr() == address


def test_streams_and_events_order_work(cuda: CudaDevice) -> None:
    stream, event = cuda.stream(), cuda.event()
    x = torch.zeros(1 << 20, device=cuda.torch_device)
    cuda.synchronize()
    with cuda.on(stream):
        x.add_(1)
        event.record()
    event.synchronize()
    assert event.query()
    assert float(x.sum()) == 1 << 20
