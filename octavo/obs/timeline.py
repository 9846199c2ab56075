"""Where the time of a request went, and why the prefix cache missed; a ring of the last ones.

A `Timeline` is filled in while its request runs, by whoever has it in hand: the edge of the server,
the handler, the text engine, and, through `TraceEvent`s, the engine core. It is put into words only
when somebody asks. What one tenant did is never told to another: `Viewer` says who is asking.
Times are `time.monotonic()` seconds here and milliseconds since arrival where they are shown.
Not for: metrics (`metrics.py`), or the writing of events in the core (`engine/trace.py`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from octavo.obs.stats import RequestTimes
from octavo.types import TraceEvent

MAX_SEQUENCES = 16  # of a request that are followed one by one
LACKS: Final = ("sequences", "pages", "budget")  # order of a "queue" event's values

# Reasons of a "prefix" event, in words.
_MISSES: Final = {
    "hit": "all that can be reused was found",
    "new": "nothing that goes on like this was seen",
    "evicted": "it was here and its pages were taken for other tokens",
    "reset": "it was here and the cache was reset",
    "recovery": "it was here and a failed step emptied the cache",
    "salt": "it is here under another cache_salt",
    "adapter": "it is here under another adapter",
    "short": "the prompt is shorter than a page and the token that is always computed",
    "off": "prefix caching is off",
    "prompt_logprobs": "prompt_logprobs need every token computed",
}


@dataclass(frozen=True, slots=True)
class Viewer:
    """Who asks: a tenant, which sees its own, or somebody who may see all."""

    tenant: str = ""
    all: bool = True

    def sees(self, tenant: str) -> bool:
        """True if what this tenant did may be told."""
        return self.all or tenant == self.tenant


@dataclass(slots=True, eq=False)
class Timeline:
    """One request, in the order in which it went through the server. 0.0 is "not yet"."""

    id: str
    route: str
    tenant: str
    began: float  # its headers were there
    read: float  # its body was read and checked
    wall: float = field(default_factory=time.time)  # seconds since 1970, at `read`
    prepared: float = 0.0  # templates and tokens were made
    finished: float = 0.0  # the last byte was handed over, or the client was gone
    status: int = 0
    detokenize: float = 0.0  # seconds, of all tokens together
    write: float = 0.0  # seconds of making events and writing them to the socket
    flush: float = 0.0  # seconds of waiting for the socket
    num_sequences: int = 0
    sequences: list[RequestTimes] = field(default_factory=list)
    core_ids: list[str] = field(default_factory=list)
    index: dict[str, Timeline] = field(default_factory=dict)  # by id in the core, of the ring

    def add(self, core_id: str, times: RequestTimes) -> None:
        """A sequence was submitted; many choices are counted, and the first ones followed."""
        self.num_sequences += 1
        if len(self.sequences) < MAX_SEQUENCES:
            self.sequences.append(times)
            self.core_ids.append(core_id)
            self.index[core_id] = self

    def phases(self) -> dict[str, float]:
        """Seconds by phase, in order; phases that have not begun are left out."""
        shown = {"read": self.read - self.began}
        if not self.prepared:
            return shown
        shown["tokenize"] = self.prepared - self.read
        first = [times.scheduled for times in self.sequences if times.scheduled]
        if first:
            shown["queue"] = max(0.0, min(first) - self.prepared)
            if tokens := [times.first_token for times in self.sequences if times.first_token]:
                shown["prefill"] = max(0.0, min(tokens) - min(first))
                last = max(times.last_token for times in self.sequences)
                shown["decode"] = max(0.0, last - min(tokens))
        elif self.finished and self.sequences:  # it ended in the queue
            shown["queue"] = max(0.0, self.finished - self.prepared)
        shown["detokenize"] = self.detokenize
        shown["write"] = self.write
        shown["flush"] = self.flush
        return shown

    def waited_for(self) -> str:
        """What it waited for longest in the queue: step, order, sequences, pages or budget."""
        waits = [queue_of(times) for times in self.sequences]
        longest = {name: value for wait in waits[:1] for name, value in wait.items()}
        return max(longest, key=lambda name: longest[name], default="")

    def header(self) -> str:
        """The value of a `Server-Timing` header, as far as the request has come."""
        parts = []
        for name, seconds in self.phases().items():
            why = self.waited_for() if name == "queue" and seconds > 0 else ""
            parts.append(f"{name};dur={1000 * seconds:.3f}" + (f';desc="{why}"' if why else ""))
        return ", ".join([*parts, f"total;dur={1000 * (time.monotonic() - self.began):.3f}"])


def queue_of(times: RequestTimes) -> dict[str, float]:
    """Seconds in the queue by what they were spent for, all stays together.

    `step`: until the step that was running had ended. `order`: behind requests that came first.
    Then what was lacking once it was the first.
    """
    waits = dict.fromkeys(("step", "order", *LACKS), 0.0)
    first = True
    for event in times.events:
        if event.kind != "queue":
            continue
        since, order, *lacks = event.values
        if first:
            waits["step"] += max(0.0, since - times.arrival)
        waits["order"] += order
        for name, seconds in zip(LACKS, lacks, strict=False):
            waits[name] += seconds
        first = False
    return waits


class Timelines:
    """The last requests, by the id of their answer and by the caller's own id."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ring: deque[Timeline] = deque()
        self._by_name: dict[tuple[str, str], Timeline] = {}  # and by tenant: nobody hides another's
        self._by_core_id: dict[str, Timeline] = {}

    def __len__(self) -> int:
        return len(self._ring)

    def put(self, timeline: Timeline) -> None:
        """Takes a request in; the oldest goes if there are too many."""
        self._ring.append(timeline)
        timeline.index = self._by_core_id
        for name in _names(timeline):
            self._by_name[timeline.tenant, name] = timeline
        while len(self._ring) > self.size:
            self._drop(self._ring.popleft())

    def _drop(self, old: Timeline) -> None:
        for name in _names(old):
            if self._by_name.get((old.tenant, name)) is old:
                del self._by_name[old.tenant, name]
        for core_id in old.core_ids:
            self._by_core_id.pop(core_id, None)
        old.index = {}  # sequences that it starts from now on would never be dropped

    def find(self, name: str, viewer: Viewer) -> Timeline | None:
        """The latest request of that id which the viewer may see."""
        if not viewer.all:
            return self._by_name.get((viewer.tenant, name))
        return next((one for one in reversed(self._ring) if name in _names(one)), None)

    def body(self, timeline: Timeline, viewer: Viewer) -> dict[str, object]:
        """All that is known of a request, in words and milliseconds."""
        now = timeline.finished or time.monotonic()
        start = timeline.began
        phases = timeline.phases()
        firsts = [times.first_token for times in timeline.sequences if times.first_token]
        return {
            "id": timeline.id,
            "object": "request.timeline",
            "route": timeline.route,
            "created": round(timeline.wall, 3),
            "tenant": timeline.tenant or None,
            "status": timeline.status or None,
            "finished": bool(timeline.finished),
            "total_ms": _ms(now - start),
            "first_token_ms": _ms(min(firsts) - start) if firsts else None,
            "phases_ms": {name: _ms(seconds) for name, seconds in phases.items()},
            "num_sequences": timeline.num_sequences,
            "sequences": [
                self._sequence(times, index, start, viewer)
                for index, times in enumerate(timeline.sequences)
            ],
        }

    def _sequence(
        self, times: RequestTimes, index: int, start: float, viewer: Viewer
    ) -> dict[str, object]:
        def since(moment: float) -> float | None:
            return _ms(moment - start) if moment else None

        chunks, preemptions, ahead = [], [], [0.0] * len(LACKS)
        prefix: dict[str, object] | None = None
        for event in times.events:
            if event.kind == "chunk":
                first, length, landed, step = event.values
                chunks.append(
                    {
                        "first_token": int(first),
                        "tokens": int(length),
                        "planned_ms": since(event.at),
                        "landed_ms": since(landed),
                        "step": int(step),
                    }
                )
            elif event.kind == "preempted":
                by = self._public(event, viewer)
                preemptions.append({"at_ms": since(event.at), "cause": event.text, "by": by})
            elif event.kind == "prefix":
                prefix = self._prefix(event, viewer)
            else:
                lacked = event.values[2 + len(LACKS) :]
                ahead = [one + more for one, more in zip(ahead, lacked, strict=True)]
        return {
            "index": index,
            "reason": times.reason or None,
            "prompt_tokens": times.prompt_tokens,
            "cached_tokens": times.cached_tokens,
            "generated_tokens": times.generation_tokens,
            "queue": {
                "left_ms": since(times.scheduled),
                **{f"{name}_ms": _ms(wait) for name, wait in queue_of(times).items()},
                "ahead_lacked_ms": {
                    name: _ms(wait) for name, wait in zip(LACKS, ahead, strict=True)
                },
            },
            "prefix_cache": prefix,
            "prefill_chunks": chunks,
            "preemptions": preemptions,
            "first_token_ms": since(times.first_token),
            "last_token_ms": since(times.last_token),
            "longest_gap_ms": _ms(times.longest_gap),
            "finished_ms": since(times.finished),
        }

    def _prefix(self, event: TraceEvent, viewer: Viewer) -> dict[str, object]:
        found, reusable, *more = event.values
        reason = event.text
        hidden = not viewer.sees(event.tenant)
        if reason in ("salt", "adapter") and hidden:
            reason, more = "new", [more[0], 0]  # that another tenant asked the same is no news
        shown: dict[str, object] = {
            "found_tokens": int(found),
            "reusable_tokens": int(reusable),
            "reason": reason,
            "because": _MISSES[reason],
        }
        if len(more) >= 2 and reusable > found:
            shown["first_differing_block"] = int(more[0])
            shown["would_have_hit_tokens"] = int(more[1])
        if reason == "evicted":
            if event.who in ("reset", "recovery"):
                shown["reason"], shown["because"] = event.who, _MISSES[event.who]
            else:
                shown["evicted_by"] = self._public(event, viewer)
            shown["evicted_seconds_ago"] = round(more[2], 3)
        return shown

    def _public(self, event: TraceEvent, viewer: Viewer) -> str | None:
        """The public id of the request that was the cause, if it is known and may be told."""
        found = self._by_core_id.get(event.who)
        if found is None or not viewer.sees(event.tenant):
            return None
        return found.id


