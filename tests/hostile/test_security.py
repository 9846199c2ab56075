"""Attacks that need no real engine: code and addresses in data, odd requests, template escapes.

`docs/security.md` names the tests here. Not for: bad values (`test_bad_inputs.py`), nor what needs
processes (`test_security_live.py`).
"""

from __future__ import annotations

import ast
import hmac
import json
import re
import re._constants as codes
import re._parser as parser
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import octavo
from octavo.errors import OctavoError
from octavo.server import openapi
from octavo.server.app import ROUTES, create_app
from octavo.server.settings import ServerSettings
from octavo.text.chat import ChatTemplate
from tests.server.asgi import call
from tests.server.fake_engine import FakeEngine
from tests.server.test_http import raw, served
from tests.text.samples import chat_tokenizer

PACKAGE = Path(octavo.__file__).parent
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

# -- what the code cannot do --

# Modules that turn bytes into objects or code, or start a shell.
FORBIDDEN = {
    *("pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "runpy", "code"),
    *("codeop", "xmlrpc", "xml", "telnetlib", "ftplib", "pty"),
}
CALLS = {"eval", "exec", "__import__", "system", "popen", "literal_eval"}
# These start a program: its name and arguments are ours, and never those of a caller.
STARTS_PROGRAMS = {
    "executor/spawn.py",
    "checkpoint/pull.py",
    "cli/doctor.py",
    "grammar/checker.py",
    "kernels/cpu/build.py",
    "platform/gateway.py",  # the proxy that an operator asks for
    "supervisor.py",
}
FETCHES = ("httpx", "requests", "urllib", "aiohttp", "socket", "http", "huggingface_hub")
# The only rooms that open connections or ask other machines: the command line, the model hub, the
# gateway and the router before the operator's own servers, and what starts workers on other
# machines, at addresses that the operator or Ray has given.
MAY_FETCH = re.compile(
    r"cli/|bench/|platform/(gateway|route)\.py|checkpoint/(hub|pull)\.py|server/run\.py"
    r"|server/protocol\.py"
    r"|executor/(ray|checkup)\.py|parallel/world\.py"
)


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text())


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [name.name for name in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module]
    return []


def called(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def test_no_data_becomes_code() -> None:
    """No pickle, eval, exec, shell or unsafe yaml anywhere, and no foreign module is imported."""
    for name, tree in trees():
        for node in ast.walk(tree):
            for module in imported(node):
                assert module.partition(".")[0] not in FORBIDDEN, (name, module)
                if module.partition(".")[0] == "subprocess":
                    assert name in STARTS_PROGRAMS, name
            what = called(node)
            is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if what in CALLS:
                owner = ast.unparse(node.func) if is_method else what  # type: ignore[attr-defined]
                # A module in training mode or not; nothing is evaluated.
                assert owner.endswith(".eval"), (name, owner)
                assert not node.args, (name, owner)  # type: ignore[attr-defined]
            if isinstance(node, ast.Call):
                shells = [key for key in node.keywords if key.arg == "shell"]
                assert not shells, name
                whole = ast.unparse(node.func)
                assert whole not in ("torch.load", "yaml.load", "np.load", "numpy.load"), name
            if isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "allow_pickle"):
                assert ast.unparse(node.value) == "False", name


def test_the_rule_sees_what_it_forbids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.hostile.test_security.PACKAGE", tmp_path)
    for bad in (
        "import pickle",
        "from marshal import loads",
        "eval('1')",
        "model.eval('1')",
        "os.system('x')",
        "run('x', shell=True)",
        "torch.load(f)",
        "yaml.load(f)",
        "import subprocess",
        "load(trust_remote_code=True)",
    ):
        (tmp_path / "bad.py").write_text(bad)
        with pytest.raises(AssertionError):
            test_no_data_becomes_code()


def test_the_server_fetches_nothing() -> None:
    """No room that handles requests has a client of any kind in it."""
    for name, tree in trees():
        if MAY_FETCH.match(name):
            continue
        for node in ast.walk(tree):
            for module in imported(node):
                root = module.partition(".")[0]
                assert root not in FETCHES or module in ("http", "urllib.parse"), (name, module)


def test_handlers_open_no_files() -> None:
    """A path in a request cannot be read: no handler opens any file."""
    for name, tree in trees():
        if not name.startswith("server/") or name in ("server/run.py", "server/keys.py"):
            continue
        for node in ast.walk(tree):
            opens = isinstance(node, ast.Call) and ast.unparse(node.func) == "open"
            assert not opens, name
            assert called(node) not in ("read_text", "FileResponse"), name
            assert "StaticFiles" not in imported(node), name


