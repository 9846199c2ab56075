"""What structured rows cost the others in their batch, and what a mask costs.

    python benchmarks/grammar.py MODEL [--rows 16] [--steps 48] [--rounds 5]

Decode steps of a batch in which none, a quarter and all of the rows have a schema, turn and turn
about, so that a busy machine is busy for all of them. Then for each kind of grammar: compiling it,
and taking in a token and computing the next mask, one row at a time.
"""

from __future__ import annotations

import argparse
import random
import statistics
from time import perf_counter
from typing import Any

import numpy as np

from octavo.config import Vocabulary
from octavo.grammar.compiler import GrammarCompiler
from octavo.grammar.matcher import Grammars
from octavo.grammar.request import StructuredOutputs
from octavo.grammar.vocabulary import vocabulary_of
from octavo.llm_engine import LLMEngine
from octavo.options import EngineArgs
from octavo.prompts import TokensPrompt
from octavo.sampling_params import SamplingParams
from octavo.types import Grammar

# An answer that goes on for as long as is measured.
LONG = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "minLength": 8}, "size": {"type": "integer"}},
        "required": ["name", "size"],
    },
    "minItems": 200,
}
KINDS: dict[str, dict[str, Any]] = {
    "schema": {"json": LONG},
    "any JSON object": {"json_object": True},
    "expression": {"regex": r"(\w{3,8} ){200}"},
    "choice of 500": {"choice": [f"choice number {i}" for i in range(500)]},
    "grammar": {"grammar": 'start: ("(" start ")" | "x" | "y")+'},
}


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    engine = LLMEngine(EngineArgs(model=args.model, max_model_len=1024, max_num_seqs=args.rows))
    shares = (0, args.rows // 4, args.rows)
    found: dict[int, list[float]] = {share: [] for share in shares}
    decode(engine, args.rows, args.rows // 4, 4)  # what is made on first use
    for _ in range(args.rounds):
        for share in shares:
            found[share] += decode(engine, args.rows, share, args.steps)
    plain = statistics.median(found[0])
    print(f"decode steps of {args.rows} rows, medians of {len(found[0])}")
    for share, times in found.items():
        middle = statistics.median(times)
        print(f"{share:4} with a schema  {middle * 1e3:7.2f} ms  {middle / plain - 1:+6.1%}")
    masks(vocabulary_of(engine.frontend.tokenizer), engine.info.vocab_size)
    engine.shutdown()


def decode(engine: LLMEngine, rows: int, structured: int, steps: int) -> list[float]:
    """Seconds of each decode step; the prompts' steps are left out."""
    draw = random.Random(rows)
    ids = []
    for row in range(rows):
        form = StructuredOutputs(json=LONG) if row < structured else None
        params = SamplingParams(
            temperature=0.8,
            seed=row,
            max_tokens=steps + 2,
            ignore_eos=form is None,
            structured_outputs=form,
        )
        prompt = TokensPrompt(prompt_token_ids=[draw.randrange(300, 40_000) for _ in range(32)])
        ids.append(engine.add_request(f"{row}", prompt, params))
    times = []
    while engine.has_unfinished_requests():
        begun = perf_counter()
        engine.step()
        times.append(perf_counter() - begun)
    return times[-steps:]


def masks(vocabulary: Vocabulary, vocab_size: int) -> None:
    """Prints the cost of each kind of grammar."""
    grammars = Grammars(vocabulary, vocab_size, 1)
    compiler = GrammarCompiler(vocabulary)
    compiler.compile(StructuredOutputs(choice=["starts its process"]))
    print(f"vocabulary of {vocab_size}: checked and compiled, ms; a token, us: median, mean, worst")
    for name, demand in KINDS.items():
        begun = perf_counter()
        form = compiler.compile(StructuredOutputs(**demand))
        compiled = (perf_counter() - begun) * 1e3
        times = np.array(walk(grammars, Grammar(form.text, vocabulary.eos_ids, form.json))) * 1e6
        print(
            f"{name:16} {compiled:6.1f}  {np.median(times):6.0f} {times.mean():6.0f} "
            f"{times.max():6.0f}"
        )
    grammars.close()


def walk(grammars: Grammars, grammar: Grammar, most: int = 200) -> list[float]:
    """Seconds for each token of a random answer."""
    draw = random.Random(0)
    follower = grammars.follow(grammar, [])
    grammars.masks([follower])  # waits for the grammar
    times = []
    for _ in range(most):
        begun = perf_counter()
        words, _ = grammars.masks([follower])
        times.append(perf_counter() - begun)
        allowed = np.flatnonzero(np.unpackbits(words[0].view(np.uint8), bitorder="little"))
        more = [token for token in allowed.tolist() if token not in grammar.end_ids]
        if not more:
            break
        follower.append(draw.choice(more))
    return times


if __name__ == "__main__":
    main()