def log_fields(timeline: Timeline) -> dict[str, object]:
    """What the log says of a finished request, on one line."""
    phases, sequences = timeline.phases(), timeline.sequences
    firsts = [times.first_token for times in sequences if times.first_token]
    return {
        "id": timeline.id,
        "route": timeline.route,
        "tenant": timeline.tenant or "-",
        "status": timeline.status or 499,
        "reason": ",".join(sorted({times.reason or "none" for times in sequences})) or "none",
        "prompt_tokens": sum(times.prompt_tokens for times in sequences),
        "cached_tokens": sum(times.cached_tokens for times in sequences),
        "output_tokens": sum(times.generation_tokens for times in sequences),
        "preemptions": sum(times.preemptions for times in sequences),
        "queue_ms": _ms(phases.get("queue", 0.0)),
        "queued_for": timeline.waited_for() or "-",
        "ttft_ms": _ms(min(firsts) - timeline.began) if firsts else "-",
        "total_ms": _ms((timeline.finished or time.monotonic()) - timeline.began),
    }


def _names(timeline: Timeline) -> Sequence[str]:
    """The answer's id, and the caller's part of it: `chatcmpl-abc` and `abc`."""
    return (timeline.id, timeline.id.partition("-")[2])


def _ms(seconds: float) -> float:
    return round(1000 * max(0.0, seconds), 3)
