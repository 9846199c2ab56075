"""`octavo doctor` with several workers."""

from __future__ import annotations

import re
from typing import Any

import pytest

from octavo.cli.doctor_ranks import _differences, _verdict
from octavo.cli.main import main

FACTS = {"host": "a", "torch": "2.13", "octavo": "1", "python": "3.11", "clock": "5.0"}


def test_what_differs_is_named() -> None:
    facts = {0: FACTS, 1: {**FACTS, "torch": "2.12"}}
    rows = _differences(facts, {0: 0.0, 1: 3.5})
    assert rows == [
        ("torch", "MISSING: the same version on every rank; there are 2.12, 2.13"),
        ("clocks", "MISSING: the same time on every rank; they are 3.5 s apart"),
    ]
    assert _differences({0: FACTS, 1: dict(FACTS)}, {0: 0.1, 1: 0.2}) == []


@pytest.mark.parametrize(
    ("facts", "times", "expected"),
    [
        ({0: {}, 1: {}}, {0: {"x": "7 us"}, 1: {"x": "11 us"}}, r"11 us"),
        ({0: {}}, {}, r"ranks \[1\] did not start within 3 s"),
        ({0: {}, 1: {}}, {0: {"x": "7 us"}}, r"ranks \[1\] did not come out of it within 3 s"),
    ],
)
def test_who_did_not_come_is_named(facts: Any, times: Any, expected: str) -> None:
    rows = _verdict(facts, times, {}, 2, 3.0)
    assert len(rows) == 1
    assert re.search(expected, rows[0][1])


@pytest.mark.slow
def test_ranks_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--tensor-parallel-size", "2", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert text.count("address 127.0.0.1") == 2
    assert re.search(r"all-reduce tensor 16 KiB +\d+ us", text)
    assert main(["doctor", "--tensor-parallel-size", "2", "--device", "cpu", "--limit", "0.3"]) == 1
    assert "did not start within 0.3 s" in capsys.readouterr().out
