"""Chat and run, against a small server that speaks OpenAI's API and against fakes."""

from __future__ import annotations

import http.server
import io
import json
import sys
import threading
import types
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import pytest

from octavo.cli.chat import Conversation
from octavo.cli.chat_sources import EngineSource, Message, server_source
from octavo.cli.main import main
from octavo.errors import ClientError, EngineDead, ServerError
from octavo.options import EngineArgs
from octavo.text.chat import ChatTemplate
from tests.text.samples import CHATML, chat_tokenizer


class Fake(http.server.BaseHTTPRequestHandler):
    """Answers with the words of the last question, one an event."""

    seen: list[dict[str, Any]] = []  # noqa: RUF012 - replaced by each server
    key = ""
    loading = 0  # answers that are still 503

    def do_GET(self) -> None:
        if self.loading:
            type(self).loading -= 1
            self._send(503, "application/json", '{"error": {"message": "loading"}}')
            return
        self._send(200, "application/json", json.dumps({"data": [{"id": "tiny"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(body)
        if self.key and self.headers.get("Authorization") != f"Bearer {self.key}":
            self._send(401, "application/json", '{"error": {"message": "wrong key"}}')
            return
        question = body["messages"][-1]["content"]
        events = [": keep-alive\n\n", _event({"role": "assistant", "content": ""})]
        for word in question.split(" "):
            events.append(_event({"content": word + " "}))
        if "endless" in question:
            events.append(_event({}, "length"))
        if "explode" in question:
            events.append('data: {"error": {"message": "it blew up"}}\n\n')
        events.append("data: [DONE]\n\n")
        self._send(200, "text/event-stream", "".join(events))

    def _send(self, status: int, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def _event(delta: dict[str, str], reason: str | None = None) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


@pytest.fixture
def server() -> Iterator[tuple[str, type[Fake]]]:
    handler = type("Handler", (Fake,), {"seen": []})
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}", handler
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_one_question_prints_the_answer_alone(
    server: tuple[str, type[Fake]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, handler = server
    words = ["chat", "--url", url, "--system", "Be brief.", "--max-tokens", "9", "ça va 日本 ?"]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert captured.out == "ça va 日本 ? \n"
    assert captured.err == ""
    body = handler.seen[0]
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ça va 日本 ?"},
    ]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("tiny", 9, 0.0)
    assert body["stream"] is True


def test_an_answer_that_was_cut_says_so(
    server: tuple[str, type[Fake]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["chat", "--url", server[0], "endless tale"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "endless tale \n"
    assert "cut at its limit of tokens; --max-tokens" in captured.err
    monkeypatch.setattr(sys, "stdin", io.StringIO("endless\nshort\n"))
    assert main(["chat", "--url", server[0]]) == 0
    assert capsys.readouterr().out.count("cut at its limit") == 1


def test_a_wrong_key_is_told(
    server: tuple[str, type[Fake]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, handler = server
    handler.key = "sesame"
    assert main(["chat", "--url", f"{url}/v1", "--api-key", "x", "hello"]) == 1
    assert "answered 401: wrong key" in capsys.readouterr().err
    assert main(["chat", "--url", url, "--api-key", "sesame", "hello"]) == 0


def test_a_server_that_loads_is_waited_for(
    server: tuple[str, type[Fake]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, handler = server
    handler.loading = 3
    waits: list[float] = []
    monkeypatch.setattr("octavo.cli.chat_sources.time.sleep", waits.append)
    assert main(["chat", "--url", url, "hello"]) == 0
    assert capsys.readouterr().out == "hello \n"
    assert len(waits) == 3


def test_no_server_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:9", "hello"]) == 1
    assert "is `octavo serve` running?" in capsys.readouterr().err


def test_an_error_in_the_stream_is_raised(server: tuple[str, type[Fake]]) -> None:
    source = server_source(server[0], "m", key=None, sampling={})
    pieces = source.answer([{"role": "user", "content": "explode now"}])
    assert next(pieces) == "explode "
    with pytest.raises(ServerError, match="it blew up"):
        list(pieces)
    source.close()


def test_a_conversation_from_standard_input(
    server: tuple[str, type[Fake]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = "one\n/system Sing.\n\ntwo\nagain\n/nonsense\n/clear\nthree\n/help\n/exit\nnever\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert main(["chat", "--url", server[0]]) == 0
    roles = [[m["role"] for m in body["messages"]] for body in server[1].seen]
    turn = ["user", "assistant"]
    assert roles == [
        ["user"],
        ["system", *turn, "user"],
        ["system", *turn, *turn, "user"],
        ["system", "user"],
    ]
    assert server[1].seen[1]["messages"][2]["content"] == "one "
    text = capsys.readouterr().out
    assert "There is no /nonsense" in text
    assert "Instruction: Sing." in text


class Scripted:
    """A source that does what the test says."""

    cut = False

    def __init__(self, answer: Callable[[list[Message]], Iterator[str]]) -> None:
        self.answer = answer

    def start(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("error", [KeyboardInterrupt(), EngineDead("gone"), ClientError("long")])
def test_a_broken_answer_keeps_what_came(error: BaseException) -> None:
    def answer(_: list[Message]) -> Iterator[str]:
        yield "half"
        raise error

    def nothing(_: list[Message]) -> Iterator[str]:
        raise error
        yield ""

    conversation = Conversation(Scripted(nothing))
    with pytest.raises(type(error)):
        conversation.ask("q")
    assert conversation.messages == []
    conversation.source = Scripted(answer)
    with pytest.raises(type(error)):
        conversation.ask("q")
    assert [m["content"] for m in conversation.messages] == ["q", "half"]


class FakeLLM:
    """Stands in for `octavo.llm.LLM`: answers with the prompt in capitals."""

    made: list[EngineArgs] = []  # noqa: RUF012 - replaced by each test

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> FakeLLM:
        cls.made.append(args)
        return cls()

    def get_default_sampling_params(self) -> Any:
        from octavo.sampling_params import SamplingParams

        return SamplingParams(temperature=0.5)

    def generate(self, prompts: list[str], params: list[Any], *, use_tqdm: bool) -> list[Any]:
        return [self._output(p, q) for p, q in zip(prompts, params, strict=True)]

    def chat(self, messages: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
        return self.generate([f"<{m[0]['content']}>" for m in messages], params, use_tqdm=use_tqdm)

    def _output(self, prompt: str, params: Any) -> Any:
        text = f"{prompt.upper()} {params.temperature:g} {params.max_tokens}"
        choice = types.SimpleNamespace(index=0, text=text, token_ids=[1, 2], finish_reason="stop")
        return types.SimpleNamespace(outputs=[choice] * params.n, prompt_token_ids=[1])


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    fake = type("LLM", (FakeLLM,), {"made": []})
    module = types.ModuleType("octavo.llm")
    module.__dict__["LLM"] = fake
    monkeypatch.setitem(sys.modules, "octavo.llm", module)
    return fake


def test_run_prints_text_for_one_prompt(
    llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "hello", "--model", "folder", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "HELLO 0 256\n"
    assert llm.made[0].model == "folder"
    assert main(["run", "--chat", "hello"]) == 0
    assert capsys.readouterr().out == "<HELLO> 0.5 256\n"


def test_run_prints_json_lines_for_many(
    llm: type[FakeLLM],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Any,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO('a\n\n{"prompt": "b", "max_tokens": 3}\n'))
    path = tmp_path / "more.jsonl"
    path.write_text('{"prompt": "é", "temperature": 1}\n', encoding="utf-8")
    assert main(["run", "-", "--input", str(path), "--n", "2"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["text"] for row in rows[::2]] == ["A 0.5 256", "B 0.5 3", "É 1 256"]
    assert rows[0]["finish_reason"] == "stop"
    assert (rows[0]["prompt_tokens"], rows[0]["completion_tokens"]) == (1, 2)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "b"}', "line 1: not a JSON object with a prompt"),
        ('{"prompt"', "line 1: not a JSON object"),
        ('{"prompt": "b", "temprature": 1}', "temprature"),
        ('{"prompt": "b", "top_p": 7}', "top_p"),
    ],
)
def test_run_refuses_bad_lines(
    llm: type[FakeLLM],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
    words: str,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(line))
    assert main(["run", "-"]) == 1
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--max-num-seqs", "3"], "--max-num-seqs"),
        (["--no-enable-prefix-caching"], "--enable-prefix-caching"),
        (["--config", "gone.toml"], "--config"),
    ],
)
def test_flags_of_an_engine_do_not_go_with_a_server(
    server: tuple[str, type[Fake]],
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    named: str,
) -> None:
    url, handler = server
    assert main(["chat", "--url", url, *flags, "hello"]) == 1
    assert f"octavo: {named} is for an engine of its own" in capsys.readouterr().err
    assert handler.seen == []
    assert main(["chat", "--url", url, "--model", "m", "--seed", "5", "hello"]) == 0
    assert (handler.seen[0]["model"], handler.seen[0]["seed"]) == ("m", 5)


def test_a_key_without_a_server_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--api-key", "k", "hello"]) == 1
    assert "name it with --url" in capsys.readouterr().err


def test_a_conversation_has_one_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--n", "2", "hello"]) == 2
    assert "--n is not an option" in capsys.readouterr().err


async def test_closing_an_answer_ends_the_request() -> None:
    closed: list[bool] = []

    class Engine:
        """As much of an engine as a question needs."""

        async def start(self) -> Any:
            tokenizer = chat_tokenizer()
            template = ChatTemplate(CHATML, tokenizer)
            return types.SimpleNamespace(
                chat_template=template, tokenizer=tokenizer, generation_defaults={}
            )

        async def generate(self, *_: Any) -> AsyncGenerator[Any, None]:
            try:
                while True:
                    yield types.SimpleNamespace(
                        outputs=[types.SimpleNamespace(text="hoo", finish_reason=None)]
                    )
            finally:
                closed.append(True)

    source = EngineSource(Engine(), {})  # type: ignore[arg-type]
    pieces = source._pieces([{"role": "user", "content": "Hi"}], "a")
    assert await anext(pieces) == "hoo"
    await pieces.aclose()
    assert closed == [True]
    source._loop.call_soon_threadsafe(source._loop.stop)
    source._thread.join()
    source._loop.close()
