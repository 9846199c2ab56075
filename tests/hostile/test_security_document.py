"""`docs/security.md`: each report has a reason and tests, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
ID = re.compile(r"CVE-\d{4}-\d+|GHSA-\w{4}-\w{4}-\w{4}|CERT VU#\d+")


def rows() -> list[list[str]]:
    """The cells of all lines of the tables of reports."""
    found = []
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("|") and ID.search(cells[0]):
            found.append(cells)
    return found


def functions_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def test_every_named_test_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", TEXT)
    assert len(named) > 100
    for file, name in set(named):
        path = ROOT / file
        assert path.is_file(), file
        if name:
            assert name.startswith("test_"), name
            assert name in functions_in(path), f"{file} has no {name}"


def test_every_report_has_a_reason_and_a_test() -> None:
    assert len(rows()) >= 105
    for cells in rows():
        assert len(cells) == 4, cells
        report, cause, here, tests = cells
        assert cause, report
        assert len(here) > 20, report
        assert "::test_" in tests, report


def test_each_report_is_there_once() -> None:
    ids = [found for cells in rows() for found in ID.findall(cells[0])]
    assert sorted(ids) == sorted(set(ids))
    assert len(ids) > 170
