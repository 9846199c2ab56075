"""Mistakes on the benchmarks' command lines: one sentence each, before anything is started."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from octavo.bench import dataset
from octavo.bench.serve import REFUSED, add_arguments
from octavo.cli.flags import Parser
from octavo.cli.main import main
from octavo.errors import ConfigError
from tests.text.samples import chat_tokenizer

SERVE = ["bench", "serve", "--port", "9"]


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("values", [[], ["1"], ["a=b", "c=d"]])
def test_what_is_not_built_is_refused_with_and_without_a_value(
    name: str, values: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    flag = f"--{name.replace('_', '-')}"
    assert main([*SERVE, flag, *values]) == 1
    assert f"octavo: {flag}: {REFUSED[name]}; leave it out." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--metric-percentiles", "abc"], 1, "--metric-percentiles 'abc' must be numbers"),
        (["--metric-percentiles", "50,,99"], 1, "must be numbers"),
        (["--metric-percentiles", "101"], 1, "must be numbers from 0 to 100"),
        (["--metric-percentiles", "nan"], 1, "must be numbers from 0 to 100"),
        (["--extra-body", "{"], 2, "is not JSON"),
        (["--extra-body", "[1]"], 1, "--extra-body must be a JSON object"),
        (["--request-rate", "0"], 1, "--request-rate 0.0 must be above 0"),
        (["--goodput", "ttft"], 1, "must be METRIC:MILLISECONDS"),
        (["--header", "x"], 1, "must be NAME=VALUE"),
        (["--base-url", "http://a:b", "--num-prompts", "1"], 1, "--base-url http://a:b"),
        (["--base-url", "localhost", "--num-prompts", "1"], 1, "no server answers"),
    ],
)
def test_mistakes(
    words: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SERVE, *words]) == code
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--input-len", "--output-len", "--batch-size", "--num-iters"])
def test_a_batch_of_nothing_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "latency", flag, "0"]) == 1
    assert f"octavo: {flag} must be at least 1." in capsys.readouterr().err


@pytest.mark.parametrize("length", ["many", -1, 1.5, True, [1]])
def test_lengths_in_a_file_are_checked(tmp_path: Path, length: object) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "x", "output_tokens": length}))
    parser = Parser("bench serve", "x")
    add_arguments(parser)
    parsed = parser.parse(["--dataset-name", "custom", "--dataset-path", str(path)])
    assert isinstance(parsed, argparse.Namespace)
    with pytest.raises(ConfigError, match=r"prompts\.jsonl line 1: output_tokens = "):
        dataset.samples(parsed, chat_tokenizer())
