"""Streams whose events are numbered and kept, for clients whose connection breaks.

A client asks for it with the header `X-Octavo-Resume: SECONDS`. Each event then has an id, `<id of
the answer>:<nonce>:<n>`, n from 1, and is kept, the oldest forgotten first beyond a bound of bytes.
When the connection breaks, the request lives on for those seconds, and so do the events of one
that has ended. A stream that nobody reads loses nothing: if its events grow beyond the bounds, it
is ended. Not for: the route (`resume.py`), nor requests that did not ask, which cost nothing here.
Next file: `resume.py`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final

from octavo.errors import Conflict, Forbidden, Gone, InvalidRequest, NotFound
from octavo.obs.streams import StreamMetrics
from octavo.server.feed import Outlet

HEADER: Final = "X-Octavo-Resume"
LAST: Final = "Last-Event-ID"
FORGOTTEN: Final = 1024  # ids of streams that are gone and still told from unknown ones
PART: Final = 16  # one stream may keep this part of all bytes


@dataclass(frozen=True, slots=True)
class KeepLimits:
    """How long, how many and how much of streams is kept."""

    seconds: float = 60.0  # the most that a client may ask for; 0 refuses all
    count: int = 64  # streams that nobody reads
    size: int = 64 * 2**20  # bytes of events of all streams


def seconds_of(headers: Mapping[str, str], longest: float) -> float:
    """The seconds that a client asks for, 0 for none. Raises InvalidRequest."""
    text = headers.get(HEADER)
    if text is None:
        return 0.0
    if not longest:
        raise InvalidRequest(
            f"{HEADER}: this server keeps no streams (--max-resume-seconds 0).", HEADER
        )
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and 0 < int(text) <= longest):
        raise InvalidRequest(
            f"{HEADER} = {text[:40]} must be whole seconds from 1 to {longest:g} "
            "(--max-resume-seconds).",
            HEADER,
        )
    return float(text)


@dataclass(frozen=True, slots=True)
class Wish:
    """Which stream is to go on, for whom, and after which event; `name` is empty for the first."""

    id: str  # of the answer, or the caller's part of it
    tenant: str
    name: str = ""
    after: int = 0


def wish_of(id: str, tenant: str, last: str | None) -> Wish:
    """The wish of a request; `last` is its `Last-Event-ID`. Raises InvalidRequest."""
    if not last:
        return Wish(id, tenant)
    name, _, number = last.rpartition(":")
    whole, _, _ = name.rpartition(":")
    digits = number.isascii() and number.isdigit() and len(number) <= 12
    if not whole or not digits or (id and id not in names_of(whole)):
        of = f"stream {id[:200]}" if id else "a stream"
        raise InvalidRequest(f"{LAST} = {last[:200]} is no id of an event of {of}.", LAST)
    return Wish(id or whole, tenant, name, int(number))


def names_of(id: str) -> tuple[str, str]:
    """The id of an answer, and the caller's part of it: `chatcmpl-abc` and `abc`."""
    return id, id.partition("-")[2]


class Kept:
    """One stream: the sink of its events, and whoever reads it now."""

    def __init__(
        self, streams: Streams, id: str, *, tenant: str, seconds: float, outlet: Outlet
    ) -> None:
        self.id = id
        self.tenant = tenant
        self.name = f"{id}:{secrets.token_hex(3)}"  # an id may be used again, this never is
        self.seconds = seconds
        self.size = 0  # bytes of the events that are kept
        self.ended = False
        self.on_drop: Callable[[], None] = lambda: None  # ends the request
        self._streams = streams
        self._label = b"id: " + self.name.encode() + b":%d\n"
        self._events: deque[bytes] = deque()
        self._is_dropped = False
        self._made = 0  # events so far; the last one has this number
        self._outlet: Outlet | None = outlet
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_read(self) -> bool:
        """True while a connection takes the events."""
        return self._outlet is not None

    @property
    def last(self) -> int:
        """The number of the last event so far."""
        return self._made

    def has_nothing_after(self, after: int) -> bool:
        """True if `after` is the last event that there will be."""
        return self.ended and after == self._made

    def put(self, data: bytes) -> None:
        """Whole events; JSON has no bare line breaks, so an empty line ends each."""
        if self._is_dropped:
            return
        events = []
        for event in data.split(b"\n\n")[:-1]:
            self._made += 1
            events.append(b"%b%b\n\n" % (self._label % self._made, event))
        self._events += events
        numbered = b"".join(events)
        if self._outlet is not None:
            self._outlet.put(numbered)
        self._resize(len(numbered))
        self._streams.has_grown(self)

    def finish(self) -> None:
        """The stream has ended; its events are kept a while."""
        self.ended = True
        if self._outlet is not None:
            self._outlet.finish()

    def read(self, after: int) -> Outlet:
        """An outlet for the events after number `after` and all that come; it takes over.

        Raises InvalidRequest and Gone as `events`.
        """
        data, _ = self.events(after)
        outlet, before = Outlet(), self._outlet
        self._outlet = outlet
        if before is not None:
            before.cut()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if data:
            outlet.put(data)
        if self.ended:
            outlet.finish()
        self._streams.is_read(self)
        return outlet

    def events(self, after: int) -> tuple[bytes, int]:
        """The events after number `after`, and the number of the last one.

        Raises InvalidRequest for a number that does not exist, Gone for one that is forgotten.
        """
        forgotten = self._made - len(self._events)
        if after > self._made:
            raise InvalidRequest(f"{LAST}: event {after} has not been sent.", LAST)
        if after < forgotten:
            raise Gone(
                f"The events of {self.id} before number {forgotten + 1} are not kept any more; "
                "send the request again."
            )
        return b"".join(islice(self._events, after - forgotten, None)), self._made

    def leave(self, outlet: Outlet) -> None:
        """A connection sends no more; if it is the last one, the seconds begin to count."""
        if self._outlet is outlet:
            self._outlet = None
            self._timer = asyncio.get_running_loop().call_later(self.seconds, self._expire)
            self._streams.is_left(self)

    def forget_oldest(self) -> bool:
        """Forgets one event; False if there is none."""
        if not self._events:
            return False
        self._resize(-len(self._events.popleft()))
        return True

    def drop(self) -> None:
        """Ends the request if it still runs, and forgets all."""
        if self._timer is not None:
            self._timer.cancel()
        self._is_dropped = True
        self.on_drop()
        self._events.clear()
        self._resize(-self.size)
        if self._outlet is not None:
            self._outlet.cut()
            self._outlet = None
        self._streams.forget(self)

    def _expire(self) -> None:
        self._streams.lose(self, "expired")

    def _resize(self, change: int) -> None:
        self.size += change
        self._streams.size += change


