"""Programs of others, unmodified, against our servers: each runs where it is installed.

They are large, so `scripts/clients` installs them apart; the folder of their commands is in
TEST_CLIENTS. Nightly.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e import servers
from tests.e2e.servers import RunningServer

pytestmark = [pytest.mark.model, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}
CLOSE = 0.03  # what two benchmarks of one server may differ by


def command(name: str) -> str:
    """The program, or a skip."""
    folders = os.pathsep.join((os.environ.get("TEST_CLIENTS", ""), os.environ["PATH"]))
    found = shutil.which(name, path=folders)
    if found is None:
        pytest.skip(f"{name} is not installed; scripts/clients does it")
    return found


def run(words: list[str], folder: Path) -> str:
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=600,
        cwd=folder,
        env={**os.environ, **OFFLINE},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def paced(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server whose engine keeps to the clock."""
    log = tmp_path_factory.mktemp("paced") / "log"
    words = [sys.executable, "-m", "tests.e2e.paced", str(smollm2_folder), "server"]
    with log.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out, cwd=ROOT)
    try:
        url = servers._address(process, log)
        running = RunningServer(process, url, log)
        servers.wait_for(lambda: running.get("/health/ready").status_code == 200, running)
        yield url
    finally:
        process.terminate()
        process.wait(20)


def test_two_benchmarks_measure_the_same(paced: str, smollm2_folder: Path, tmp_path: Path) -> None:
    theirs = [command("vllm"), "bench", "serve", "--backend", "openai"]
    ours = [sys.executable, "-m", "octavo", "bench", "serve", "--backend", "openai"]
    shared = ["--base-url", paced, "--model", "small", "--tokenizer", str(smollm2_folder)]
    shared += ["--dataset-name", "random", "--random-input-len", "32", "--random-output-len", "16"]
    shared += ["--num-prompts", "60", "--request-rate", "5", "--burstiness", "100", "--ignore-eos"]
    shared += ["--temperature", "0", "--save-result", "--percentile-metrics", "ttft,tpot,itl,e2el"]
    found = []
    for number, words in enumerate((theirs, ours)):
        name = f"{number}.json"
        run([*words, *shared, "--result-dir", str(tmp_path), "--result-filename", name], ROOT)
        found.append(json.loads((tmp_path / name).read_text()))
    for name in ("median_ttft_ms", "median_tpot_ms", "median_itl_ms", "median_e2el_ms"):
        first, second = found[0][name], found[1][name]
        assert abs(first - second) <= CLOSE * first, (name, first, second)
    for name in ("request_throughput", "output_throughput", "total_token_throughput"):
        first, second = found[0][name], found[1][name]
        assert abs(first - second) <= 2 * CLOSE * first, (name, first, second)
    for name in ("completed", "total_output_tokens"):
        assert found[0][name] == found[1][name], name


