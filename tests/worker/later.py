"""A device that works while the host goes on, played on the CPU: hasty reads and writes are seen.

What is copied to the host stays garbage until an event after the copy was waited for, and a copy
from staging memory whose source changes before its event was waited for fails the test.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.device.base import Event
from octavo.device.cpu import CpuDevice

GARBAGE = -(2**30) - 7


class LaterEvent:
    """Passes when it is waited for, and not before."""

    def __init__(self, device: LaterDevice) -> None:
        self._device = device
        self.record()

    def record(self) -> None:
        """It is used again: who still waits for what it was before waits for too much."""
        self._upto = len(self._device.pending)
        self.waited = False

    def query(self) -> bool:
        return self.waited

    def synchronize(self) -> None:
        self.waited = True
        self._device.pass_until(self._upto)


class LaterDevice(CpuDevice):
    """Everything is computed at once, but shows late."""

    asynchronous = True
    depth = 2
    lookahead = 1

    def __init__(self, threads: int | None = 1) -> None:
        super().__init__(threads)
        self.pending: list[Callable[[], None]] = []
        self._passed = 0
        self._staging: set[int] = set()
        self._kept: list[Tensor] = []
        self.captured = 0
        self.replayed = 0

    def staging(self, count: int) -> Tensor:
        memory = super().staging(count)
        self._staging.add(memory.untyped_storage().data_ptr())
        self._kept.append(memory)  # or its address may become that of other memory
        return memory

    def copy(self, target: Tensor, source: Tensor) -> None:
        if target.untyped_storage().data_ptr() in self._staging:
            self._to_host(target, source)
            return
        assert source.untyped_storage().data_ptr() in self._staging, "a copy of pageable memory"
        target.copy_(source)
        before = source.clone()

        def unchanged() -> None:
            assert torch.equal(source, before), "staging memory was written while it was read"

        self.pending.append(unchanged)

    def fetch(self, source: Tensor) -> Tensor:
        target = torch.empty_like(source)
        self._to_host(target, source)
        return target

    def _to_host(self, target: Tensor, source: Tensor) -> None:
        value = source.clone()
        target.fill_(GARBAGE)
        self.pending.append(lambda: _write(target, value))

    def mark(self, again: Event | None = None) -> LaterEvent:  # type: ignore[override]
        if not isinstance(again, LaterEvent):
            return LaterEvent(self)
        assert again.waited, "an event is used again that nobody has waited for"
        again.record()
        return again

    def synchronize(self) -> None:
        self.pass_until(len(self.pending))

    @torch.inference_mode()
    def pass_until(self, count: int) -> None:
        for index in range(self._passed, count):
            self.pending[index]()
        self._passed = max(self._passed, count)

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        self.captured += 1
        replay, result = super().record(work)

        def counted() -> None:
            self.replayed += 1
            replay()

        return counted, result


def _write(target: Tensor, value: Tensor) -> None:
    target.copy_(value)
