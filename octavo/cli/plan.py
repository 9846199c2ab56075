"""`octavo plan`: will a model fit, how much does it hold, how fast could it be; loads no weights.

Not for: the arithmetic (`octavo/plan/`, over `octavo/worker/`).
"""

from __future__ import annotations

import argparse
import json

from octavo.cli.flags import add_config, add_model, add_options, engine_args
from octavo.options import EngineArgs

EPILOG = """
examples:
  octavo plan ./Llama-3.1-8B --gpu L4
  octavo plan deepseek-ai/DeepSeek-V2.5 --gpu H100-80 --tp 8 --max-model-len 32768
  octavo plan ./model --gpu H200 --tp 2 --length 16384 --json
  octavo plan                                   the small model on this machine

MODEL may be a folder with config.json alone. GPUs: H100-80, H200, A100-80, A100-40, L40S, L4,
B200, and this. The exit code is 1 if it does not fit.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The engine's options, and what they are to be planned for."""
    parser.epilog = EPILOG
    add_model(parser)
    add_config(parser)
    parser.add_argument("--gpu", default="this", help="the kind of device; this machine's own")
    parser.add_argument("--tp", type=int, help="short for --tensor-parallel-size", metavar="N")
    parser.add_argument("--pp", type=int, help="short for --pipeline-parallel-size", metavar="N")
    parser.add_argument("--length", type=int, metavar="N", help="count requests of so many tokens")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_options(parser, EngineArgs)


def run(args: argparse.Namespace) -> int:
    """Prints the plan; 0 if it fits, 1 if not."""
    from octavo.plan.advice import remedies
    from octavo.plan.forecast import Question, changed, make_plan
    from octavo.plan.show import as_json, as_table
    from octavo.plan.speed import speeds

    short = {"tensor_parallel_size": args.tp, "pipeline_parallel_size": args.pp}
    given = {name: value for name, value in short.items() if value is not None}
    record = changed(engine_args(args), **given)
    record.check()
    question = Question(record, args.gpu)
    plan = make_plan(question)
    context = min(1024, plan.max_model_len)
    prompts = tuple(min(one, plan.max_model_len) for one in (128, 1024, 8192))
    most = max(1, plan.requests(context))
    rows = speeds(plan, prompts, tuple(min(one, most) for one in (1, 32, 256)), context)
    found = [] if plan.fits else remedies(question, plan)
    if args.json:
        print(json.dumps(as_json(plan, rows, found, args.length), indent=2))
    else:
        print(as_table(plan, rows, found, args.length))
    return 0 if plan.fits else 1
