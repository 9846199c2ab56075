"""Options: what a value is, where it came from, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given, strategies

from octavo.cli.flags import Parser, add_options
from octavo.errors import ConfigError
from octavo.fields import Option, flag_of, options_of, parse, parse_size
from octavo.options import AsyncEngineArgs, EngineArgs, ServerArgs, cache_dir, read_file
from octavo.renamed import DEAD_VARIABLES, REMOVED

VARIABLES = {
    name
    for record in (EngineArgs, ServerArgs)
    for o in options_of(record).values()
    for name in o.env
}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variable", "name", "text", "value", "flag", "file"),
    [
        ("GPU_MEMORY_UTILIZATION", "gpu_memory_utilization", "0.5", 0.5, 0.25, 0.75),
        ("MAX_NUM_BATCHED_TOKENS", "max_num_batched_tokens", "8192", 8192, 64, 128),
        ("KV_CACHE_DTYPE", "kv_cache_dtype", "bfloat16", "bfloat16", "auto", "float32"),
        ("TENSOR_PARALLEL_SIZE", "tensor_parallel_size", "1", 1, 2, 4),
    ],
)
def test_a_flag_wins_over_the_environment_over_a_file_over_the_default(
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    name: str,
    text: str,
    value: object,
    flag: object,
    file: object,
) -> None:
    default = getattr(EngineArgs(), name)
    from_file = EngineArgs.gather({}, {name: file}, "a.toml")
    assert (getattr(from_file, name), from_file.sources[name]) == (file, "file a.toml")
    monkeypatch.setenv(variable, text)
    from_variable = EngineArgs.gather({}, {name: file}, "a.toml")
    assert getattr(from_variable, name) == value
    assert from_variable.sources[name] == f"environment {variable}"
    assert getattr(EngineArgs(), name) == value
    from_flag = EngineArgs.gather({name: flag}, {name: file}, "a.toml")
    assert (getattr(from_flag, name), from_flag.sources[name]) == (flag, "flag")
    monkeypatch.delenv(variable)
    untouched = EngineArgs.gather({}, {})
    assert getattr(untouched, name) == default
    assert name not in untouched.sources


def test_an_argument_equal_to_the_default_still_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_MEMORY_UTILIZATION", "0.3")
    assert EngineArgs(gpu_memory_utilization=0.92).gpu_memory_utilization == 0.92
    assert EngineArgs("folder").gpu_memory_utilization == 0.3


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: EngineArgs(tensor_parallel_size=0), ("tensor_parallel_size=0", "at least 1")),
        (
            lambda: EngineArgs(distributed_executor_backend="mpi"),
            ("distributed_executor_backend='mpi'", "uni, mp, ray"),
        ),
        (lambda: EngineArgs(kv_cache_dtype="int3"), ("int3", "auto, bfloat16")),
        (lambda: EngineArgs(trust_remote_code=True), ("trust_remote_code=True", "never run")),
        (lambda: EngineArgs(block_size=0), ("block_size=0", "from 1 to 256")),
        (lambda: EngineArgs(block_size=257), ("block_size=257", "from 1 to 256")),
        (lambda: EngineArgs(gpu_memory_utilization=1.5), ("1.5", "0.01 to 1")),
        (lambda: EngineArgs(gpu_memory_utilization=float("nan")), ("nan", "0.01 to 1")),
        (lambda: EngineArgs(max_num_seqs=True), ("max_num_seqs=True", "type int")),
        (lambda: EngineArgs(max_num_seqs="many"), ("many", "type int")),
        (lambda: EngineArgs(max_model_len="long"), ("long", "auto")),
        (lambda: EngineArgs(scheduling_policy="lifo"), ("lifo", "fcfs, priority")),
        (lambda: EngineArgs(hf_overrides="x"), ("hf_overrides", "type dict")),
        (lambda: EngineArgs(enable_lora=True), ("enable_lora=True", "LoRA")),
        (lambda: EngineArgs(model=None), ("model=None", "type str")),
        (lambda: ServerArgs(port=70000), ("port=70000", "65535")),
        (lambda: ServerArgs(tool_call_parser="x"), ("tool_call_parser", "hermes")),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_option_value_and_remedy(
    make: object, words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        make().check()  # type: ignore[operator]
    for word in words:
        assert word in caught.value.message
    assert caught.value.option is not None
    assert caught.value.message.count("\n") == 0


def test_a_refused_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSOR_PARALLEL_SIZE", "0")
    with pytest.raises(ConfigError, match=r"TENSOR_PARALLEL_SIZE=0 \(environment, --tensor-par"):
        EngineArgs().check()


@pytest.mark.parametrize("record", [EngineArgs, ServerArgs])
def test_defaults_are_honoured_and_absent_options_are_refused(
    record: type[EngineArgs] | type[ServerArgs],
) -> None:
    record().check()
    for name, details in options_of(record).items():
        assert details.help, name
        if details.only is None:
            continue
        assert details.remedy.endswith("."), name
        args = record()
        setattr(args, name, "something else")
        with pytest.raises(ConfigError, match=name):
            args.check()


@pytest.mark.parametrize("name", sorted(REMOVED))
def test_removed_names_say_what_to_use(name: str) -> None:
    assert name not in options_of(EngineArgs)
    assert name not in options_of(ServerArgs)
    with pytest.raises(ConfigError) as caught:
        EngineArgs(**{name: 1})
    assert REMOVED[name] in caught.value.message


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean max_num_seqs"):
        EngineArgs(max_num_seq=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", sorted(DEAD_VARIABLES))
def test_dead_variables_stop_the_start(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=name):
        EngineArgs()


def test_thread_binding_is_refused_with_its_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "auto")
    EngineArgs()
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-3")
    with pytest.raises(ConfigError, match="taskset -c 0-3"):
        EngineArgs()


def test_cpu_cache_space_is_in_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    assert EngineArgs().kv_cache_memory_bytes == 4 * 2**30
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0")
    assert EngineArgs().kv_cache_memory_bytes is None


def test_a_variable_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_NUM_BATCHED_TOKENS", "lots")
    with pytest.raises(ConfigError, match=r"MAX_NUM_BATCHED_TOKENS .*'lots'"):
        EngineArgs()


@given(strategies.integers(0, 10**9))
def test_sizes(count: int) -> None:
    assert parse_size(str(count)) == count
    for unit, factor in {"k": 10**3, "K": 2**10, "m": 10**6, "MiB": 2**20, "G": 2**30}.items():
        assert parse_size(f"{count % 4096}{unit}") == (count % 4096) * factor
    assert parse_size("1.5K") == 1536


@pytest.mark.parametrize("text", ["", "k", "1kk", "0x10", "1 2", "nan", "infk", "1e3G2"])
def test_texts_that_are_no_sizes(text: str) -> None:
    details = Option(help="x", kind="size")
    with pytest.raises(ConfigError, match="whole number"):
        parse(details, text, "--x")


def test_keys_are_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sesame,open")
    server = ServerArgs()
    assert server.api_key == ["sesame", "open"]
    assert ("api_key", "(set)", "environment VLLM_API_KEY") in server.effective()
    assert "sesame" not in server.label("api_key")
    assert all("sesame" not in value for _, value, _ in server.effective())


def test_effective_values_are_text_with_their_source() -> None:
    rows = EngineArgs("folder", hf_overrides={"a": 1}).effective()
    assert ("model", "folder", "argument") in rows
    assert ("hf_overrides", '{"a": 1}', "argument") in rows
    assert ("max_num_seqs", "null", "default") in rows
    names = [name for name, _, _ in rows]
    assert len(names) == len(set(names))
    assert "enable_lora" not in names


def test_records_travel_between_processes() -> None:
    args = EngineArgs("folder", max_num_seqs=3)
    again = pickle.loads(pickle.dumps(args))
    assert again == args
    assert again.sources == args.sources
    assert dataclasses.asdict(again)["max_num_seqs"] == 3
    assert AsyncEngineArgs is EngineArgs


@pytest.mark.parametrize("suffix", ["toml", "json", "yaml"])
def test_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"server.{suffix}"
    text = {
        "toml": 'model = "folder"\nmax-num-seqs = 7\nserved-model-name = "a"\n',
        "json": json.dumps({"model": "folder", "max_num_seqs": 7, "served_model_name": "a"}),
        "yaml": "model: folder\nmax-num-seqs: 7\nserved-model-name: a\n",
    }[suffix]
    path.write_text(text)
    if suffix == "yaml":
        pytest.importorskip("yaml")
    values = read_file(str(path))
    assert values == {"model": "folder", "max_num_seqs": 7, "served_model_name": ["a"]}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.toml", "max-num-seq = 7", "did you mean max_num_seqs"),
        ("a.toml", "swap-space = 7", "recomputed, never swapped"),
        ("a.toml", "= 7", "cannot be read"),
        ("a.json", "[1]", "one mapping"),
        ("a.json", "{", "cannot be read"),
        ("a.ini", "x=1", "name it .yaml, .toml or .json"),
    ],
)
def test_bad_files_name_themselves(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        read_file(str(path))
    assert name in caught.value.message


def test_a_missing_file_names_itself(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.toml"):
        read_file(str(tmp_path / "gone.toml"))


def test_the_cache_folder_moves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_dir() == tmp_path / "x" / "octavo"
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "y"))
    assert cache_dir() == tmp_path / "y"
    assert cache_dir(EngineArgs(download_dir=str(tmp_path / "z"))) == tmp_path / "z"


def test_flag_names() -> None:
    assert flag_of("max_num_seqs") == "--max-num-seqs"


def test_texts_in_a_file_are_read_like_flags(tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    values = {
        "kv-cache-memory-bytes": "512M",
        "max-num-seqs": "1k",
        "max-model-len": "auto",
        "enable-prefix-caching": "false",
        "hf-overrides": '{"a": 1}',
        "revision": "none",
        "dtype": "half",
    }
    path.write_text(json.dumps(values))
    args = EngineArgs.gather({}, read_file(str(path)), str(path))
    args.check()
    assert args.kv_cache_memory_bytes == 512 * 2**20
    assert (args.max_num_seqs, args.max_model_len) == (1000, "auto")
    assert args.enable_prefix_caching is False
    assert args.hf_overrides == {"a": 1}
    assert args.revision is None
    assert args.dtype == "float16"
    assert args.sources["dtype"] == f"file {path}"


def test_a_text_in_a_file_that_is_no_number_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_num_seqs \(in a\.json\) is 'many'"):
        EngineArgs.gather({}, {"max_num_seqs": "many"}, "a.json")


@pytest.mark.parametrize("text", ["INFO", "Info", "info"])
def test_choices_may_be_in_any_case_wherever_they_come_from(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    assert ServerArgs(log_level=text).log_level == "info"
    assert ServerArgs.gather({"log_level": text}, {}).log_level == "info"
    assert ServerArgs.gather({}, {"log_level": text}, "a.toml").log_level == "info"
    parser = Parser("serve", "x")
    add_options(parser, ServerArgs)
    assert parser.parse(["--log-level", text]).log_level == "info"
    monkeypatch.setenv("OCTAVO_LOGGING_LEVEL", text)
    assert ServerArgs().log_level == "info"


@pytest.mark.parametrize(("word", "dtype"), [("half", "float16"), ("FLOAT", "float32")])
def test_words_for_number_formats(word: str, dtype: str) -> None:
    assert EngineArgs(dtype=word).dtype == dtype
    assert EngineArgs.gather({"dtype": word}, {}).dtype == dtype
    assert EngineArgs.gather({}, {"dtype": word}, "a.toml").dtype == dtype


@pytest.mark.parametrize(
    ("name", "other"), [("ssl_keyfile", "ssl-certfile"), ("ssl_certfile", "ssl-keyfile")]
)
def test_https_needs_both_files(name: str, other: str) -> None:
    args = ServerArgs()
    setattr(args, name, "a.pem")
    with pytest.raises(ConfigError, match=f"{name}='a.pem': HTTPS needs --{other} as well"):
        args.check()
    ServerArgs(ssl_keyfile="a.pem", ssl_certfile="a.pem").check()


def test_a_revision_of_no_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="tokenizer_revision='v1'"):
        EngineArgs(tokenizer_revision="v1").check()
    EngineArgs(tokenizer="a", tokenizer_revision="v1").check()


def test_what_quantization_there_is() -> None:
    EngineArgs(quantization="int8").check()
    with pytest.raises(ConfigError, match="one of fp8, int8, int4, awq"):
        EngineArgs(quantization="bitsandbytes").check()


@pytest.mark.parametrize("flag", ["--api-key", "--served-model-name", "--allowed-origins"])
def test_an_empty_text_in_a_list_is_refused(flag: str) -> None:
    parser = Parser("serve", "x")
    add_options(parser, EngineArgs, ServerArgs)
    for text in ("", "a,,b"):
        args = ServerArgs.gather(vars(parser.parse([flag, text])), {})
        with pytest.raises(ConfigError, match="empty"):
            args.check()


def test_an_empty_variable_for_keys_does_not_open_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in ("OCTAVO_API_KEY", "VLLM_API_KEY"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "")
            with pytest.raises(ConfigError, match=f"{variable} is set and empty"):
                ServerArgs()


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    for suffix in (".json", ".toml", ".yaml"):
        path = tmp_path / f"c{suffix}"
        path.write_bytes(b"\xff\xfe")
        with pytest.raises(ConfigError, match=r"--config .*is not UTF-8"):
            read_file(str(path))
