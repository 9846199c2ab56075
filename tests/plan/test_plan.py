"""Plans against published sizes, against what an engine then takes, and their bad input."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.main import main
from octavo.errors import CheckpointError, ConfigError
from octavo.options import EngineArgs
from octavo.plan.advice import kernel_rules, remedies, require_fit
from octavo.plan.forecast import Plan, Question, make_plan
from octavo.plan.gpus import GPUS
from octavo.plan.show import WIDTH, bar
from octavo.plan.speed import first_token, next_token
from octavo.resolve import worker_config
from octavo.worker.worker import Worker
from tests.models.test_full_size import MODELS

BRIEF = {
    "model": "deepseek-ai/DeepSeek-V2.5",
    "tensor_parallel_size": 8,
    "gpu_memory_utilization": 0.92,
    "max_model_len": 32768,
    "kv_cache_dtype": "fp8_e4m3",
    "block_size": 16,
    "max_num_batched_tokens": 8192,
}


def folder(path: Path, config: dict[str, Any]) -> str:
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def plan(gpu: str, **values: Any) -> Plan:
    return make_plan(Question(EngineArgs(**values), gpu))


def tiny(seed: int) -> dict[str, Any]:
    """A random small Llama."""
    draw = random.Random(seed)
    heads = draw.choice((2, 4, 8))
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": heads * draw.choice((16, 32)),
        "intermediate_size": 32 * draw.randint(2, 8),
        "num_hidden_layers": draw.randint(1, 5),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice((1, heads // 2, heads)),
        "vocab_size": draw.randint(200, 900),
        "max_position_embeddings": 16 * draw.randint(8, 40),
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": draw.random() < 0.5,
        "torch_dtype": "float32",
    }


def test_the_brief_on_eight_h100() -> None:
    found = plan("H100-80", **BRIEF)
    assert found.fits
    # 60 layers of 512 + 64 numbers of 8 bits, on each rank whole.
    assert found.ranks[0].kv_token == 60 * 576
    assert plan("H100-80", **{**BRIEF, "kv_cache_dtype": "auto"}).ranks[0].kv_token == 2 * 60 * 576
    assert round(found.counts.total / 1e9, 1) == 235.7
    assert round(found.counts.active / 1e9) == 21
    # A rank has an eighth of all that is cut, and its latent projections whole.
    assert 2 * found.counts.total / 8 < found.ranks[0].weights < 2.1 * found.counts.total / 8
    rules = dict(kernel_rules(found))
    assert "16-bit" in rules["FlashAttention-3 for latents"]
    assert "64 tokens, not 16" in rules["FlashMLA"]
    assert rules["mla_triton"] == "yes"


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_the_published_ones(name: str, tmp_path: Path) -> None:
    config, billions = MODELS[name]
    found = plan("H200", model=folder(tmp_path, config), tensor_parallel_size=1, max_model_len=512)
    assert round(found.counts.total / 1e9, 2) == billions
    assert "config.json alone" in found.source


def test_grouped_heads_are_divided_and_pipelines_share_layers(tmp_path: Path) -> None:
    shape = {"model": "meta-llama/Llama-3.1-70B-Instruct"}
    alone = plan("B200", **shape)
    by_eight = plan("H100", **shape, tensor_parallel_size=8)
    assert alone.ranks[0].kv_token == 8 * by_eight.ranks[0].kv_token == 80 * 2 * 8 * 128 * 2
    by_stage = plan("H100", **shape, tensor_parallel_size=2, pipeline_parallel_size=4)
    assert [rank.layers for rank in by_stage.ranks] == [20] * 4
    assert sum(rank.kv_token for rank in by_stage.ranks) == alone.ranks[0].kv_token // 2
    assert first_token(by_eight, 8192) < first_token(alone, 8192)
    assert next_token(by_eight, 1, 1024) < next_token(alone, 1, 1024)


def test_what_does_not_fit_names_changes_that_do() -> None:
    question = Question(EngineArgs(model="meta-llama/Llama-3.1-70B-Instruct"), "H100-80")
    found = make_plan(question)
    assert not found.fits
    assert "weights" in found.reason
    texts = remedies(question, found)
    assert texts
    for text in texts[:2]:
        pairs = re.findall(r"--([a-z-]+) (\S+)", text)
        values: dict[str, Any] = {
            name.replace("-", "_"): int(value) if value.isdigit() else value
            for name, value in pairs
        }
        assert plan("H100-80", model="meta-llama/Llama-3.1-70B-Instruct", **values).fits, text
    with pytest.raises(ConfigError, match=r"does not fit: .* changes that fit"):
        require_fit(question, found)


def test_the_longest_that_fits_fits_and_one_block_more_does_not() -> None:
    values = {"model": "meta-llama/Llama-3.1-8B-Instruct", "max_num_seqs": 256}
    found = plan("L4", **values)
    assert not found.fits
    assert 0 < found.longest < 131072
    assert plan("L4", **values, max_model_len=found.longest).fits
    assert not plan("L4", **values, max_model_len=found.longest + found.block_size).fits


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_plans_and_its_bar_is_to_scale(name: str) -> None:
    found = plan(name, model="meta-llama/Llama-3.1-8B-Instruct", max_model_len=2048)
    assert found.fits
    drawn = bar(found.ranks[0], found.machine.room.total)
    assert len(drawn) == WIDTH
    share = found.ranks[0].weights / found.machine.room.total
    assert abs(drawn.count("█") - WIDTH * share) <= 1


def test_quantized_weights_take_their_part() -> None:
    shape = {"model": "meta-llama/Llama-3.1-70B-Instruct", "tensor_parallel_size": 4}
    plain, eight, four = (
        plan("H100", **shape, quantization=name).ranks[0].weights for name in (None, "fp8", "int4")
    )
    assert 0.5 < eight / plain < 0.55
    assert 0.3 < four / plain < 0.45


@pytest.mark.parametrize("_", range(4))
def test_an_engine_takes_what_was_planned(_: int, tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    model = folder(tmp_path, tiny(seed))
    args = EngineArgs(
        model=model,
        load_format="dummy",
        max_num_seqs=random.Random(seed).randint(1, 40),
        max_model_len=random.Random(seed).choice((None, 64, "auto")),
        kernels="reference",
        attention_backend="sdpa",
    )
    planned = make_plan(Question(args))
    worker = Worker(worker_config(args))
    info = worker.load()
    assert abs(planned.blocks - info.num_blocks) <= 0.02 * info.num_blocks
    assert planned.ranks[0].weights == info.weight_bytes
    assert planned.max_model_len == info.max_model_len
    note = next(line for line in info.notes if line.startswith("plan: "))
    assert f"(came {info.num_blocks}, +0.0 %)" in note


def test_smollm2_takes_what_was_planned(smollm2_folder: Path) -> None:
    args = EngineArgs(model=str(smollm2_folder), max_num_seqs=8)
    planned = make_plan(Question(args))
    info = Worker(worker_config(args)).load()
    assert abs(planned.blocks - info.num_blocks) <= 0.02 * info.num_blocks
    assert planned.tokens == planned.blocks * 16
    assert abs(planned.ranks[0].weights - info.weight_bytes) <= 0.02 * info.weight_bytes


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "deepseek-ai/DeepSeek-V2.5", "--gpu", "H100", "--tp", "8"]
    assert main([*words, "--max-model-len", "32768", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] is True
    assert told["ranks"][0]["kv_bytes_per_token"] == 2 * 60 * 576
    assert main([*words[:-1], "4"]) == 1
    text = capsys.readouterr().out
    assert "It does not fit: The weights of stage 0" in text
    assert "would fit with --" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--gpu", "H1000"], "did you mean H100-80"),
        (["--gpu", "H200", "--tp", "3"], "sizes that divide this model are 1, 2, 4"),
        (["--gpu", "H200", "--pp", "999"], "use at most 80"),
        (["--gpu", "H200", "--max-model-len", "999999"], "own limit is 131072"),
    ],
)
def test_bad_input(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "meta-llama/Llama-3.1-70B-Instruct", *words]) == 1
    assert says in capsys.readouterr().err


def test_a_model_that_is_nowhere() -> None:
    with pytest.raises(CheckpointError):
        plan("H200", model="./no-such-folder")
