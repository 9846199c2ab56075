"""Where the answers of `octavo chat` come from: an engine of its own, or a server.

Not for: the terminal (`chat.py`).
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from octavo.errors import ClientError, EngineDead, InvalidRequest, ServerError
from octavo.options import EngineArgs, client_key

if TYPE_CHECKING:
    from octavo.async_engine import AsyncLLMEngine

Message: TypeAlias = dict[str, str]
T = TypeVar("T")

CONNECT_SECONDS = 5.0
LOADING_SECONDS = 120


class Source(Protocol):
    """Answers conversations. `cut`: the last answer ended at its limit of tokens."""

    cut: bool

    def start(self) -> None:
        """Makes ready, so that the first answer does not wait; optional to call."""

    def answer(self, messages: list[Message]) -> Iterator[str]:
        """The answer's text in pieces; closing the iterator ends the request."""

    def close(self) -> None:
        """Frees what was started."""


def engine_source(args: EngineArgs, sampling: dict[str, Any]) -> Source:
    """An engine in a process of its own, started with the first answer."""
    from octavo.async_engine import AsyncLLMEngine

    return EngineSource(AsyncLLMEngine.from_engine_args(args), sampling)


def server_source(
    url: str, model: str | None, *, key: str | None, sampling: dict[str, Any]
) -> Source:
    """A server that speaks OpenAI's API; its first model if none is named."""
    return ServerSource(url, model, key=key or client_key(), sampling=sampling)


class EngineSource:
    """Runs an `AsyncLLMEngine` for plain code.

    Its event loop has a thread of its own, for the engine sends signs of life that must be heard
    while the person thinks.
    """

    def __init__(self, engine: AsyncLLMEngine, sampling: dict[str, Any]) -> None:
        self._engine = engine
        self._sampling = sampling
        self._count = 0
        self.cut = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def start(self) -> None:
        self._run(self._engine.start())

    def answer(self, messages: list[Message]) -> Iterator[str]:
        self._count += 1
        self.cut = False
        pieces = self._pieces(messages, f"chat-{self._count}")
        try:
            while (piece := self._run(_next(pieces))) is not None:
                if piece:
                    yield piece
        finally:
            self._run(pieces.aclose())

    def close(self) -> None:
        self._run(self._engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; an interruption of this thread cancels it and waits for its end."""
        done = threading.Event()

        async def noted() -> T:
            try:
                return await work
            finally:
                done.set()

        future = asyncio.run_coroutine_threadsafe(noted(), self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            done.wait()
            raise

    async def _pieces(self, messages: list[Message], name: str) -> AsyncGenerator[str, None]:
        from octavo.sampling_params import RequestOutputKind, SamplingParams
        from octavo.text.chat import validate_messages

        text = await self._engine.start()
        if text.chat_template is None:
            raise InvalidRequest(
                "This model has no chat template; use `octavo run` to complete text.", "messages"
            )
        rendered = text.chat_template.render(validate_messages(messages))
        ids = text.chat_template.encode(rendered, text.tokenizer)
        values = {**text.generation_defaults, **self._sampling}
        params = SamplingParams(**values, output_kind=RequestOutputKind.DELTA)
        outputs = self._engine.generate({"prompt_token_ids": ids}, params, name)
        async with aclosing(outputs):  # else an interruption would leave the request running
            async for output in outputs:
                self.cut = output.outputs[0].finish_reason == "length"
                yield output.outputs[0].text


async def _next(pieces: AsyncGenerator[str, None]) -> str | None:
    return await anext(pieces, None)


class ServerSource:
    """Streams from `/v1/chat/completions`."""

    def __init__(
        self, url: str, model: str | None, *, key: str | None, sampling: dict[str, Any]
    ) -> None:
        import httpx

        named = url if "://" in url else f"http://{url}"
        base = named.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        self._client = httpx.Client(base_url=base, headers=headers, timeout=timeout)
        self._model = model
        self._sampling = sampling
        self.cut = False

    def start(self) -> None:
        import httpx

        if self._model is not None:
            return
        for _ in range(LOADING_SECONDS):
            try:
                reply = self._client.get("/v1/models")
            except httpx.HTTPError as error:
                raise EngineDead(self._unreachable(error)) from None
            if reply.status_code != 503:
                break
            time.sleep(1)  # the model is still loading
        _refuse(reply.status_code, reply.text)
        self._model = str(reply.json()["data"][0]["id"])

    def answer(self, messages: list[Message]) -> Iterator[str]:
        import httpx

        self.start()
        self.cut = False
        body = {"model": self._model, "messages": messages, "stream": True, **self._sampling}
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as reply:
                if reply.status_code != 200:
                    _refuse(reply.status_code, reply.read().decode(errors="replace"))
                for piece, reason in _events(reply.iter_lines()):
                    self.cut = self.cut or reason == "length"
                    if piece:
                        yield piece
        except httpx.HTTPError as error:
            raise EngineDead(self._unreachable(error)) from None

    def close(self) -> None:
        self._client.close()

    def _unreachable(self, error: Exception) -> str:
        return f"{self._client.base_url} does not answer ({error}); is `octavo serve` running?"


def _events(lines: Iterator[str]) -> Iterator[tuple[str, str | None]]:
    """Text and finish reason of each event of a stream. Raises ServerError for an error event."""
    for line in lines:
        data = line.removeprefix("data: ")
        if data == line or data == "[DONE]":
            continue  # comments and blank lines between events
        event = json.loads(data)
        if "error" in event:
            raise ServerError(str(event["error"].get("message", event["error"])))
        for choice in event.get("choices", []):
            yield choice.get("delta", {}).get("content") or "", choice.get("finish_reason")


def _refuse(status: int, body: str) -> None:
    """Raises what an HTTP error says; nothing for success."""
    if status < 400:
        return
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = body.strip() or "no reason given"
    kind = ClientError if status < 500 else ServerError
    raise kind(f"The server answered {status}: {message}")
