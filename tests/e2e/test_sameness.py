"""The same answer whatever the path: cache, batch, pool and chunk sizes change nothing.

In float32, where a difference is a fault and not rounding. The first setting is compared with
transformers, all others with the first.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams

pytestmark = pytest.mark.model
NUM_TOKENS = 24
WORDS = ["river", "market", "winter", "garden", "seven", "yellow", "captain", "letter", "window"]


@dataclass(frozen=True)
class Setting:
    """One way through the engine."""

    cache: bool
    together: int  # prompts at once
    blocks: int
    chunk: int
    seeded: bool


EVERY = [
    Setting(*values)
    for values in itertools.product((True, False), (1, 8), (512, 44), (16, 64, 1024), (False, True))
]
# Any two values of any two columns meet in one of these.
PAIRWISE = [
    Setting(*values)
    for values in (
        (True, 8, 512, 1024, False),
        (False, 1, 44, 64, True),
        (True, 1, 44, 16, False),
        (False, 8, 512, 16, True),
        (True, 8, 44, 64, True),
        (False, 1, 512, 64, False),
        (True, 1, 512, 1024, True),
        (False, 8, 44, 1024, False),
    )
]


def prompts(tokenizer, seed: int, *, all_of_them: bool = False) -> list[list[int]]:
    """Around block borders, shared and not, long, and of three scripts: 12, or twice as many."""
    rnd = random.Random(seed)
    shared = [rnd.randrange(1000, 40_000) for _ in range(33)]
    found = [shared[:length] for length in (1, 15, 16, 17, 32, 33)]
    found += [shared[:20] + [rnd.randrange(1000, 40_000)] * 5]
    found += [[rnd.randrange(1000, 40_000) for _ in range(300)]]
    story = " ".join(rnd.choice(WORDS) for _ in range(60))
    texts = (f"The {story}", "日本語" * 6, "🦉" * 10, "crème brûlée " * 3)
    found += [tokenizer.encode(text) for text in texts]
    if all_of_them:
        own = [rnd.randrange(1000, 40_000) for _ in range(480)]
        found += [own[:length] for length in (480, 100, 31, 47, 48, 49)]
        found += [[*shared, *own[:length]] for length in (1, 15, 100)]
        more = ("e\u0301 👩‍🚀🇫🇷 " * 4, "def f(x):\n\treturn x\n" * 3, "1, 2, 3, 4, 5,")
        found += [tokenizer.encode(text) for text in more]
    return found


def answers(
    model: Path, setting: Setting, seed: int, *, all_of_them: bool = False
) -> list[tuple[list[int], list[float]]]:
    llm = LLM(
        str(model),
        dtype="float32",
        max_model_len=512,
        num_gpu_blocks_override=setting.blocks,
        enable_prefix_caching=setting.cache,
        max_num_batched_tokens=setting.chunk,
        max_num_seqs=8,
    )
    params = SamplingParams(
        temperature=0.8 if setting.seeded else 0.0,
        seed=seed,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        logprobs=0,
    )
    every = prompts(llm.get_tokenizer(), seed, all_of_them=all_of_them)
    outputs = []
    for start in range(0, len(every), setting.together):
        outputs += llm.generate(every[start : start + setting.together], params, use_tqdm=False)
    llm.shutdown()
    return [
        (
            output.outputs[0].token_ids,
            [next(iter(p.values())).logprob for p in output.outputs[0].logprobs or []],
        )
        for output in outputs
    ]


def compare(model: Path, settings: list[Setting], *, all_of_them: bool = False) -> None:
    seed = random.randrange(2**31)
    for seeded in (False, True):
        chosen = [setting for setting in settings if setting.seeded == seeded]
        base = answers(model, chosen[0], seed, all_of_them=all_of_them)
        for setting in chosen[1:]:
            for index, (mine, expected) in enumerate(
                zip(answers(model, setting, seed, all_of_them=all_of_them), base, strict=True)
            ):
                where = f"prompt {index}, {setting} against {chosen[0]}, seed {seed}"
                assert mine[0] == expected[0], where
                assert mine[1] == pytest.approx(expected[1], abs=1e-4), where


def test_eight_settings_that_meet_pairwise(smollm2_folder: Path) -> None:
    compare(smollm2_folder, PAIRWISE)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_every_setting(smollm2_folder: Path) -> None:
    compare(smollm2_folder, EVERY, all_of_them=True)


def test_the_first_setting_equals_transformers(smollm2_folder: Path) -> None:
    import torch
    import transformers

    seed = random.randrange(2**31)
    found = answers(smollm2_folder, PAIRWISE[0], seed)
    tokenizer = LLM(str(smollm2_folder), max_model_len=64, num_gpu_blocks_override=8)
    every = prompts(tokenizer.get_tokenizer(), seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    for index in (1, 6, 8, 9, 10):
        ids = torch.tensor([every[index]])
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            eos_token_id=-1,
            pad_token_id=0,
        )
        assert found[index][0] == made[0, ids.shape[1] :].tolist(), f"prompt {index}, seed {seed}"
