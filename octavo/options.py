"""Every option a person can set, once: fields become flags, variables, file keys and arguments.

`EngineArgs` is what an engine needs, `ServerArgs` what the HTTP server adds. Names and defaults
are those of vLLM where they mean the same. A value that this build cannot honour is refused by
`check`, with the option, the value and the remedy; nothing is ignored.
This is the only module that reads `os.environ`.
Not for: deciding what "auto" means (`resolve.py`), parsing a command line (`cli/flags.py`).
Next file: `resolve.py`.
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
import secrets
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.fields import (
    Record,
    absent,
    flag_of,
    is_service_link,
    option,
    options_of,
    unknown_name,
)

DEFAULT_MODEL = "smollm2-135m"
ONE_DEVICE = "this build runs a model on one CPU device; use 1, and start more servers for more."
GIB = 2**30
TEST_VARIABLES = ("OCTAVO_TEST_MODEL",)


@dataclass
class EngineArgs(Record):
    """Options of an engine; also exported as `AsyncEngineArgs`."""

    model: str = option(
        DEFAULT_MODEL,
        "folder, GGUF file, hub id, or a name that `octavo pull` knows",
        group="Model",
    )
    tokenizer: str | None = option(
        None,
        "folder or file of another tokenizer; the model's own if left out",
        kind="str",
        group="Model",
    )
    revision: str | None = option(
        None, "branch, tag or commit of a hub model", kind="str", group="Model"
    )
    tokenizer_revision: str | None = option(
        None, "branch, tag or commit of a hub tokenizer", kind="str", group="Model"
    )
    download_dir: str | None = option(
        None,
        "folder for downloaded weights and built kernels; ~/.cache/octavo if left out",
        kind="str",
        group="Model",
        env=("OCTAVO_CACHE_DIR", "VLLM_CACHE_ROOT"),
    )
    load_format: str = option(
        "auto",
        "kind of weights file; dummy makes random weights from config.json alone",
        group="Model",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    dtype: str = option(
        "auto",
        "number format of weights and activations; auto is bfloat16 where the CPU computes it",
        group="Model",
        choices=("auto", "bfloat16", "float16", "float32", "half", "float"),
        aliases=(("half", "float16"), ("float", "float32")),
    )
    quantization: str | None = option(
        None,
        "fp8, int8 or int4 quantize the weights while they load (fp8 for GPUs, the others for the "
        "CPU's native kernels; answers differ a little); left out, what the checkpoint says holds",
        kind="str",
        group="Model",
        choices=("fp8", "int8", "int4", "awq", "gptq", "compressed-tensors"),
    )
    hf_overrides: dict[str, Any] = option(
        {}, "JSON object laid over the model's config.json", group="Model"
    )
    generation_config: str = option(
        "auto",
        "where sampling defaults come from: auto (the model's file), vllm (none), or a folder",
        group="Model",
    )
    override_generation_config: dict[str, Any] = option(
        {}, "JSON object laid over the model's sampling defaults", group="Model"
    )
    seed: int = option(
        0,
        "seed of dummy weights, and of the seeds that requests without one get",
        group="Model",
        minimum=0,
    )
    trust_remote_code: bool = option(
        False,
        "refused: no family here needs it",
        group="Model",
        only=(False,),
        remedy="a checkpoint's own Python is never run, for it could do anything on this machine; "
        "leave it out, the families listed in the README need none.",
    )

    max_model_len: int | str | None = option(
        None,
        "longest sequence, prompt and answer together; auto (or -1) fits it to the memory left",
        kind="size",
        group="Memory",
        words=("auto",),
        minimum=-1,
    )
    gpu_memory_utilization: float = option(
        0.92,
        "share of a GPU's memory, or of the machine's free memory, for weights and KV cache",
        group="Memory",
        minimum=0.01,
        maximum=1.0,
        env=("GPU_MEMORY_UTILIZATION",),
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "exact size of the KV cache; units like 512M or 4G work",
        kind="size",
        group="Memory",
        minimum=1,
        env=("VLLM_CPU_KVCACHE_SPACE",),
        env_scale=GIB,
    )
    kv_cache_dtype: str = option(
        "auto",
        "number format of the KV cache; auto is the model's, fp8 (e4m3) holds twice the tokens",
        group="Memory",
        env=("KV_CACHE_DTYPE",),
        choices=("auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2"),
    )
    block_size: int | None = option(
        None,
        "tokens a KV page; 16 on the CPU and 64 on a GPU if left out",
        kind="int",
        group="Memory",
        minimum=1,
        maximum=256,
    )
    num_gpu_blocks_override: int | None = option(
        None, "exact number of KV pages", kind="int", group="Memory", minimum=1
    )
    enable_prefix_caching: bool = option(
        True, "reuse the pages of prompts that begin alike", group="Memory"
    )

    max_num_batched_tokens: int | None = option(
        None,
        "most tokens computed in one step; 2048 on the CPU and 8192 on a GPU if left out",
        kind="size",
        group="Scheduling",
        minimum=1,
        env=("MAX_NUM_BATCHED_TOKENS",),
    )
    max_num_seqs: int | None = option(
        None,
        "most sequences in one step; 128 on the CPU and 512 on a GPU if left out",
        kind="size",
        group="Scheduling",
        minimum=1,
    )
    enable_chunked_prefill: bool = option(
        True, "let a long prompt share steps with running answers", group="Scheduling"
    )
    scheduling_policy: str = option(
        "fcfs",
        "who leaves the queue first: oldest, lowest priority number, or (fair) a request of the "
        "API key that was served the fewest tokens for its weight",
        group="Scheduling",
        choices=("fcfs", "priority", "fair"),
    )
    max_num_queued_reqs: int | None = option(
        None,
        "requests that may wait before new ones get 429; eight times --max-num-seqs if left out",
        kind="int",
        group="Scheduling",
        minimum=1,
    )
    max_num_queued_tokens: int | None = option(
        None,
        "prompt tokens that may wait before new requests get 429",
        kind="size",
        group="Scheduling",
        minimum=1,
    )
    max_logprobs: int = option(
        20,
        "most alternatives a request may ask for; -1 for no limit",
        group="Scheduling",
        minimum=-1,
    )

    device: str = option(
        "auto",
        "cpu, cuda or cuda:N; auto takes the first GPU if there is one that torch can use",
        group="Execution",
        env=("OCTAVO_DEVICE",),
    )
    attention_backend: str = option(
        "auto",
        "auto, native (C++), triton (GPU), fa3 or flashinfer (GPU, where installed), sdpa "
        "(plain torch), or for latent attention mla_triton (GPU) or mla_sdpa (plain torch); the "
        "choice is printed with its reason",
        group="Execution",
    )
    kernels: str = option(
        "auto",
        "native (C++, built on first use), onednn, triton (GPU) or reference (plain torch); auto "
        "takes the first that works",
        group="Execution",
        choices=("auto", "native", "onednn", "triton", "reference"),
    )
    threads: int | None = option(
        None,
        "threads that compute; the physical cores if left out",
        kind="int",
        group="Execution",
        minimum=1,
        env=("OCTAVO_THREADS", "OMP_NUM_THREADS"),
    )
    enforce_eager: bool = option(
        False, "launch every kernel, no captured graphs; the CPU has none", group="Execution"
    )
    tensor_parallel_size: int = option(
        1,
        "devices that share each layer; it must divide the model's heads and widths",
        group="Execution",
        minimum=1,
        env=("TENSOR_PARALLEL_SIZE",),
    )
    pipeline_parallel_size: int = option(
        1,
        "stages that share the layers in turn, each of --tensor-parallel-size devices",
        group="Execution",
        minimum=1,
        env=("PIPELINE_PARALLEL_SIZE",),
    )
    data_parallel_size: int = option(
        1,
        "copies of the engine behind one server, each with its own devices; a request goes to the "
        "one with the fewest tokens before it, where a prompt that its cache has counts as done",
        group="Execution",
        minimum=1,
        maximum=1024,
    )
    distributed_executor_backend: str | None = option(
        None,
        "how workers are started: uni (one, in the engine's process), mp (processes of this "
        "machine) or ray (actors of a cluster); if left out, uni for one device, ray where an "
        "address of a cluster is given or the GPUs here are too few, else mp",
        kind="str",
        group="Execution",
        choices=("uni", "mp", "ray"),
    )
    ray_address: str | None = option(
        None,
        "address of a running Ray cluster, HOST:PORT or auto",
        kind="str",
        group="Execution",
        env=("RAY_ADDRESS",),
    )

    disable_log_stats: bool = option(
        True,
        "load and speed are on the route /metrics and never logged, so both values mean the same",
        group="Logging",
    )
    enable_log_requests: bool = option(
        False, "log a line for each request of the server that has ended", group="Logging"
    )
    timeline_requests: int = option(
        512,
        "last requests of which GET /v1/requests/{id}/timeline can tell; 0 writes none down",
        group="Logging",
        minimum=0,
        maximum=100_000,
    )

    tokenizer_mode: str = absent("auto", "there is one tokenizer; use auto.")
    runner: str = absent("auto", "models generate text only; use auto.")
    convert: str = absent("auto", "models generate text only; use auto.")
    skip_tokenizer_init: bool = absent(False, "the tokenizer is always loaded; leave it out.")
    async_scheduling: bool | None = absent(
        None, "planning and computing take turns on the CPU; leave it out.", kind="bool"
    )
    compilation_config: Any = absent(None, "nothing is compiled; leave it out.", kind="json")
    optimization_level: int | None = absent(None, "nothing is compiled; leave it out.", kind="int")
    performance_mode: str | None = absent(None, "there is one mode; leave it out.", kind="str")
    cpu_offload_gb: float = absent(0.0, "weights are on the CPU already; leave it out.")
    kv_offloading_size: float | None = absent(
        None, "the KV cache is in main memory already; leave it out.", kind="float"
    )
    kv_transfer_config: Any = absent(
        None, "prefill and decode run in one place; leave it out.", kind="json"
    )
    speculative_config: Any = absent(
        None, "speculative decoding is not built yet; leave it out.", kind="json"
    )
    structured_outputs_config: Any = absent(
        None, "structured outputs have one backend, and limits of their own.", kind="json"
    )
    logits_processors: Any = absent(
        None, "use logit_bias, bad_words or allowed_token_ids of a request.", kind="list"
    )
    enable_lora: bool = absent(False, "LoRA adapters are not built yet; leave it out.")
    lora_modules: list[str] | None = absent(
        None, "LoRA adapters are not built yet; leave it out.", kind="list"
    )
    enable_sleep_mode: bool = absent(False, "an engine cannot sleep yet; leave it out.")
    stream_interval: int = absent(1, "each token is sent as soon as it is there; use 1.")
    logprobs_mode: str = absent(
        "raw_logprobs", "log-probs are of the model's own logits; use raw_logprobs."
    )
    limit_mm_per_prompt: Any = absent(None, "prompts are text only; leave it out.", kind="json")
    enable_expert_parallel: bool = absent(False, ONE_DEVICE)
    nnodes: int = absent(1, "more than one machine is not supported in this build; use 1.")
    node_rank: int = absent(0, "more than one machine is not supported in this build; use 0.")

    def __post_init__(self) -> None:
        refuse_unknown_variables(os.environ)
        self.fill(os.environ)

    def check(self) -> None:
        """Raises ConfigError for the first value that cannot be honoured."""
        super().check()
        if self.tokenizer_revision is not None and self.tokenizer is None:
            raise ConfigError(
                f"{self.label('tokenizer_revision')}: it is the revision of --tokenizer, which is "
                "not set; the model's own tokenizer is of --revision.",
                "tokenizer_revision",
            )


@dataclass
class ServerArgs(Record):
    """Options of the HTTP server."""

    host: str | None = option(
        None, "address to listen on; all interfaces if left out", kind="str", env=("OCTAVO_HOST",)
    )
    port: int = option(
        8000,
        "port to listen on; 0 takes a free one",
        minimum=0,
        maximum=65535,
        env=("OCTAVO_PORT",),
    )
    uds: str | None = option(None, "Unix socket to listen on instead", kind="str")
    root_path: str = option("", "path prefix that a proxy in front has removed")
    api_key: list[str] = option(
        [],
        "key that clients must send; give it again for more keys",
        secret=True,
        env=("OCTAVO_API_KEY", "VLLM_API_KEY"),
    )
    api_keys_file: str | None = option(
        None,
        "TOML or JSON file of keys with names, scopes and weights (docs/serving.md)",
        kind="str",
        env=("OCTAVO_API_KEYS_FILE",),
    )
    allowed_origins: list[str] = option([], "origins that browsers may call from")
    allowed_methods: list[str] = option(["*"], "methods that browsers may use")
    allowed_headers: list[str] = option(["*"], "headers that browsers may send")
    allow_credentials: bool = option(False, "let browsers send cookies")
    ssl_keyfile: str | None = option(None, "private key, for HTTPS", kind="str")
    ssl_certfile: str | None = option(None, "certificate, for HTTPS", kind="str")
    served_model_name: list[str] = option(
        [], "names that requests may use for the model; its path or id if left out"
    )
    shutdown_timeout: float = option(
        30.0, "seconds that running requests get to end after SIGTERM", minimum=0
    )
    request_timeout: float = option(
        0.0,
        "seconds in which a request that names no deadline must be answered, else 504; 0 is none",
        minimum=0,
    )
    stall_limit: float = option(
        10.0,
        "seconds without a step, while work waits, after which readiness is 503 and the stacks of "
        "the engine are logged",
        minimum=0.1,
    )
    timeout_keep_alive: int = option(
        5,
        "seconds that an idle connection is kept",
        minimum=0,
        env=("VLLM_HTTP_TIMEOUT_KEEP_ALIVE",),
    )
    sse_keep_alive_interval: float = option(
        0.0, "seconds between comments in a silent stream; 0 sends none", minimum=0
    )
    max_resume_seconds: float = option(
        60.0,
        "longest time for which a request may ask to be kept when its stream breaks "
        "(header X-Octavo-Resume, docs/serving.md); 0 keeps none",
        minimum=0,
    )
    max_held_streams: int = option(
        64, "broken streams that are kept at the same time, over all API processes", minimum=1
    )
    max_held_bytes: int = option(
        64 * 2**20,
        "bytes of events that are kept for streams that can be resumed",
        kind="size",
        minimum=65536,
    )
    max_body_bytes: int = option(
        32 * 2**20, "largest request body; larger ones get 413", kind="size", minimum=1024
    )

    chat_template: str | None = option(
        None, "chat template (file or text) instead of the model's", kind="str", group="Requests"
    )
    default_chat_template_kwargs: dict[str, Any] = option(
        {}, "JSON object of template arguments for every request", group="Requests"
    )
    trust_request_chat_template: bool = option(
        False, "let a request bring its own chat template", group="Requests"
    )
    response_role: str = option("assistant", "role of answers", group="Requests")
    enable_auto_tool_choice: bool = option(
        False, "let the model decide whether to call tools (tool_choice auto)", group="Requests"
    )
    tool_call_parser: str = option(
        "auto",
        "how the model writes calls of tools; auto reads it off the chat template",
        kind="str",
        choices=(
            *("auto", "hermes", "qwen", "qwen3_xml", "qwen3_coder", "llama3_json", "mistral"),
            *("deepseek_v3", "deepseek_v31"),
        ),
        group="Requests",
    )
    reasoning_parser: str | None = option(
        None,
        "how the model writes its thoughts, which then are told from the answer",
        kind="str",
        choices=("auto", "deepseek_r1", "qwen3"),
        group="Requests",
    )
    strict_fields: bool = option(
        True, "refuse unknown fields in requests with the nearest known name", group="Requests"
    )
    enable_prompt_tokens_details: bool = option(
        True,
        "say in usage how many prompt tokens were cached; always on",
        group="Requests",
        only=(True,),
        remedy="cached tokens are always told; leave it out.",
    )
    enable_force_include_usage: bool = option(
        False, "send usage at the end of every stream", group="Requests"
    )
    enable_request_id_headers: bool = option(
        True,
        "send X-Request-Id; always on",
        group="Requests",
        only=(True,),
        remedy="request ids are always sent; leave it out.",
    )

    enable_server_load_tracking: bool = option(
        True,
        "count requests in flight for the route /load; always on",
        group="Logging",
        only=(True,),
        remedy="requests are always counted; leave it out.",
    )
    metric_aliases: list[str] = option(
        [], "sets of other metric names to export as well: legacy, seed", group="Logging"
    )
    log_level: str = option(
        "info",
        "how much is logged",
        group="Logging",
        choices=("debug", "info", "warning", "error"),
        env=("OCTAVO_LOGGING_LEVEL", "VLLM_LOGGING_LEVEL"),
    )
    uvicorn_log_level: str = option(
        "warning",
        "how much the HTTP library logs",
        group="Logging",
        choices=("trace", "debug", "info", "warning", "error", "critical"),
    )

    engine_ready_timeout: int = absent(600, "loading has no time limit yet; leave it out.")
    chat_template_content_format: str = absent(
        "auto", "how parts reach the template is read off the template; use auto."
    )
    enable_per_request_metrics: bool = absent(False, "not built yet; leave it out.")
    enable_tokenizer_info_endpoint: bool = absent(False, "not built yet; leave it out.")
    otlp_traces_endpoint: str | None = absent(
        None, "traces are not exported yet; leave it out.", kind="str"
    )
    api_server_count: int = option(
        1,
        "processes that serve HTTP on one port, before one engine; each has its share of the queue",
        group="Server",
        minimum=1,
        maximum=64,
    )
    headless: bool = absent(False, "more than one machine is not supported in this build.")
    disable_uvicorn_access_log: bool = option(
        True,
        "there is no access log, so both values mean the same",
        group="Logging",
        only=(True, False),
        remedy="there is no access log; use true or false.",
        hidden=True,
    )
    disable_access_log_for_endpoints: str | None = absent(
        None, "there is no access log; leave it out.", kind="str"
    )

    def __post_init__(self) -> None:
        refuse_unknown_variables(os.environ)
        self.fill(os.environ)

    def check(self) -> None:
        """Raises ConfigError for the first value that cannot be honoured."""
        super().check()
        for name, other in (("ssl_keyfile", "ssl_certfile"), ("ssl_certfile", "ssl_keyfile")):
            if self.__dict__[name] and not self.__dict__[other]:
                raise ConfigError(
                    f"{self.label(name)}: HTTPS needs {flag_of(other)} as well; give the same file "
                    "twice if it holds both key and certificate.",
                    other,
                )
        if self.api_server_count > 1 and self.uds:
            raise ConfigError(
                f"{self.label('uds')}: only a TCP port can be shared by "
                f"{self.label('api_server_count')}; use --host and --port.",
                "uds",
            )


AsyncEngineArgs = EngineArgs


def refuse_unknown_variables(environ: Mapping[str, str]) -> None:
    """Raises ConfigError for a variable that looks like one of ours and that nothing reads.

    Kubernetes sets such names for a Service called octavo; those are known by their form.
    """
    mine = [name for name in environ if name.startswith("OCTAVO_")]
    if not mine:
        return
    known = {
        variable
        for record in (EngineArgs, ServerArgs)
        for details in options_of(record).values()
        for variable in details.env
    }
    for name in mine:
        if name in known or name in TEST_VARIABLES or is_service_link(name, environ[name]):
            continue
        near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else "`octavo serve --help` lists all."
        raise ConfigError(f"{name} is set, but nothing reads it; {hint}", name)


def read_file(path: str) -> dict[str, object]:
    """The options in a YAML, TOML or JSON file, by field name. Raises ConfigError."""
    known = [*options_of(EngineArgs), *options_of(ServerArgs)]
    values: dict[str, object] = {}
    for key, value in _load(Path(path)).items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigError(f"{path}: {unknown_name(name, known, name)}", name)
        single = name in ("api_key", "served_model_name") and isinstance(value, str)
        values[name] = [value] if single else value
    return values


def _load(path: Path) -> Mapping[object, object]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}.", "config") from None
    except UnicodeError as error:
        raise ConfigError(f"--config {path} is not UTF-8 text: {error}.", "config") from None
    try:
        if path.suffix == ".toml":
            loaded: object = tomllib.loads(text)
        elif path.suffix == ".json":
            loaded = json.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            loaded = _load_yaml(text, path)
        else:
            raise ConfigError(f"--config {path}: name it .yaml, .toml or .json.", "config")
    except ValueError as error:  # both JSON's and TOML's errors are ValueErrors
        raise ConfigError(f"--config {path} cannot be read: {error}.", "config") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"--config {path} must hold one mapping of options.", "config")
    return loaded


def _load_yaml(text: str, path: Path) -> object:
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise ConfigError(
            f"--config {path}: reading YAML needs the package PyYAML, which is not installed; "
            "install it, or write the file as TOML or JSON.",
            "config",
        ) from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path} cannot be read: {error}.", "config") from None


def cache_dir(args: EngineArgs | None = None) -> Path:
    """The folder of downloaded models and built kernels: flag, variable, then ~/.cache/octavo."""
    chosen = (args or EngineArgs()).download_dir
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "octavo"


def visible_gpus() -> str | None:
    """What `CUDA_VISIBLE_DEVICES` says; None if it is not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def prepare_ray(*, own: bool) -> bool:
    """Sets what Ray reads of the environment when it is imported, unless it is set.

    No reports of use leave the machine. A cluster that this process starts for its `own` use gets
    token authentication, with a token of its own. False if a cluster is not protected so.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if own:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        if "RAY_AUTH_TOKEN_PATH" not in os.environ:
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def client_key() -> str | None:
    """The API key that the bundled clients send, from OPENAI_API_KEY or OCTAVO_API_KEY."""
    return os.environ.get("OPENAI_API_KEY") or os.environ.get("OCTAVO_API_KEY") or None


def unset_variables(names: Iterable[str]) -> list[str]:
    """Those of the names that the environment does not have, or has empty."""
    return [name for name in names if not os.environ.get(name)]


def environment_with(**more: str) -> dict[str, str]:
    """The environment for a child process, with variables that the caller adds."""
    return {**os.environ, **more}
