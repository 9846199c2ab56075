"""`octavo bench serve`: load on an OpenAI-compatible server, Octavo's or another.

Sends the requests of a data set at a rate, measures each stream, prints the block.
Not for: comparing two servers, which takes more care than two runs of this.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
import uuid
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from octavo.bench import dataset
from octavo.bench.client import LONGEST_EVENT, Outcome, Target, send
from octavo.bench.dataset import Sample
from octavo.bench.report import TITLES, Figures, Options, as_json, block
from octavo.checkpoint.checkpoint import open_checkpoint
from octavo.errors import CheckpointError, ConfigError, OctavoError
from octavo.options import EngineArgs, cache_dir, client_key
from octavo.text.tokenizer import Tokenizer

BACKENDS = ("openai", "vllm", "octavo", "openai-chat")
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
REFUSED = {
    "lora_modules": "adapters are not sent",
    "use_beam_search": "beam search is not offered",
    "plot_timeline": "no plots are drawn",
    "plot_dataset_stats": "no plots are drawn",
    "probe_request_rate": "no probe requests are sent",
    "ramp_up_strategy": "the rate is constant",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags of the benchmark."""
    parser.add_argument("--backend", choices=BACKENDS, default="openai")
    parser.add_argument("--base-url", help="address of the server, instead of host and port")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--endpoint", help="/v1/completions, or /v1/chat/completions for chat")
    parser.add_argument("--header", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--insecure", action="store_true", help="do not check certificates")
    parser.add_argument("--model", help="the first of /v1/models if left out")
    parser.add_argument("--served-model-name", help="name to send, if it is not the model's")
    parser.add_argument("--tokenizer", help="folder, file or name; the model's if left out")
    _add_traffic(parser)
    _add_sampling(parser)
    _add_results(parser)
    dataset.add_arguments(parser)
    for name in REFUSED:
        parser.add_argument(f"--{name.replace('_', '-')}", nargs="*", help=argparse.SUPPRESS)


def _add_traffic(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("traffic")
    group.add_argument("--request-rate", type=float, default=float("inf"), help="requests a second")
    group.add_argument(
        "--burstiness", type=float, default=1.0, help="1 is Poisson; less is burstier"
    )
    group.add_argument("--max-concurrency", type=int, help="most requests open at once")
    group.add_argument("--num-warmups", type=int, default=0)
    group.add_argument("--ready-check-timeout-sec", type=float, default=0.0)
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--request-id-prefix", default="bench-")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    group.add_argument("--profile", action="store_true", help="call /start_profile, /stop_profile")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for name in SAMPLING:
        group.add_argument(f"--{name.replace('_', '-')}", type=float)
    group.add_argument("--repetition-penalty", type=float, default=1.0)
    group.add_argument("--ignore-eos", action="store_true")
    group.add_argument("--logprobs", type=int)
    group.add_argument("--extra-body", type=_json, default={}, metavar="JSON")


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error})") from None


