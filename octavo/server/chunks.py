"""What the events of both generating routes share: how each begins and ends, and the counts.

Most events differ from each other in two places only, so they are put together from parts that
were encoded once. Not for: what lies between (`chat.py`, `completions.py`).
Next file: `stream.py`.
"""

from __future__ import annotations

import msgspec

from octavo.obs.timeline import Viewer
from octavo.server.answer import Call, head
from octavo.server.generation import Counter, Job
from octavo.server.schema import Generation
from octavo.text.assembler import Delta

encode = msgspec.json.encode

UNFINISHED = b',"finish_reason":null}]'


class Frame:
    """The frame around the choices of one streamed answer; `kind` is its `object`."""

    def __init__(self, call: Call, body: Generation, job: Job, kind: str) -> None:
        self._head = head(call, kind)
        self._prefix = b"data: " + encode(self._head)[:-1] + b',"choices":[{"index":'
        self.has_roles = False
        self._unopened = set(range(job.num_choices))
        self._counter = Counter(job)
        options = body.stream_options
        wanted = options is not None and bool(options.include_usage)
        self._usage_at_end = wanted or call.serving.settings.force_include_usage
        self._usage_each = wanted and options is not None and bool(options.continuous_usage_stats)
        self._ids = bool(body.return_token_ids)
        told = options is not None and bool(options.include_timeline)
        self._timeline = call.timeline if told else None
        self._timelines = call.serving.timelines

    def roles(self, role: bytes, prompt_ids: list[int] | None) -> bytes:
        """The first events of all choices, in their order, before anything else.

        Clients that fold a stream make room for choices as they come, and look for choice 0 first.
        """
        self.has_roles = True
        parts = [b',"delta":{"role":', role, b',"content":""}', UNFINISHED]
        more = [] if prompt_ids is None else [b',"prompt_token_ids":', encode(prompt_ids)]
        return b"".join(
            self.event(index, parts if index else [*parts, *more])
            for index in sorted(self._unopened)
        )

    def count(self, index: int, delta: Delta) -> None:
        """Counts a delta."""
        self._counter.count(index, delta)

    def opens(self, index: int, delta: Delta) -> bool:
        """Counts a delta; True if it is the first of its choice."""
        self._counter.count(index, delta)
        if index not in self._unopened:
            return False
        self._unopened.remove(index)
        return True

    def event(self, index: int, parts: list[bytes]) -> bytes:
        """One event of choice `index`; `parts` go from its index to the end of the choices."""
        usage = b',"usage":' + encode(self._counter.usage.body()) if self._usage_each else b""
        return b"".join((self._prefix, b"%d" % index, *parts, usage, b"}\n\n"))

    def thought(self, tokens: int) -> None:
        """So many of the tokens that were counted are reasoning."""
        usage = self._counter.usage
        usage.reasoning_tokens = (usage.reasoning_tokens or 0) + tokens

    def tail(self, delta: Delta, reason: str | None = None) -> list[bytes]:
        """The last parts of an event with news: token ids if wanted, and why the choice ended.

        `reason` is said in place of the delta's own.
        """
        parts = [b',"token_ids":', encode(delta.token_ids)] if self._ids else []
        if delta.finish_reason is None:
            parts.append(UNFINISHED)
        else:
            parts += (b',"finish_reason":', encode(reason or delta.finish_reason))
            parts += (b',"stop_reason":', encode(delta.stop_reason), b"}]")
        return parts

    def usage(self) -> bytes:
        """The last events, without choices: the timeline and the usage, each if wanted."""
        timeline = self._timeline_event()
        if not self._usage_at_end:
            return timeline
        last = {**self._head, "choices": [], "usage": self._counter.usage.body()}
        return timeline + b"data: " + encode(last) + b"\n\n"

    def _timeline_event(self) -> bytes:
        timeline, timelines = self._timeline, self._timelines
        if timeline is None or timelines is None:
            return b""
        told = timelines.body(timeline, Viewer(timeline.tenant, all=False))
        last = {**self._head, "choices": [], "timeline": told}
        return b"data: " + encode(last) + b"\n\n"
