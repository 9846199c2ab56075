"""`octavo quant-check` and `octavo kv-check`: what a number format costs in accuracy, measured.

    octavo quant-check MODEL --quantization int8     weights in another format, or a checkpoint's
    octavo kv-check MODEL                            caches in 8-bit floats

The model is run over the same texts in both formats, one after the other, and its logits are
compared token by token. Not for: speed (`octavo bench`), or making checkpoints (`quantize.py`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

import torch

from octavo.cli.flags import add_config, add_model, add_options, engine_args
from octavo.cli.texts import add_texts, token_lists
from octavo.config import WorkerConfig
from octavo.errors import ConfigError
from octavo.kernels.formats import FP8_MAX
from octavo.models.registry import read_spec
from octavo.options import EngineArgs
from octavo.pulling import locate, open_named
from octavo.quant.compare import Comparison, Difference
from octavo.resolve import worker_config
from octavo.worker.score import Scorer

CACHES = ("fp8_e4m3", "fp8_e5m2")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, texts, and every option of the engine."""
    parser.set_defaults(command=parser.prog.rpartition(" ")[2])
    add_model(parser)
    add_texts(parser)
    parser.add_argument(
        "--against",
        metavar="MODEL",
        help="quant-check: the plain model that a quantized checkpoint is compared with",
    )
    add_config(parser)
    add_options(parser, EngineArgs)
    parser.epilog = (
        "examples:\n  octavo quant-check ./model --quantization int8\n"
        "  octavo quant-check ./model-awq --against ./model --text book.txt\n"
        "  octavo kv-check ./model --prompts mine.txt"
    )


def run(args: argparse.Namespace) -> int:
    """Prints a table and a recommendation for each format."""
    options = engine_args(args)
    checkpoint = locate(options)
    config = worker_config(options, str(checkpoint.path))
    longest = read_spec(checkpoint.config).max_model_len
    lists = token_lists(args, checkpoint.load_tokenizer(), longest)
    against = str(open_named(args.against, options).path) if args.against else ""
    variants = list(_variants(config, args.command, against))
    base = Scorer(variants[0][1], args.window)
    plain, ranges = [], []
    for ids in lists:
        plain.append(base.logits(ids))
        if args.command == "kv-check":
            ranges.append(base.largest())
    print(f"{sum(map(len, lists))} tokens in {len(lists)} texts; compared with {variants[0][0]}")
    if ranges:
        _print_ranges([(max(k), max(v)) for k, v in map(_sides, zip(*ranges, strict=True))])
    del base
    print(HEADING)
    for name, variant in variants[1:]:
        print(row(name, _compare(variant, args.window, lists, plain)), flush=True)
    return 0


def _variants(
    config: WorkerConfig, command: str, against: str
) -> Iterator[tuple[str, WorkerConfig]]:
    """(name, settings), what is compared with first."""
    if command == "kv-check":
        if config.kv_cache_dtype not in ("auto", *CACHES):
            raise ConfigError(
                f"kv_cache_dtype is {config.kv_cache_dtype}; kv-check compares "
                f"{' and '.join(CACHES)} with the model's own, so leave it out",
                "kv_cache_dtype",
            )
        yield "the cache in the model's format", replace(config, kv_cache_dtype="auto")
        wanted = CACHES if config.kv_cache_dtype == "auto" else (config.kv_cache_dtype,)
        for cache in wanted:
            yield f"cache {cache}", replace(config, kv_cache_dtype=cache)
        return
    if against:
        yield against, replace(config, model=against, quantization=None)
        yield config.model, config
        return
    if config.quantization is None:
        raise ConfigError(
            "quant-check compares two formats; use --quantization fp8, int8 or int4, or --against "
            "MODEL to compare a quantized checkpoint with the plain model",
            "quantization",
        )
    yield "the plain weights", replace(config, quantization=None)
    yield f"weights {config.quantization}", config


HEADING = (
    f"{'format':<24}{'log-prob error':>16}{'worst':>9}{'KL':>10}{'flips':>9}"
    f"{'perplexity':>12}{'growth':>9}"
)


def row(name: str, found: Difference) -> str:
    """One line of the table, and the advice below it."""
    flips = f"{100 * found.flips / found.tokens:.1f} %"
    line = (
        f"{name[-23:]:<24}{found.log_prob_error:>16.4f}{found.worst:>9.2f}{found.divergence:>10.5f}"
        f"{flips:>9}{found.perplexity:>12.3f}{100 * found.growth:>7.2f} %"
    )
    return f"{line}\n    plain perplexity {found.base_perplexity:.3f}; {found.advice}"


def _compare(
    config: WorkerConfig, window: int, lists: list[list[int]], plain: list[torch.Tensor]
) -> Difference:
    scorer = Scorer(config, window)
    comparison = Comparison()
    for ids, logits in zip(lists, plain, strict=True):
        comparison.add(ids, logits, scorer.logits(ids))
    return comparison.result()


def _sides(pairs: tuple[tuple[float, float], ...]) -> tuple[list[float], list[float]]:
    """One layer's largest keys and its largest values, of all texts."""
    return [key for key, _ in pairs], [value for _, value in pairs]


def _print_ranges(largest: list[tuple[float, float]]) -> None:
    """Whether keys and values fit into e4m3 without scales, and the scales that they would need."""
    key, value = max(k for k, _ in largest), max(v for _, v in largest)
    need = "no scales needed" if max(key, value) <= FP8_MAX else "give the layers scales"
    print(f"largest key {key:.1f}, value {value:.1f}, of {FP8_MAX:.0f} that e4m3 holds: {need}")
    if max(key, value) > FP8_MAX:
        for layer, (k, v) in enumerate(largest):
            if max(k, v) > FP8_MAX:
                print(f"    layer {layer}: k_scale {k / FP8_MAX:.4f}, v_scale {v / FP8_MAX:.4f}")
