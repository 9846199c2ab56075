"""`octavo quantize MODEL --method awq|fp8|int8 --out DIR`: writes a model with smaller weights.

The folder is in Hugging Face's format: config.json says how the weights are to be read. awq looks
for scales by activations of real texts, which takes the plain model in float32; the others round
one tensor after another. Not for: measuring what it cost (`octavo quant-check`).
"""

from __future__ import annotations

import argparse
from itertools import chain
from pathlib import Path

import torch

from octavo.cli.flags import add_config, add_model, add_options, engine_args
from octavo.cli.texts import add_texts, token_lists
from octavo.errors import ConfigError
from octavo.models.quantization import read_scheme
from octavo.models.registry import read_spec
from octavo.options import EngineArgs
from octavo.pulling import locate
from octavo.quant.produce import GROUPS, config_of
from octavo.weights.export import write_tensors
from octavo.worker.observe import observe
from octavo.worker.quantize import cache_scales, plan, scale_aware, tensors_of

MOST_ROWS = 512  # of a layer's inputs that are kept
KEPT = ["lm_head"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Method, folder and texts."""
    add_model(parser)
    parser.add_argument(
        "--method", choices=("awq", "fp8", "int8"), required=True, help="what the weights become"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write; new or empty")
    parser.add_argument(
        "--group-size",
        type=int,
        choices=GROUPS,
        default=128,
        help="awq: columns that share a scale; the largest of 128, 64 and 32 up to this that fits",
    )
    parser.add_argument(
        "--kv-scales",
        action="store_true",
        help="also write scales of keys and values for an FP8 cache, from the texts",
    )
    add_texts(parser)
    add_config(parser)
    add_options(parser, EngineArgs)
    parser.epilog = "example:\n  octavo quantize ./model --method awq --out ./model-awq"


def run(args: argparse.Namespace) -> int:
    """Writes the folder; says how large it is."""
    options = engine_args(args)
    out = Path(args.out)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out {out}: the folder is not empty; use a new one", "out")
    checkpoint = locate(options)
    scheme = read_scheme(checkpoint.config)
    if scheme is not None:
        raise ConfigError(
            f"{checkpoint.path}: the weights are quantized already ({scheme}); use the plain model",
            "model",
        )
    longest = read_spec(checkpoint.config).max_model_len
    texts = token_lists(args, checkpoint.load_tokenizer(), longest)
    aware = args.method == "awq"
    seen = texts if aware or args.kv_scales else [texts[0][:2]]
    decoder, recorder = observe(checkpoint, seen, MOST_ROWS if aware else 0)
    changes = plan(checkpoint, decoder, args.method, args.group_size)
    if aware:
        scale_aware(decoder, recorder, changes, checkpoint, lambda line: print(line, flush=True))
    scales = cache_scales(decoder, recorder) if args.kv_scales else {}
    del decoder, recorder
    dtype = torch.float16 if aware else torch.bfloat16
    config = config_of(args.method, changes.group, KEPT)
    tensors = chain(tensors_of(checkpoint, changes, args.method, dtype), scales.items())
    size = write_tensors(checkpoint, out, tensors, dtype, config)
    print(f"{out}: {size / 1e6:.1f} MB of weights")
    return 0
