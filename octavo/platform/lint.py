"""All rules over all that was read. Not for: a rule itself (`rules_*.py`, `schema.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octavo.platform import rules_cluster, rules_commands, rules_docker, rules_metrics, schema
from octavo.platform.findings import Finding, Rule
from octavo.platform.sources import read_sources


@dataclass(frozen=True, slots=True)
class LintOptions:
    """`crds`: folder of definitions; `metrics`: an exposition to hold names against."""

    crds: Path | None = None
    metrics: str | None = None


def lint(paths: list[Path], options: LintOptions | None = None) -> list[Finding]:
    """Findings in the order of files and lines. Raises ConfigError for unreadable files."""
    options = options or LintOptions()
    sources = read_sources(paths)
    if options.metrics is None:
        aliases = sources.settings.get("metric_aliases") or []
        known = frozenset(aliases if isinstance(aliases, list) else str(aliases).split(","))
        types = rules_metrics.own_types(known & {"legacy", "seed"})
    else:
        types = rules_metrics.types_in(options.metrics)
    rules: tuple[Rule, ...] = (
        *rules_cluster.RULES,
        *rules_commands.RULES,
        *rules_docker.RULES,
        *rules_metrics.rules_for(types),
        *schema.rules_for(options.crds),
    )
    found = {finding for rule in rules for finding in rule(sources)}
    return sorted(found, key=lambda one: (one.file, one.line, one.rule, one.problem))