class Streams:
    """All kept streams of this process."""

    def __init__(self, limits: KeepLimits, metrics: StreamMetrics) -> None:
        self.limits = limits
        self.size = 0  # bytes
        self._metrics = metrics
        self._by_name: dict[str, list[Kept]] = {}
        self._unread: dict[str, Kept] = {}  # by name, the one that was left first comes first
        self._gone: dict[str, str] = {}  # tenants of streams that were lost, by both their names

    def keep(self, id: str, tenant: str, seconds: float, outlet: Outlet) -> Kept:
        """A new stream. Raises Conflict if another one of that id is still kept."""
        if any(one.id == id and one.tenant == tenant for one in self._by_name.get(id, ())):
            raise Conflict(
                f"The stream {id[:200]} is kept and can be resumed; send another X-Request-Id."
            )
        kept = Kept(self, id, tenant=tenant, seconds=seconds, outlet=outlet)
        for name in names_of(id):
            self._by_name.setdefault(name, []).append(kept)
        return kept

    def find(self, wish: Wish) -> Kept:
        """The stream that is wished for.

        Raises NotFound for one that never was, Gone for one that was, Forbidden for another's.
        """
        named = self._by_name.get(wish.id, [])
        own = [kept for kept in named if kept.tenant == wish.tenant]
        for kept in reversed(own):
            if not wish.name or kept.name == wish.name:
                return kept
        if named and not own:
            raise Forbidden(f"The stream {wish.id[:200]} belongs to another key.")
        if self._gone.get(wish.id) == wish.tenant:
            raise Gone(
                f"The stream {wish.id[:200]} is not kept any more: its time is over, or there were "
                "too many. Send the request again."
            )
        raise NotFound(
            f"There is no stream {wish.id[:200]}. Streams are kept for requests with the header "
            f"{HEADER}."
        )

    def is_left(self, kept: Kept) -> None:
        """Nobody reads it now; makes room, of ended streams first, or does not keep it."""
        self._unread[kept.name] = kept
        if len(self._unread) > self.limits.count:
            ended = (one for one in self._unread.values() if one.ended)
            self.lose(next(ended, kept), "count")
        self._tell()

    def is_read(self, kept: Kept) -> None:
        """Somebody reads it again."""
        self._unread.pop(kept.name, None)
        self._metrics.resumed()
        self._tell()

    def has_grown(self, kept: Kept) -> None:
        """Keeps within the bounds of bytes."""
        limits = self.limits
        while self.size > limits.size:
            ended = next((one for one in self._unread.values() if one.ended), None)
            if ended is None:
                break
            self.lose(ended, "size")
        while self.size > limits.size or kept.size > limits.size // PART:
            if not kept.is_read:
                self.lose(kept, "size")
            elif kept.forget_oldest():
                continue
            break
        self._tell()

    def lose(self, kept: Kept, reason: str) -> None:
        """It cannot be kept any longer."""
        self._metrics.lost(reason)
        for name in names_of(kept.id):
            self._gone.pop(name, None)
            self._gone[name] = kept.tenant
        while len(self._gone) > FORGOTTEN:
            del self._gone[next(iter(self._gone))]
        kept.drop()

    def forget(self, kept: Kept) -> None:
        """It is gone."""
        self._unread.pop(kept.name, None)
        for name in names_of(kept.id):
            left = [one for one in self._by_name.get(name, ()) if one is not kept]
            if left:
                self._by_name[name] = left
            else:
                self._by_name.pop(name, None)
        self._tell()

    def _tell(self) -> None:
        self._metrics.held(len(self._unread), self.size)