TASKS = """{"q": "1, 2, 3,", "choices": [" 4", " 9", " 1"], "gold": 0}
{"q": "The capital of France is", "choices": [" London", " Paris", " blue"], "gold": 1}
{"q": "Monday, Tuesday,", "choices": [" Sunday", " Wednesday", " March"], "gold": 1}
{"q": "Two plus two is", "choices": [" four", " seven", " tree"], "gold": 0}
"""
CHOICE = """task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
target_delimiter: ""
metric_list: [{metric: acc}]
"""
TEXT = """task: tiny_text
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: "{{choices[gold]}}"
generation_kwargs: {until: [",", "."], max_gen_toks: 6, temperature: 0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


def test_evaluation_by_log_probs_and_by_text(
    server: RunningServer, smollm2_folder: Path, tmp_path: Path
) -> None:
    """The harness asks with echo, log-probs and token ids; the model knows all four answers."""
    data = tmp_path / "data.jsonl"
    data.write_text(TASKS)
    for name, text in (("choice", CHOICE), ("text", TEXT)):
        (tmp_path / f"{name}.yaml").write_text(text.replace("DATA", str(data)))
    url = f"{server.url}/v1/completions"
    arguments = f"model=small,base_url={url},tokenizer={smollm2_folder},num_concurrent=2"
    words = [command("lm-eval"), "run", "--model", "local-completions", "--model_args", arguments]
    words += ["--tasks", "tiny_choice,tiny_text", "--include_path", str(tmp_path)]
    run([*words, "--output_path", str(tmp_path / "out")], tmp_path)
    (file,) = (tmp_path / "out").rglob("results*.json")
    results = json.loads(file.read_text())["results"]
    assert results["tiny_choice"]["acc,none"] == 1.0
    assert results["tiny_text"]["exact_match,none"] >= 0.25


LANGCHAIN = """
import sys
from langchain_openai import ChatOpenAI, OpenAI
shared = {"base_url": sys.argv[1], "api_key": "none", "model": "small", "temperature": 0}
chat = ChatOpenAI(max_tokens=20, **shared)
question = "What is the capital of France?"
plain = chat.invoke(question)
assert "Paris" in plain.content, plain
assert plain.usage_metadata["output_tokens"] > 0
assert "".join(part.content for part in chat.stream(question)) == plain.content
assert OpenAI(max_tokens=8, **shared).invoke("1, 2, 3, 4, 5, 6,").startswith(" 7, 8")
print("all well")
"""


def test_langchain(server: RunningServer, tmp_path: Path) -> None:
    python = str(Path(command("lm-eval")).resolve().parent / "python")
    has = subprocess.run([python, "-c", "import langchain_openai"], check=False)
    if has.returncode:
        pytest.skip("langchain-openai is not installed; scripts/clients does it")
    assert run([python, "-c", LANGCHAIN, f"{server.url}/v1"], tmp_path).strip() == "all well"


# What GuideLLM and AIPerf send, for machines on which they are not installed.
PAYLOADS = [
    (
        "/v1/chat/completions",
        {
            "model": "small",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Count to 3."}]}],
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_completion_tokens": 8,
            "ignore_eos": True,
            "stop": None,
        },
    ),
    (
        "/v1/completions",
        {
            "model": "small",
            "prompt": "1, 2, 3,",
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_tokens": 8,
            "ignore_eos": True,
            "stop": None,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "model": "small",
            "messages": [{"role": "user", "name": "", "content": "Count to 3."}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_completion_tokens": 8,
            "min_tokens": 8,
        },
    ),
]


@pytest.mark.parametrize(("path", "body"), PAYLOADS)
def test_payloads_of_load_generators(server: RunningServer, path: str, body: dict) -> None:
    reply = httpx.post(server.url + path, json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["usage"]["completion_tokens"] == 8
    assert server.get("/metrics").status_code == 200
    assert httpx.post(server.url + "/reset_prefix_cache", timeout=10).status_code == 200


def test_guidellm(server: RunningServer, smollm2_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = [command("guidellm"), "run", "--disable-console", "--output", f"kind=json,path={out}"]
    words += ["--backend", f"kind=openai_http,target={server.url},model=small"]
    words += ["--tokenizer", f"kind=hf_auto,model={smollm2_folder}"]
    words += ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"]
    words += ["--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=8"]
    run(words, tmp_path)
    (benchmark,) = json.loads(out.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (6, 0)


def test_aiperf(
    server: RunningServer, smollm2_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a tokenizer from the hub's cache alone, so there is one."""
    cached = tmp_path / "hf" / "hub" / "models--test--small"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    shutil.copytree(smollm2_folder, cached / "snapshots" / "abc")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    words = [command("aiperf"), "profile", "--model", "small", "--url", server.url, "--streaming"]
    words += ["--endpoint-type", "chat", "--tokenizer", "test/small", "--concurrency", "2"]
    words += ["--request-count", "6", "--isl", "24", "--osl", "8", "--ui", "none"]
    run([*words, "--artifact-dir", str(tmp_path / "out")], tmp_path)
    (file,) = (tmp_path / "out").rglob("profile_export_aiperf.json")
    assert json.loads(file.read_text())["request_count"]["avg"] == 6
