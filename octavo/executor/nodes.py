"""Which node of a cluster each rank goes to. Pure arithmetic.

Not for: asking for the room (`ray.py`). Next file: `records.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Node:
    """A machine, or a part of one, and the number of ranks that it has room for."""

    address: str
    pin: str  # a resource that it alone has
    room: int  # now
    most: int  # if it were empty


def choose_nodes(nodes: Sequence[Node], tensor: int, pipeline: int) -> list[str]:
    """The pin of each rank's node; empty if the nodes do not have the room.

    The ranks of a stage stay on one node, and stages spread over nodes; a stage goes where the
    fewest ranks are yet, and of those where the least room is left over. Where logical nodes share
    an address, and so a pin, their room cannot be told apart: then Ray is left to choose.
    """
    if len({node.pin for node in nodes}) < len(nodes) or not all(node.pin for node in nodes):
        return []
    taken = dict.fromkeys((node.pin for node in nodes), 0)
    chosen: list[str] = []
    for _ in range(pipeline):
        fitting = [node for node in nodes if node.room - taken[node.pin] >= tensor]
        if not fitting:
            return []
        best = min(fitting, key=lambda node: (taken[node.pin], node.room - taken[node.pin]))
        taken[best.pin] += tensor
        chosen += [best.pin] * tensor
    return chosen


def shortage(nodes: Sequence[Node], need: Mapping[str, float], ranks: int, seconds: float) -> str:
    """What is missing, for whoever asked for too much."""
    each = " and ".join(f"{count:g} {name}" for name, count in need.items())
    rows = ", ".join(f"{node.address} has room for {node.room} of {node.most}" for node in nodes)
    return (
        f"the Ray cluster had no room for {ranks} workers of {each} each within {seconds:g} s: it "
        f"has room for {sum(node.room for node in nodes)} ({rows or 'no node lives'}). Lower "
        "--tensor-parallel-size or --pipeline-parallel-size, or add nodes."
    )
