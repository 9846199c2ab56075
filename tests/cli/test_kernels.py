"""`octavo kernels`: what is there, and what cannot be built says why."""

from __future__ import annotations

import pytest

from octavo.cli import kernels
from octavo.cli.main import main


class Spec:
    """As FlashInfer describes a module."""

    def __init__(self, *, broken: bool) -> None:
        self.name, self.is_compiled, self.broken = "batch_prefill", False, broken

    def build(self) -> None:
        if self.broken:
            raise RuntimeError("Ninja failed:\nmore\nno nvcc\n")
        self.is_compiled = True


@pytest.mark.parametrize("broken", [False, True])
def test_build_and_list(
    broken: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = Spec(broken=broken)
    monkeypatch.setattr(kernels, "_items", lambda _: [kernels.Item("flashinfer x", spec)])
    assert main(["kernels", "list"]) == 0
    assert capsys.readouterr().out == "flashinfer x: not built\n"
    assert main(["kernels", "build"]) == int(broken)
    built = capsys.readouterr().out
    assert main(["kernels", "list"]) == 0
    if broken:
        assert built == "flashinfer x: cannot be built: Ninja failed: ... no nvcc\n"
    else:
        assert built == "flashinfer x: built in 0 s\n"
        assert capsys.readouterr().out == "flashinfer x: built\n"


def test_what_a_machine_cannot_build(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    item = kernels.Item("flashinfer", refusal="no GPU")
    monkeypatch.setattr(kernels, "_items", lambda _: [item])
    assert main(["kernels", "list"]) == 0
    assert main(["kernels", "build"]) == 1
    assert capsys.readouterr().out == "flashinfer: cannot be built: no GPU\n" * 2


def test_without_flashinfer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "list"]) == 0
    found = capsys.readouterr()
    assert found.out.startswith("native kernels of the CPU: ")
    assert "flashinfer: not installed" in found.err
