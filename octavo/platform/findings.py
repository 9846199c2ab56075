"""Findings: what is wrong, where, by which rule, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from octavo.platform.sources import Sources

Level: TypeAlias = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One flaw."""

    rule: str
    file: str
    line: int
    problem: str
    remedy: str
    level: Level = "error"

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.level}: {self.rule}: {self.problem}; {self.remedy}"


Rule: TypeAlias = "Callable[[Sources], Iterator[Finding]]"