def test_no_check_is_an_assert() -> None:
    """With asserts taken out (python -O) bad requests are refused all the same."""
    script = (
        "import asyncio\n"
        "from octavo.server.app import create_app\n"
        "from tests.hostile.bad_inputs import ENTRIES\n"
        "from tests.server import test_bad_input as t\n"
        "from tests.server.asgi import call\n"
        "from tests.server.fake_engine import FakeEngine\n"
        "async def main():\n"
        "    app = create_app(FakeEngine())\n"
        "    wrong = []\n"
        "    table = [(p, b) for p, _, b in ENTRIES]\n"
        "    table += [(t.COMPLETIONS, {'prompt': 'x', **b}) for _, b in t.BOTH]\n"
        "    table += [(t.CHAT, {'messages': [t.USER], **b}) for _, b in t.ONLY_CHAT]\n"
        "    for path, body in table:\n"
        "        reply = await call(app, 'POST', path.replace('{model}', 'owl-1'), body)\n"
        "        if reply.status != 400:\n"
        "            wrong.append((reply.status, path, str(body)[:200]))\n"
        "    print(len(table), wrong)\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-O", "-c", script]
    root = PACKAGE.parent
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=root)
    assert done.returncode == 0, done.stderr[-2000:]
    number, _, wrong = done.stdout.partition(" ")
    assert int(number) > 200
    assert wrong.strip() == "[]", wrong


# -- regular expressions --


def unbounded(item: Any) -> bool:
    return item[0] in (codes.MAX_REPEAT, codes.MIN_REPEAT) and item[1][1] is codes.MAXREPEAT


def nested(pattern: Any, inside: bool = False) -> bool:
    """True if one endless repetition holds another one that could share its letters with it.

    A repetition that begins with a fixed letter takes one way only, and is let pass.
    """
    for item in pattern:
        kind, value = item
        if kind in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            endless = unbounded(item)
            body = value[2]
            if inside and endless and len(pattern) == 1:
                return True
            if nested(body, inside or endless):
                return True
        elif kind is codes.SUBPATTERN:
            if nested(value[3], inside and len(pattern) == 1):
                return True
        elif kind is codes.BRANCH and any(nested(branch, inside) for branch in value[1]):
            return True
    return False


def patterns() -> Iterator[tuple[str, str]]:
    for name, tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            if ast.unparse(node.func) not in {
                f"re.{verb}" for verb in ("compile", "match", "search", "sub", "split", "fullmatch")
            }:
                continue
            text = node.args[0]
            if isinstance(text, ast.Constant):
                value = text.value
                yield name, value.decode("latin-1") if isinstance(value, bytes) else value


def test_no_regular_expression_of_ours_is_catastrophic() -> None:
    for bad in ("(a+)+b", "(a*)*", "((a|b)+)+$", "(?:x*)*y"):
        assert nested(parser.parse(bad)), bad
    found = list(patterns())
    assert len(found) > 5
    for name, pattern in found:
        assert not nested(parser.parse(pattern)), (name, pattern)


@pytest.mark.parametrize("filler", ["<tool_call>", "<think>", "{", "[", '"', "\\", "{{", "</", "`"])
async def test_answers_full_of_openings_are_read_in_time(filler: str) -> None:
    """What a model writes may be anything; reading it takes time in proportion to its length."""
    engine = FakeEngine()
    ids = engine.tokenizer.encode_plain(filler * 40)
    engine.script = lambda prompt, index: ids
    app = create_app(engine)
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 200}
    reply = await call(app, "POST", CHAT, body)  # ends within the patience of the helper
    assert reply.status == 200
    assert filler in reply.json["choices"][0]["message"]["content"]


# -- addresses and paths in requests --


@contextmanager
def listener() -> Iterator[tuple[str, list[Any]]]:
    """An address that nobody may call, and who did."""
    callers: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        over = threading.Event()

        def watch() -> None:
            while not over.is_set():
                try:
                    connection, address = server.accept()
                except TimeoutError:
                    continue
                callers.append(address)
                connection.close()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", callers
        time.sleep(0.1)
        over.set()
        thread.join()


