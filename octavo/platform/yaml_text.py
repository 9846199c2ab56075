"""Trees as YAML. Not for: reading it (`sources.py`)."""

from __future__ import annotations

from typing import Any

from octavo.platform.sources import yaml_module


def as_yaml(tree: Any) -> str:
    """YAML in the order of the tree; texts of several lines as they are."""
    yaml = yaml_module()

    class Dumper(yaml.SafeDumper):  # type: ignore[misc, name-defined]
        def ignore_aliases(self, _: object) -> bool:
            return True

    def text(dumper: Any, value: str) -> Any:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    made: str = yaml.dump(tree, Dumper=Dumper, sort_keys=False, width=100, allow_unicode=True)
    return made
