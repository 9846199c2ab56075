"""What crosses between the engine core and its workers: plans out, results back, and proof of life.

Frozen msgspec records; nothing else is ever decoded on these sockets (no pickle). A step is one
message to each rank and one back from the rank that draws the tokens. Not for: carrying them
(`channel.py`, the next file).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from msgspec import Struct

from octavo.config import Place, WorkerConfig
from octavo.types import StepPlan, StepResult, WorkerInfo


@dataclass(frozen=True, slots=True)
class Keys:
    """One end's keys of an encrypted channel (CurveZMQ), and the core's public one; Z85 texts."""

    core: str
    public: str
    secret: str


@dataclass(frozen=True, slots=True)
class RankSettings:
    """All that a worker's process is told."""

    worker: WorkerConfig
    place: Place
    plans: str  # where plans come from, this rank's alone
    results: str  # where results go to, as those of all ranks
    pulse: str  # where proof of life goes to
    parent: int = 0  # process id of who started it, which it does not outlive; 0: another machine
    keys: Keys | None = None  # of channels that leave the machine


# core -> rank


class Step(Struct, frozen=True, array_like=True, tag="step"):
    """Run this plan, after all that came before it."""

    plan: StepPlan


class Ask(Struct, frozen=True, array_like=True, tag="ask"):
    """Run an operation that is not a step; `ping` does nothing."""

    number: int
    op: str
    args: dict[str, str] = {}


class Leave(Struct, frozen=True, array_like=True, tag="leave"):
    """End."""


ToRank: TypeAlias = Step | Ask | Leave

# rank -> core


class Loading(Struct, frozen=True, array_like=True, tag="loading"):
    """What the start is doing."""

    rank: int
    detail: str


class Up(Struct, frozen=True, array_like=True, tag="up"):
    """The model is loaded; plans may come."""

    rank: int
    info: WorkerInfo


class Landed(Struct, frozen=True, array_like=True, tag="landed"):
    """A step's result, of the one rank that answers."""

    result: StepResult


class Raised(Struct, frozen=True, array_like=True, tag="raised"):
    """A step raised on this rank."""

    rank: int
    step: int
    error: str


class Answer(Struct, frozen=True, array_like=True, tag="answer"):
    """To an `Ask` of the same number."""

    rank: int
    number: int
    result: dict[str, str] = {}
    error: str = ""


class Broken(Struct, frozen=True, array_like=True, tag="broken"):
    """The worker cannot start; `kind` names the exception."""

    rank: int
    error: str
    kind: str


FromRank: TypeAlias = Loading | Up | Landed | Raised | Answer | Broken


class Pulse(Struct, frozen=True, array_like=True, tag="pulse"):
    """Twice a second: a rank lives, and this is how far it has come."""

    rank: int
    steps: int  # begun since the start
    busy: bool  # one of them has not ended
    calls: int  # collectives begun since the start
    call: str = ""  # the last one
    worked: float = 0.0  # seconds of processor time, in a rank that computes on the CPU
