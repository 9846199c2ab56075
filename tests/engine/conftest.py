from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=200, help="workloads of the engine fuzz test")
    parser.addoption("--first-seed", type=int, default=0, help="where they begin")