async def test_no_address_in_a_request_is_called() -> None:
    """Media, files, templates, hosts and tools that name an address: refused or plain text."""
    with listener() as (url, callers):
        host = url.removeprefix("http://")
        kinds: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": f"{url}/a.png"}},
            {"type": "image_url", "image_url": f"{url}/a.png"},
            {"type": "image_url", "image_url": {"url": f"http://x@{host}\\@y/a.png"}},
            {"type": "input_image", "image_url": f"{url}/a.png"},
            {"type": "video_url", "video_url": {"url": f"{url}/a.mp4"}},
            {"type": "audio_url", "audio_url": {"url": f"{url}/a.wav"}},
            {"type": "input_audio", "input_audio": {"data": f"{url}/a.wav", "format": "wav"}},
            {"type": "file", "file": {"file_data": f"{url}/a.pdf"}},
            {"type": "text", "text": "x", "image_url": {"url": f"{url}/a.png"}},
        ]
        app = create_app(FakeEngine(), ServerSettings(trust_request_chat_template=True))
        for part in kinds[:-1]:
            for more in ({}, {"stream": True}):
                body = {"messages": [{"role": "user", "content": [part]}], **more}
                reply = await call(app, "POST", CHAT, body)
                assert reply.status == 400, part
                assert "type" in reply.error["message"]
        for fields in (
            {"chat_template": url},
            {"chat_template": "{% include '" + url + "' %}"},
            {"messages": [{"role": "user", "content": [kinds[-1]]}]},
            {"metadata": {"callback": url}, "user": url},
            {"web_search_options": {"url": url}},
            {"kv_transfer_params": {"remote_host": host}},
            {"model": url},
        ):
            body = {"messages": [{"role": "user", "content": url}], "max_tokens": 2, **fields}
            assert (await call(app, "POST", CHAT, body)).status in (200, 400, 404)
        headers = {"Host": host, "X-Forwarded-Host": host, "Forwarded": f"host={host}"}
        for path in ("/v1/models", "/v1/models/", "/docs", "//" + host):
            reply = await call(app, "GET", path, headers=headers)
            assert reply.status in (200, 404)
            assert "location" not in reply.headers
            assert host not in reply.body.decode() or path.endswith(host)
    assert callers == []


PATHS = [
    "../../../etc/passwd",
    "..%2f..%2f..%2fetc%2fpasswd",
    "/etc/passwd",
    "....//....//etc/passwd",
    "file:///etc/passwd",
    "\\\\host\\share",
    "owl-1/../../etc/passwd",
    "owl-1\0.txt",
    "~root",
    "$(id)",
]


@pytest.mark.parametrize("name", PATHS)
async def test_names_of_models_are_no_paths(name: str) -> None:
    app = create_app(FakeEngine())
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        good: dict[str, Any] = {
            COMPLETIONS: {"prompt": "x"},
            CHAT: {"messages": [{"role": "user", "content": "x"}]},
            "/tokenize": {"prompt": "x"},
            "/detokenize": {"tokens": [5]},
        }[path]
        reply = await call(app, "POST", path, {**good, "model": name})
        assert reply.status == (400 if "\0" in name else 404), (path, reply.body)
        assert "root:" not in reply.body.decode()
    for path in (f"/v1/models/{name}", f"/v2/models/{name}", f"/v2/models/{name}/config"):
        reply = await call(app, "GET", path)
        assert reply.status in (400, 404), (path, reply.body)
        assert "root:" not in reply.body.decode()


# -- keys --


