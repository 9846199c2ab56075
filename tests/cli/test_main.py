"""The command line as a person meets it: help, exit codes, suggestions, aliases."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import types

import pytest

from octavo import __version__
from octavo.cli import flags
from octavo.cli.main import COMMANDS, main
from octavo.errors import CheckpointError
from octavo.fields import options_of
from octavo.options import EngineArgs, ServerArgs

BUILT = [name for name in COMMANDS if not name.startswith("bench")]


def octavo(*words: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs `python -m octavo` with the given variables and no options from outside."""
    known = {v for r in (EngineArgs, ServerArgs) for o in options_of(r).values() for v in o.env}
    environ = {name: value for name, value in os.environ.items() if name not in known}
    return subprocess.run(
        [sys.executable, "-m", *words],
        env={**environ, **variables},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in COMMANDS:
        assert name in text
    assert "examples:" in text
    assert main([]) == 2


@pytest.mark.parametrize("name", BUILT)
def test_each_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*name.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert f"usage: octavo {name}" in text
    assert "example" in text


def test_help_of_serve_has_a_flag_for_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    for record in (EngineArgs, ServerArgs):
        for name, details in options_of(record).items():
            flag = "--" + name.replace("_", "-")
            assert (f"  {flag}" in text) == (not details.hidden), flag
            for variable in details.env:
                assert variable in text


@pytest.mark.parametrize("words", [["--help"], ["version"], ["serve", "--help"]])
def test_help_loads_nothing_heavy(words: list[str]) -> None:
    script = (
        "import sys\nfrom octavo.cli.main import main\n"
        f"main({words!r})\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in "
        "('torch', 'numpy', 'transformers', 'tokenizers', 'starlette', 'rich', 'httpx', 'zmq')),"
        " file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr.strip() == "[]"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["version"], ["--version"]):
        assert main(words) == 0
        assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["srve"], 2, "did you mean `octavo serve`?"),
        (["serve", "--max-num-seq", "3"], 2, "did you mean --max-num-seqs?"),
        (["serve", "--swap-space", "4"], 2, "recomputed, never swapped"),
        (["serve", "--swap_space=4"], 2, "recomputed, never swapped"),
        (["serve", "a", "b"], 2, "unexpected argument 'b'"),
        (["serve", "--port", "x"], 2, "--port: the value is 'x', but must be a whole number"),
        (["serve", "--scheduling-policy", "lifo"], 2, "invalid choice: 'lifo'"),
        (["serve", "--hf-overrides", "{"], 2, "not JSON"),
        (["serve", "a", "--model", "b"], 1, "give one of them"),
        (["serve", "--tensor-parallel-size", "0"], 1, "--tensor-parallel-size 0"),
        (["serve", "--trust-remote-code"], 1, "--trust-remote-code: a checkpoint's own Python"),
        (["serve", "--no-enable-request-id-headers"], 1, "--no-enable-request-id-headers: "),
        (["serve", "--config", "gone.toml"], 1, "gone.toml"),
        (["run"], 2, "no prompt"),
    ],
)
def test_mistakes(
    words: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == code
    captured = capsys.readouterr()
    assert text in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_the_environment_is_refused_like_the_flag() -> None:
    done = octavo("octavo", "serve", TENSOR_PARALLEL_SIZE="0")
    assert done.returncode == 1
    assert done.stderr.startswith("octavo: TENSOR_PARALLEL_SIZE=0 (environment")


def test_dead_variables_stop_the_start() -> None:
    done = octavo("octavo", "serve", VLLM_ATTENTION_BACKEND="FLASH_ATTN")
    assert done.returncode == 1
    assert "--attention-backend" in done.stderr


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineArgs, ServerArgs]]:
    """Stands in for `octavo.launch`; what it was told."""
    calls: list[tuple[EngineArgs, ServerArgs]] = []

    def serve(engine: EngineArgs, server: ServerArgs) -> int:
        calls.append((engine, server))
        return 0

    fake = types.ModuleType("octavo.launch")
    fake.__dict__["serve"] = serve
    monkeypatch.setitem(sys.modules, "octavo.launch", fake)
    monkeypatch.setattr("octavo.launch", fake, raising=False)
    return calls