def _add_results(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    group.add_argument("--percentile-metrics", default="ttft,tpot,itl")
    group.add_argument("--metric-percentiles", default="99")
    group.add_argument("--goodput", nargs="+", default=[], metavar="METRIC:MS")
    group.add_argument("--save-result", action="store_true")
    group.add_argument("--save-detailed", action="store_true")
    group.add_argument("--append-result", action="store_true")
    group.add_argument("--result-dir", type=Path, default=Path("."))
    group.add_argument("--result-filename")
    group.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE")
    group.add_argument("--label")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; 1 if no request was answered."""
    _refuse(args)
    options = _options(args)
    if args.temperature is None:
        print("note: no temperature is sent, the server's default is used", file=sys.stderr)
    figures, target, tokenizer = asyncio.run(_run(args, options))
    print(block(figures, options))
    if args.save_result or args.append_result:
        _save(args, figures, options, target, tokenizer)
    failed = [outcome for outcome in figures.outcomes if not outcome.success]
    if failed:
        print(f"{len(failed)} requests failed; the first: {failed[0].error}", file=sys.stderr)
    return 0 if figures.good else 1


def _refuse(args: argparse.Namespace) -> None:
    values = vars(args)
    for name, reason in REFUSED.items():
        if values[name] is not None:
            raise ConfigError(f"--{name.replace('_', '-')}: {reason}; leave it out.", name)
    try:
        urlsplit(args.base_url or "").port  # noqa: B018  it is read to be checked
    except ValueError as error:
        raise ConfigError(f"--base-url {args.base_url}: {error}.", "base_url") from None
    if args.request_rate <= 0:
        raise ConfigError(f"--request-rate {args.request_rate} must be above 0.", "request_rate")
    if not isinstance(args.extra_body, dict):
        raise ConfigError("--extra-body must be a JSON object.", "extra_body")
    if args.burstiness <= 0:
        raise ConfigError(f"--burstiness {args.burstiness} must be above 0.", "burstiness")
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ConfigError("--max-concurrency must be at least 1.", "max_concurrency")


def _options(args: argparse.Namespace) -> Options:
    metrics = tuple(name.strip() for name in args.percentile_metrics.split(",") if name.strip())
    for name in metrics:
        if name not in TITLES:
            known = ", ".join(TITLES)
            raise ConfigError(f"--percentile-metrics: {name!r} is not one of {known}.")
    goodput: dict[str, float] = {}
    for pair in args.goodput:
        name, _, bound = pair.partition(":")
        try:
            goodput[name] = float(bound)
        except ValueError:
            raise ConfigError(f"--goodput {pair!r} must be METRIC:MILLISECONDS.") from None
        if name not in ("ttft", "tpot", "e2el"):
            raise ConfigError(f"--goodput {pair!r}: the metric must be ttft, tpot or e2el.")
    percentiles = _percentiles(args.metric_percentiles)
    return Options(args.request_rate, args.max_concurrency, metrics, percentiles, goodput)


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 <= value <= 100 for value in found):
        raise ConfigError(
            f"--metric-percentiles {text!r} must be numbers from 0 to 100 with commas between "
            "them, such as 50,99.",
            "metric_percentiles",
        )
    return found


async def _run(args: argparse.Namespace, options: Options) -> tuple[Figures, Target, str]:
    base = (args.base_url or f"http://{args.host}:{args.port}").rstrip("/")
    connector = aiohttp.TCPConnector(limit=0, ssl=not args.insecure)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, read_bufsize=LONGEST_EVENT
    ) as client:
        headers = _headers(args)
        await _wait_ready(client, base, headers, args.ready_check_timeout_sec)
        model, root = await _model(client, base, headers, args.model)
        tokenizer, tokenizer_name = _tokenizer([args.tokenizer, args.model, root, model])
        chat = args.backend == "openai-chat"
        samples = dataset.samples(args, tokenizer)
        if chat:
            samples = [_as_text(sample, tokenizer) for sample in samples]
        endpoint = args.endpoint or ("/v1/chat/completions" if chat else "/v1/completions")
        name = args.served_model_name or model
        target = Target(base + endpoint, name, chat, headers, _body(args))
        for _ in range(args.num_warmups):
            await send(client, target, samples[0], f"{args.request_id_prefix}warm-{uuid.uuid4()}")
        await _profile(client, base, headers, args.profile, "start")
        figures = await _measure(client, target, samples, args, options)
        await _profile(client, base, headers, args.profile, "stop")
        return figures, target, tokenizer_name


async def _measure(
    client: aiohttp.ClientSession,
    target: Target,
    samples: list[Sample],
    args: argparse.Namespace,
    options: Options,
) -> Figures:
    gate = asyncio.Semaphore(options.max_concurrency or len(samples))
    columns = (TextColumn("Requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(file=sys.stderr)
    tasks: list[asyncio.Task[Outcome]] = []
    run_id = uuid.uuid4().hex[:8]
    with Progress(*columns, console=console, disable=args.disable_tqdm, transient=True) as bar:
        shown = bar.add_task("requests", total=len(samples))

        async def one(index: int, sample: Sample) -> Outcome:
            async with gate:
                request_id = f"{args.request_id_prefix}{run_id}-{index}"
                outcome = await send(client, target, sample, request_id)
            bar.advance(shown)
            return outcome

        begin = time.perf_counter()
        async for index, sample in _arrivals(samples, args):
            tasks.append(asyncio.create_task(one(index, sample)))
        outcomes = list(await asyncio.gather(*tasks))
        return Figures(time.perf_counter() - begin, outcomes)


async def _arrivals(
    samples: list[Sample], args: argparse.Namespace
) -> AsyncIterator[tuple[int, Sample]]:
    """Samples at their moments: gamma-distributed gaps whose sum is scaled to the wanted rate."""
    rnd = random.Random(args.seed)
    gaps = [0.0] * len(samples)
    if args.request_rate != float("inf"):
        shape = args.burstiness
        gaps = [rnd.gammavariate(shape, 1 / (args.request_rate * shape)) for _ in samples]
        gaps[0] = 0.0
    moment = time.perf_counter()
    for (index, sample), gap in zip(enumerate(samples), gaps, strict=True):
        moment += gap
        if (wait := moment - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        yield index, sample


def _headers(args: argparse.Namespace) -> dict[str, str]:
    headers = {}
    if key := client_key():
        headers["authorization"] = f"Bearer {key}"
    for pair in args.header:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--header {pair!r} must be NAME=VALUE.", "header")
        headers[name.strip()] = value.strip()
    return headers


def _body(args: argparse.Namespace) -> dict[str, Any]:
    values = vars(args)
    body = {name: values[name] for name in SAMPLING if values[name] is not None}
    if "top_k" in body:
        body["top_k"] = int(body["top_k"])
    body["repetition_penalty"] = args.repetition_penalty
    if args.ignore_eos:
        body["ignore_eos"] = True
    if args.logprobs is not None:
        chat = args.backend == "openai-chat"
        body |= (
            {"logprobs": True, "top_logprobs": args.logprobs}
            if chat
            else {"logprobs": args.logprobs}
        )
    return {**body, **args.extra_body}


async def _wait_ready(
    client: aiohttp.ClientSession, base: str, headers: dict[str, str], seconds: float
) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            async with client.get(f"{base}/v1/models", headers=headers) as response:
                if response.status == 200:
                    return
                problem = f"HTTP {response.status}: {(await response.text())[:200]}"
        except (aiohttp.ClientError, TimeoutError) as error:
            problem = f"{type(error).__name__}: {error}"
        if time.monotonic() >= deadline:
            raise OctavoError(
                f"no server answers at {base} ({problem}); start one with `octavo serve`, or name "
                "it with --base-url. --ready-check-timeout-sec N waits for one that is starting."
            )
        await asyncio.sleep(0.5)


async def _model(
    client: aiohttp.ClientSession, base: str, headers: dict[str, str], wanted: str | None
) -> tuple[str, str | None]:
    """The name to send, and the folder or id behind it if the server says so."""
    async with client.get(f"{base}/v1/models", headers=headers) as response:
        cards = (await response.json())["data"]
    if wanted is None and not cards:
        raise OctavoError(f"{base}/v1/models lists no model; name one with --model.")
    by_name = {card["id"]: card.get("root") for card in cards}
    name = wanted or cards[0]["id"]
    return name, by_name.get(name)


def _tokenizer(names: list[str | None]) -> tuple[Tokenizer, str]:
    """The tokenizer of the first name that can be opened."""
    problems = []
    for name in dict.fromkeys(filter(None, names)):
        try:
            folder = cache_dir(EngineArgs())
            checkpoint = open_checkpoint(name, cache_dir=folder, weights=False)
            return Tokenizer.from_checkpoint(checkpoint), name
        except CheckpointError as error:
            problems.append(f"{name}: {error.message}")
    raise ConfigError(
        "no tokenizer can be opened to make and count prompts; name a local one with --tokenizer. "
        + " ".join(problems)
    )


def _as_text(sample: Sample, tokenizer: Tokenizer) -> Sample:
    if isinstance(sample.prompt, str):
        return sample
    return Sample(tokenizer.decode(sample.prompt), sample.prompt_len, sample.output_len)


async def _profile(
    client: aiohttp.ClientSession, base: str, headers: dict[str, str], wanted: bool, which: str
) -> None:
    if not wanted:
        return
    async with client.post(f"{base}/{which}_profile", headers=headers) as response:
        if response.status != 200:
            raise OctavoError(f"--profile: the server answers {response.status}; leave it out.")


def _save(
    args: argparse.Namespace, figures: Figures, options: Options, target: Target, tokenizer: str
) -> None:
    now = datetime.now()
    rate = "inf" if args.request_rate == float("inf") else args.request_rate
    extra: dict[str, str] = {}
    for pair in args.metadata:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--metadata {pair!r} must be KEY=VALUE.", "metadata")
        extra[name] = value
    result = {
        "date": now.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label,
        "model_id": target.model,
        "tokenizer_id": tokenizer,
        "num_prompts": args.num_prompts,
        "request_rate": rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **extra,
        **as_json(figures, options, detailed=args.save_detailed),
    }
    default = f"{args.backend}-{rate}qps-{Path(target.model).name}-{result['date']}.json"
    path = args.result_dir / (args.result_filename or default)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if args.append_result else "w", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")
    print(f"result saved in {path}", file=sys.stderr)