async def test_keys_are_compared_in_equal_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key is compared, whole, whichever one was sent; nothing is compared with ==."""
    seen: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def watched(one: Any, other: Any) -> bool:
        seen.append((bytes(one), bytes(other)))
        return bool(real(one, other))

    monkeypatch.setattr(hmac, "compare_digest", watched)
    keys = tuple(f"sk-{secrets.token_hex(8)}" for _ in range(4))
    app = create_app(FakeEngine(), ServerSettings(api_keys=keys))
    counts = set()
    for sent in (*keys, keys[0][:-1], keys[1] + "x", "", "x", keys[2].upper()):
        seen.clear()
        await call(app, "GET", "/v1/models", headers={"Authorization": f"Bearer {sent}"})
        counts.add(len(seen))
    assert counts == {len(keys)}


async def test_refusals_do_not_tell_keys_apart() -> None:
    key = f"sk-{secrets.token_hex(8)}"
    app = create_app(FakeEngine(), ServerSettings(api_keys=(key,)))
    answers = set()
    for sent in ("", "x", key[:-1], key + "0", key[::-1], "x" * 4000):
        headers = {"Authorization": f"Bearer {sent}", "X-Request-Id": "same"}
        reply = await call(app, "GET", "/v1/models", headers=headers)
        answers.add((reply.status, reply.body, tuple(sorted(reply.headers.items()))))
        assert key.encode() not in reply.body
    assert len(answers) == 1


async def test_no_route_shows_a_key() -> None:
    key = f"sk-{secrets.token_hex(8)}"
    app = create_app(FakeEngine(), ServerSettings(api_keys=(key,)))
    for path, methods, _ in ROUTES:
        for method in methods:
            target = path.replace("{name:path}", "owl-1").replace("{version}", "1")
            headers = {"Authorization": f"Bearer {key}"}
            reply = await call(app, method, target, {}, headers=headers)
            assert reply.status != 401, (method, target)
            assert key not in reply.body.decode(), target
            assert key not in str(reply.headers), target


def test_the_page_of_the_api_loads_nothing_from_outside() -> None:
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", openapi.PAGE)
    assert "innerHTML" not in openapi.PAGE


# -- below the body: smuggling, splitting, log lines --

AMBIGUOUS = [
    b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    b"Content-Length: 2\r\nContent-Length: 40\r\n\r\n{}",
    b"Content-Length: 2, 40\r\n\r\n{}",
    b"Content-Length: +2\r\n\r\n{}",
    b"Content-Length: 0x2\r\n\r\n{}",
    b"Content-Length: 2 2\r\n\r\n{}",
    b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked, x\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    b"X: y\r\n Transfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n",
    b"X: a\x00b\r\nContent-Length: 0\r\n\r\n",
    b"X\x00: b\r\nContent-Length: 0\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n\r\n2;\n{}\r\n0\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n{}\r\n0\r\n\r\n",
]


@pytest.mark.parametrize("head", AMBIGUOUS, ids=lambda head: repr(head)[:50])
async def test_no_second_request_hides_in_the_first(head: bytes) -> None:
    """Two readings of one request: it is refused, or what follows it is what anybody would read."""
    inner = (
        b"GET /version HTTP/1.1\r\nHost: x\r\nX-Request-Id: smuggled\r\nConnection: close\r\n\r\n"
    )
    first = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    async with served(FakeEngine()) as address:
        status, rest = await raw(address, first + head + inner)
        assert status in (0, 400), (status, rest)
        # A body of stated length is followed by the next request; nothing else may be one.
        clear = re.fullmatch(rb"(X: .*\r\n)?Content-Length: \d+\r\n\r\n(\{\})?", head, re.DOTALL)
        assert clear or b"smuggled" not in rest, rest


async def test_no_header_of_an_answer_can_be_split() -> None:
    app = create_app(FakeEngine(), ServerSettings(strict_fields=False))
    odd = ["a\r\nX-Evil: 1", "a\nb", "a\0b", "é", "\u2028", "x" * 5000, "a, b"]
    for name in odd:
        reply = await call(app, "POST", COMPLETIONS, {"prompt": "x", "max_tokens": 1, name: 1})
        for header, value in reply.headers.items():
            assert "evil" not in header
            assert all(" " <= letter <= "~" for letter in value), (header, value)
    for value in ("a\r\nX-Evil: 1", "a\nb", "a b", "\x7f"):
        headers = {"X-Request-Id": value}
        reply = await call(app, "POST", COMPLETIONS, {"prompt": "x"}, headers=headers)
        assert reply.status == 400
        assert "x-evil" not in reply.headers


async def test_no_line_of_the_log_can_be_forged(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    app = create_app(engine)
    engine.faults.crash_after = 0
    forged = "ERROR event=forged"
    with caplog.at_level("DEBUG", logger="octavo"):
        body = {"prompt": f"x\n{forged}", "user": f"\n{forged}", "max_tokens": 2}
        for path in (COMPLETIONS, f"{COMPLETIONS}\n{forged}"):
            await call(app, "POST", path, body)
    for record in caplog.records:
        assert "\n" not in record.getMessage()
        assert forged not in record.getMessage() or '"' in record.getMessage()


# -- templates of callers and of model makers --

SPY = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
ESCAPES = [
    SPY,
    "{{ ''.__class__ }}",
    "{{ messages.__class__.__base__ }}",
    "{{ [].__class__.__bases__[0].__subclasses__()[0] }}",
    "{{ ''['__class__'] }}",
    "{{ ''|attr('__class__') }}",
    "{{ ''|attr('__cla' ~ 'ss__') }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'] }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ range.__self__ }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ '{0.__class__}'.format_map({'0': 1}) }}",
    "{{ ('%c' % 95 ~ '_class__') and (''|attr('\\x5f\\x5fclass\\x5f\\x5f')) }}",
    "{% set x = messages.append(1) %}",
    "{% set x = messages[0].update({'role': 'system'}) %}",
    "{% set x = messages[0].pop('content') %}",
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as x %}",
    "{% extends '/etc/passwd' %}",
    "{{ config }}{{ request }}{{ os }}{{ __builtins__ }}{{ open('/etc/passwd').read() }}",
    "{{ 'a' * 10**9 }}",
    "{{ 10 ** 10 ** 10 }}",
    "{% for a in range(10**9) %}{% endfor %}",
    "{% for a in range(999) %}{% for b in range(999) %}{% for c in range(999) %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "{{ range(10**9)|list|length }}",
    "{{ 'x'.center(10**9) }}",
    "{{ 'x'|center(10**9) }}",
    "{{ 'x'|indent(10**9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ ['x'] * 10**9 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ 'x'.ljust(10**9) ~ 'x'.rjust(10**9) ~ 'x'.zfill(10**9) }}",
    "{{ ('x' * 10**6).replace('', 'y' * 10**6) }}",
    "{{ ('x,' * 10**5).split(',')|join('y' * 10**6) }}",
    "{{ 'x'.expandtabs(10**9) ~ '\\t'.expandtabs(10**9) }}",
    "{{ messages|tojson(indent=10**9) }}",
    "{{ 'a'|wordwrap(1) ~ lipsum(n=10**7) }}",
    "{{ 7|round(10**9) }}{{ strftime_now('%Y' * 10**6)|length }}",
    "{{ messages|batch(10**9, 'x')|list }}",
    "{{ messages|slice(10**9)|list }}",
    "{{ 'x'|truncate(10**9) }}{{ 'x'|format(10**9) }}",
    "{{ ('x'.encode() * (2 * 10**9))|length }}",
    "{{ 'x'.encode().ljust(2 * 10**9)|length }}",
    "{{ (1).to_bytes(2 * 10**9)|length }}",
]


def test_templates_stay_in_their_box() -> None:
    """Refused, or rendered without anything of ours in it, in bounded time and memory."""
    script = (
        "import json, resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n"
        "from tests.hostile.test_security import ESCAPES, render_hostile\n"
        "for source in ESCAPES:\n"
        "    print(json.dumps(render_hostile(source)), flush=True)\n"
        # Not ru_maxrss: a process inherits that of the one that started it.
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=PACKAGE.parent,
    )
    *lines, memory = done.stdout.splitlines()
    reached = ESCAPES[len(lines) - 1 if done.returncode == 0 else len(lines)]
    assert done.returncode == 0, (reached, done.returncode, done.stderr[-800:])
    assert len(lines) == len(ESCAPES)
    for source, line in zip(ESCAPES, lines, strict=True):
        kind, seconds, text = json.loads(line)
        assert kind in ("refused", "rendered")
        assert seconds < 8, (source, seconds)
        for leaked in ("<class", "root:", "<module", "<function", "0x", "MemoryError"):
            assert leaked not in text, (source, text[:300])
    assert int(memory) < 1 << 20, f"{memory} KiB"


def render_hostile(source: str) -> tuple[str, float, str]:
    """What becomes of a template, the processor time that it took, and its words."""
    messages = [{"role": "user", "content": "secret"}]
    before = time.process_time()
    try:
        template = ChatTemplate(source, chat_tokenizer(), name="t")
        kind, text = "rendered", template.render(messages, add_generation_prompt=False).text
    except OctavoError as error:
        kind, text = "refused", error.message
    assert messages == [{"role": "user", "content": "secret"}]
    return kind, time.process_time() - before, text[:2000]


# -- what there is not --


def test_no_route_takes_files_or_changes_the_server() -> None:
    """Nothing can be uploaded, loaded, configured, started or stopped over HTTP."""
    words = ("weight", "upload", "config", "exec", "rpc", "lora", "profile", "sleep", "stop")
    for path, methods, _ in ROUTES:
        assert set(methods) <= {"GET", "POST"}, path
        if "POST" in methods:
            assert not any(word in path.lower() for word in (*words, "update", "file")), path


def test_no_gateway_database_or_cluster_is_in_the_engine() -> None:
    for name, tree in trees():
        for node in ast.walk(tree):
            for module in imported(node):
                root = module.partition(".")[0]
                assert root not in ("litellm", "sqlite3", "sqlalchemy", "prisma", "tarfile"), name
                assert root != "ray" or name.startswith("executor/") or name == "serve.py", name