def test_flags_reach_the_launch_with_their_sources(
    served: list[tuple[EngineArgs, ServerArgs]], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["serve", "folder", "--port=9", "--max_num_seqs", "1K", "--no-enable-prefix-caching"]
    words += ["--served-model-name", "a", "b", "--api-key", "s", "--api-key", "t"]
    assert main([*words, "--max-model-len", "auto", "--hf-overrides", '{"a_b": 1}']) == 0
    engine, server = served[0]
    assert (engine.model, engine.max_num_seqs, engine.max_model_len) == ("folder", 1024, "auto")
    assert engine.enable_prefix_caching is False
    assert engine.hf_overrides == {"a_b": 1}
    assert (server.port, server.served_model_name) == (9, ["a", "b"])
    assert server.api_key == ["s", "t"]
    assert engine.sources["max_num_seqs"] == "flag"
    shown = capsys.readouterr().err
    assert "max_num_seqs" in shown
    assert "(set)" in shown
    assert "block_size" not in shown


def test_a_file_gives_what_flags_do_not(
    served: list[tuple[EngineArgs, ServerArgs]], tmp_path: object
) -> None:
    path = f"{tmp_path}/o.toml"
    with open(path, "w") as file:
        file.write('model = "from-file"\nport = 1\nmax-num-seqs = 2\n')
    assert main(["serve", "--config", path, "--port", "3"]) == 0
    engine, server = served[0]
    assert (engine.model, engine.max_num_seqs, server.port) == ("from-file", 2, 3)
    assert engine.sources["model"] == f"file {path}"


def test_errors_of_the_launch_end_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = types.ModuleType("octavo.launch")

    def serve(*_: object) -> int:
        raise CheckpointError("folder/model.safetensors is cut short.")

    fake.__dict__["serve"] = serve
    monkeypatch.setitem(sys.modules, "octavo.launch", fake)
    monkeypatch.setattr("octavo.launch", fake, raising=False)
    assert main(["serve", "folder"]) == 1
    assert capsys.readouterr().err.endswith("octavo: folder/model.safetensors is cut short.\n")


def test_old_module_paths_call_the_same_commands() -> None:
    done = octavo("octavo.entrypoints.openai.api_server", "--model", "m", "--swap-space", "4")
    assert done.returncode == 2
    assert done.stderr.count("alias") == 1
    assert "never swapped" in done.stderr


def test_the_old_benchmark_path_takes_the_old_flags() -> None:
    words = ["--backend", "vllm", "--model", "m", "--num-prompts", "1", "--request-rate", "25"]
    done = octavo("octavo.benchmarks.benchmark_serving", *words, "--port", "9")
    assert done.returncode == 1
    assert done.stderr.count("alias") == 1
    assert "no server answers at http://127.0.0.1:9" in done.stderr


def test_brief_flags_parse_and_are_refused_by_name() -> None:
    parser = flags.Parser("serve", "x")
    flags.add_model(parser)
    flags.add_config(parser)
    flags.add_options(parser, EngineArgs, ServerArgs)
    words = ["--model", "m", "--tensor-parallel-size", "8", "--gpu-memory-utilization", "0.92"]
    parsed = parser.parse([*words, "--kv-cache-dtype", "fp8_e4m3", "--port", "8000"])
    assert isinstance(parsed, argparse.Namespace)
    assert flags.given(parsed, EngineArgs) == {
        "model": "m",
        "tensor_parallel_size": 8,
        "gpu_memory_utilization": 0.92,
        "kv_cache_dtype": "fp8_e4m3",
    }


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for word in ("python", "torch", "compiler", "cpu flags", "memory", "cache folder"):
        assert word in text
