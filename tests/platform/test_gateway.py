"""The gateway with LiteLLM's real proxy before two real engines; and its settings and bad input.

The proxy's program is `litellm` beside this Python, or what LITELLM_PROGRAM names.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from octavo.errors import ConfigError
from octavo.platform.gateway import prepare
from octavo.platform.spec import Spec, read_spec_file
from tests.e2e.servers import RunningServer, serving

KEY = "sk-of-this-test"
ENGINE = "key-of-the-engines"
PROGRAM = os.environ.get("LITELLM_PROGRAM") or str(Path(sys.executable).parent / "litellm")


def spec_of(path: Path, urls: list[str], port: int = 4000, more: str = "") -> Path:
    backends = "".join(
        f'[[gateway.backends]]\nurl = "{url}/v1"\nmodel = "small"\nkey_env = "ENGINE_KEY"\n'
        for url in urls
    )
    file = path / "two.toml"
    file.write_text(
        'name = "two"\n[model]\nname = "smollm2-135m"\nserved_name = "small"\n'
        "[drain]\nseconds = 5\n"
        f"[gateway]\nport = {port}\nhealth_interval = 5\ncooldown = 5\n{more}{backends}"
    )
    return file


def read(path: Path, urls: list[str], more: str = "") -> Spec:
    return read_spec_file(spec_of(path, urls, more=more))


def test_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_MASTER_KEY", KEY)
    monkeypatch.setenv("ENGINE_KEY", ENGINE)
    more = 'fallbacks = {small = ["big"]}\ncontext_window_fallbacks = {small = ["long"]}\n'
    spec = read(tmp_path, ["http://a:1", "http://b:2"], more)
    launch = prepare(spec, tmp_path / "litellm.yaml", program="litellm")
    config = yaml.safe_load(launch.config.read_text())
    assert KEY not in launch.config.read_text()
    assert [one["litellm_params"]["api_base"] for one in config["model_list"]] == [
        "http://a:1/v1",
        "http://b:2/v1",
    ]
    assert {one["litellm_params"]["model"] for one in config["model_list"]} == {"hosted_vllm/small"}
    router = config["router_settings"]
    assert router["fallbacks"] == [{"small": ["big"]}]
    assert router["context_window_fallbacks"] == [{"small": ["long"]}]
    assert config["general_settings"]["enable_health_check_routing"] is True


def test_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LITELLM_MASTER_KEY", raising=False)
    monkeypatch.setenv("ENGINE_KEY", "x")
    with pytest.raises(ConfigError, match="LITELLM_MASTER_KEY must be set"):
        prepare(read(tmp_path, ["http://a:1"]), program="litellm")
    monkeypatch.setenv("LITELLM_MASTER_KEY", "x")
    with pytest.raises(ConfigError, match=r"no \[\[gateway.backends\]\]"):
        prepare(read(tmp_path, []), program="litellm")
    with pytest.raises(ConfigError, match="cannot be written"):
        prepare(read(tmp_path, ["http://a:1"]), tmp_path / "none" / "x.yaml", program="litellm")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["two.toml"]


@dataclass
class Pool:
    """A gateway and its engines."""

    url: str
    engines: list[RunningServer]
    process: subprocess.Popen[bytes]

    def post(self, body: dict[str, Any], key: str = KEY, timeout: float = 60) -> httpx.Response:
        return httpx.post(
            f"{self.url}/v1/chat/completions",
            json=body,
            headers={"Authorization": f"Bearer {key}"},
            timeout=timeout,
        )


def ask(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "small", "messages": [{"role": "user", "content": text}], **more}


def served_by(engine: RunningServer) -> float:
    """Requests that it has ended."""
    text = httpx.get(
        f"{engine.url}/metrics", headers={"Authorization": f"Bearer {ENGINE}"}, timeout=20
    ).text
    rows = [line for line in text.splitlines() if line.startswith("vllm:request_success_total")]
    return sum(float(line.rpartition(" ")[2]) for line in rows)


@contextmanager
def gateway(path: Path, urls: list[str]) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = free_port()
    log = (path / "gateway.log").open("wb")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "octavo", "gateway", "--litellm", PROGRAM),
            *("--spec", str(spec_of(path, urls, port))),
        ],
        env={**os.environ, "LITELLM_MASTER_KEY": KEY, "ENGINE_KEY": ENGINE},
        stderr=log,
        stdout=log,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 150
        while time.monotonic() < until and process.poll() is None:
            try:
                if httpx.get(f"{url}/health/liveliness", timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.5)
        else:
            pytest.fail((path / "gateway.log").read_text()[-3000:])
        yield url, process
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.fixture(scope="module")
def pool(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    if not Path(PROGRAM).is_file():
        pytest.skip("LiteLLM's proxy is not installed")
    probe = [str(Path(PROGRAM).parent / "python"), "-c", "import fastapi, backoff, semver"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("LiteLLM is installed without its proxy")
    path = tmp_path_factory.mktemp("pool")
    flags = ("--max-model-len", "512", "--num-gpu-blocks-override", "256", "--max-num-seqs", "4")
    flags += ("--max-num-queued-reqs", "4", "--served-model-name", "small", "--api-key", ENGINE)
    flags += ("--threads", "1")
    with ExitStack() as stack:
        engines = [
            stack.enter_context(serving(smollm2_gguf, path / f"log{number}", *flags))
            for number in range(2)
        ]
        urls = [engine.url for engine in engines]
        url, process = stack.enter_context(gateway(path, urls))
        yield Pool(url, engines, process)


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestPool:
    """In this order: the last test kills an engine."""

    def test_keys_are_checked(self, pool: Pool) -> None:
        assert pool.post(ask("Hello", max_tokens=2), key="sk-wrong").status_code in (400, 401)
        assert pool.post(ask("Hello", max_tokens=2)).status_code == 200

    def test_load_is_spread(self, pool: Pool) -> None:
        before = [served_by(engine) for engine in pool.engines]
        codes: list[int] = []

        def one(number: int) -> None:
            codes.append(pool.post(ask(f"Count to {number}", max_tokens=16)).status_code)

        threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
            time.sleep(0.05)
        for thread in threads:
            thread.join()
        after = [served_by(engine) for engine in pool.engines]
        assert codes == [200] * 8
        assert all(new > old for old, new in zip(before, after, strict=True))

    def test_streams_are_the_engines_own(self, pool: Pool) -> None:
        body = ask("Write é, 漢字 and 🙂 in a list.", max_tokens=48, temperature=0.0, seed=1)
        whole = pool.post(body).json()["choices"][0]["message"]["content"]
        through = _streamed(pool.url, KEY, body)
        straight = _streamed(pool.engines[0].url, ENGINE, body)
        assert through == straight == whole

    def test_an_unknown_model_cools_nothing_down(self, pool: Pool) -> None:
        for _ in range(6):
            assert 400 <= pool.post({**ask("x"), "model": "nothing"}).status_code < 500
        assert [pool.post(ask("Hi", max_tokens=1)).status_code for _ in range(4)] == [200] * 4

    def test_a_prompt_that_is_too_long(self, pool: Pool) -> None:
        answer = pool.post(ask("word " * 900, max_tokens=4))
        assert answer.status_code == 400
        assert "maximum context length is 512" in answer.text
        assert pool.post(ask("Hi", max_tokens=1)).status_code == 200

    def test_more_than_both_can_take(self, pool: Pool) -> None:
        answers: list[httpx.Response] = []

        def one(number: int) -> None:
            answers.append(pool.post(ask(f"Say {number}", max_tokens=64, ignore_eos=True)))

        threads = [threading.Thread(target=one, args=(number,)) for number in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        refused = [answer for answer in answers if answer.status_code != 200]
        assert {answer.status_code for answer in refused} <= {429}
        assert len(answers) - len(refused) >= 8
        assert all("ry again" in answer.text for answer in refused)  # and when, in seconds
        time.sleep(6)  # the cooldown
        assert pool.post(ask("Hi", max_tokens=1)).status_code == 200

    def test_one_engine_is_killed_under_load(self, pool: Pool) -> None:
        first, second = pool.engines
        endings: list[str] = []

        def stream() -> None:
            endings.append(_ending(pool.url, ask("Tell a long story.", max_tokens=300)))

        threads = [threading.Thread(target=stream) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(1.0)
        for pid in (first.core_pid(), first.process.pid):
            os.kill(pid, signal.SIGKILL)
        for thread in threads:
            thread.join(120)
        assert len(endings) == 4  # none hangs
        assert set(endings) <= {"done", "error"}
        time.sleep(12)  # two rounds of health checks
        before = served_by(second)
        codes = [pool.post(ask("Hello", max_tokens=2)).status_code for _ in range(8)]
        assert codes == [200] * 8
        assert served_by(second) >= before + 8


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _streamed(url: str, key: str, body: dict[str, Any]) -> str:
    text = ""
    with httpx.stream(
        "POST",
        f"{url}/v1/chat/completions",
        json={**body, "stream": True},
        headers={"Authorization": f"Bearer {key}"},
        timeout=120,
    ) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
    return text


def _ending(url: str, body: dict[str, Any]) -> str:
    """How a stream ended: done, error (an event or a status), or broken."""
    last = ""
    try:
        with httpx.stream(
            "POST",
            f"{url}/v1/chat/completions",
            json={**body, "stream": True},
            headers={"Authorization": f"Bearer {KEY}"},
            timeout=100,
        ) as answer:
            if answer.status_code != 200:
                return "error"
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    if '"error"' in line:
                        return "error"
                    last = line
    except httpx.HTTPError as error:
        return f"broken: {error}"
    return "done" if last == "data: [DONE]" else f"broken: {last[:80]}"
