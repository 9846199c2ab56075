"""What `octavo quantize` writes: read again it is what was meant, and scaling changes nothing."""

from __future__ import annotations

import secrets
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor as Numbers

from octavo.checkpoint.checkpoint import Checkpoint, open_checkpoint
from octavo.cli.main import main
from octavo.errors import ConfigError
from octavo.models.load import set_cache_scales
from octavo.quant.compare import Comparison
from octavo.quant.produce import Method, awq_grouped, awq_tensors, common_group, config_of
from octavo.weights.export import _write_json
from octavo.worker.observe import observe
from octavo.worker.quantize import plan, scale_aware, tensors_of
from tests.models.driver import Row
from tests.models.twins import Twin, make_twin
from tests.quant.models import SIZES, driver, load
from tests.quant.packers import AWQ_COLUMNS, words_along_last
from tests.worker.tiny import write_tiny

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def plain_folder(folder: Path, case: str) -> tuple[Checkpoint, Twin]:
    twin = make_twin(case, sizes=SIZES)
    folder.mkdir()
    _write_json(folder / "config.json", twin.config)
    save_file({k: v.clone() for k, v in twin.state.items()}, str(folder / "model.safetensors"))
    return open_checkpoint(str(folder)), twin


def texts(twin: Twin) -> list[list[int]]:
    return [twin.prompt(40) for _ in range(3)]


def write(tmp_path: Path, checkpoint: Checkpoint, method: Method, *, group: int = 128) -> Path:
    twin_texts = [[1, 2, 3]]
    decoder, _ = observe(checkpoint, twin_texts, 10)
    changes = plan(checkpoint, decoder, method, group)
    out = tmp_path / method
    out.mkdir()
    tensors = dict(tensors_of(checkpoint, changes, method, torch.float32))
    save_file({k: v.contiguous() for k, v in tensors.items()}, str(out / "model.safetensors"))
    config = {**checkpoint.config, "quantization_config": config_of(method, changes.group, [])}
    _write_json(out / "config.json", config)
    return out


@pytest.fixture
def real_folder(tmp_path: Path) -> Path:
    """A small model with a tokenizer of single characters."""
    folder = write_tiny(tmp_path / "real", secrets.randbits(31))
    vocabulary = {chr(32 + i): i for i in range(95)} | {"<unk>": 95}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("method", ["awq", "fp8", "int8"])
@pytest.mark.parametrize("case", ["llama", "llama-biases"])
def test_what_is_written_is_near_the_model(method: Method, case: str, tmp_path: Path) -> None:
    checkpoint, twin = plain_folder(tmp_path / "plain", case)
    out = write(tmp_path, checkpoint, method, group=32)
    prompt = twin.prompt(30)
    exact = twin.logits(prompt)
    found = driver(out).run(Row(list(prompt)))
    error = float((found - exact).norm() / exact.norm())
    assert 1e-4 < error < {"awq": 0.7, "fp8": 0.3, "int8": 0.15}[method]


@pytest.mark.parametrize("case", ["llama", "llama-biases", "qwen2", "qwen3", "mistral"])
def test_scaling_alone_changes_nothing(case: str, tmp_path: Path) -> None:
    checkpoint, twin = plain_folder(tmp_path / "plain", case)
    decoder, recorder = observe(checkpoint, texts(twin), 64)
    changes = plan(checkpoint, decoder, "awq", 32)
    lines: list[str] = []
    scale_aware(decoder, recorder, changes, checkpoint, lines.append)
    assert len(lines) == SIZES["num_hidden_layers"]
    assert any(not torch.allclose(value, twin.state[name]) for name, value in changes.plain.items())
    file = checkpoint.path / "model.safetensors"
    save_file({**load_file(str(file)), **changes.plain}, str(file))
    prompt = twin.prompt(30)
    found = driver(checkpoint.path).run(Row(list(prompt)))
    torch.testing.assert_close(found, twin.logits(prompt), rtol=2e-4, atol=2e-4)


def test_scaling_lowers_the_error_where_channels_differ(tmp_path: Path) -> None:
    checkpoint, twin = plain_folder(tmp_path / "plain", "llama")
    with torch.no_grad():  # a few channels are large
        for name, tensor in twin.state.items():
            if name.endswith("layernorm.weight"):
                tensor[::16] *= 30
    file = checkpoint.path / "model.safetensors"
    save_file({k: v.clone() for k, v in twin.state.items()}, str(file))
    checkpoint = open_checkpoint(str(checkpoint.path))
    decoder, recorder = observe(checkpoint, texts(twin), 64)
    layer = decoder.blocks[0].attention.qkv
    weight, x = layer.packed.data, recorder.inputs(layer)
    exact = x @ weight.t()
    changes = plan(checkpoint, decoder, "awq", 32)
    scale_aware(decoder, recorder, changes, checkpoint, lambda _: None)
    aware = torch.cat(
        [changes.plain[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    )
    s = (aware / weight).nanmean(0)

    def error(w: Numbers, inputs: Numbers) -> float:
        return float((inputs @ awq_grouped(w, 32).plain(torch.float32).t() - exact).norm())

    assert error(aware, x / s) < 0.8 * error(weight, x)


def test_awq_words_are_as_the_format_says() -> None:
    weight = torch.randn(32, 128)
    meant, found = awq_grouped(weight, 64), awq_tensors(weight, 64)
    codes = meant.codes.numpy().astype(np.int64)
    zeros = meant.zero.numpy().astype(np.int64)
    assert torch.equal(
        found["qweight"], words_along_last(np.ascontiguousarray(codes.T), AWQ_COLUMNS)
    )
    assert torch.equal(
        found["qzeros"], words_along_last(np.ascontiguousarray(zeros.T), AWQ_COLUMNS)
    )
    assert found["scales"].dtype == torch.float16
    step = meant.scale.repeat_interleave(64, 1)
    assert bool(((meant.plain(torch.float32) - weight).abs() <= step * 1.01).all())


def test_groups_that_fit() -> None:
    assert common_group([(64, 576), (576, 1536)]) == 64
    assert common_group([(64, 576), (576, 1536)], 32) == 32
    assert common_group([(64, 512), (512, 1536)]) == 128
    assert common_group([(64, 500)]) == 0
    assert common_group([(65, 512)]) == 0


def test_differences_add_up() -> None:
    comparison = Comparison()
    logits = torch.randn(5, 11)
    comparison.add([1, 2, 3, 4, 5], logits, logits + 3)  # a constant changes no probability
    same = comparison.result()
    assert same.log_prob_error < 1e-6
    assert same.flips == 0
    assert abs(same.growth) < 1e-6
    assert same.advice.startswith("recommended")
    other = torch.randn(5, 11)
    comparison.add([1, 2, 3, 4, 5], logits, other)
    found = comparison.result()
    assert found.tokens == 10
    first, second = logits.log_softmax(-1), other.log_softmax(-1)
    expected = torch.nn.functional.kl_div(second, first, log_target=True, reduction="sum") / 10
    assert abs(found.divergence - float(expected)) < 1e-5
    nats = -second[:-1].gather(1, torch.tensor([[2], [3], [4], [5]])).sum()
    nats -= first[:-1].gather(1, torch.tensor([[2], [3], [4], [5]])).sum()
    assert abs(found.perplexity - float((nats / 8).exp())) < 1e-3 * found.perplexity


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["quantize", "{m}", "--method", "awq", "--out", "{m}"], "not empty"),
        (["quantize", "{m}", "--method", "fp8", "--out", "{o}", "--window", "1"], "2 or more"),
        (["quant-check", "{m}"], "compares two formats"),
        (["quant-check", "{m}", "--quantization", "int8", "--text", "/nowhere"], "cannot be read"),
        (["kv-check", "{m}", "--kv-cache-dtype", "float32"], "leave it out"),
    ],
)
def test_what_the_commands_refuse(
    words: list[str], said: str, real_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    filled = [word.format(m=real_folder, o=tmp_path / "o") for word in words]
    assert main([*filled, "--kernels", "reference"]) == 1
    assert said in capsys.readouterr().err


def test_a_quantized_model_is_not_quantized_again(
    real_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "fp8"
    assert main(["quantize", str(real_folder), "--method", "fp8", "--out", str(out)]) == 0
    capsys.readouterr()
    arguments = ["quantize", str(out), "--method", "int8", "--out", str(tmp_path / "again")]
    assert main(arguments) == 1
    assert "quantized already" in capsys.readouterr().err
    checks = ["quant-check", str(out), "--against", str(real_folder), "--kernels", "reference"]
    assert main([*checks, "--dtype", "float32", "--max-tokens", "100"]) == 0
    text = capsys.readouterr().out
    assert "plain perplexity" in text
    assert main(["kv-check", str(out), "--kernels", "reference", "--max-tokens", "60"]) == 0
    text = capsys.readouterr().out
    assert "cache fp8_e4m3" in text
    assert "largest key" in text


def test_scales_of_the_cache_are_written(
    real_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """By them the largest key and value of the texts are the largest that the cache holds."""
    out = tmp_path / "scaled"
    words = ["quantize", str(real_folder), "--method", "int8", "--out", str(out), "--kv-scales"]
    assert main(words) == 0
    tensors = load_file(str(out / "model.safetensors"))
    scales = {n: float(v) for n, v in tensors.items() if n.endswith((".k_scale", ".v_scale"))}
    keys = [scales[f"model.layers.{i}.self_attn.k_scale"] for i in range(2)]
    capsys.readouterr()
    check = ["kv-check", str(out), "--kernels", "reference", "--dtype", "float32"]
    assert main([*check, "--kv-cache-dtype", "fp8_e4m3"]) == 0
    text = capsys.readouterr().out
    largest = float(text.partition("largest key ")[2].partition(",")[0])
    assert abs(max(keys) * 448 - largest) < 0.06 * largest + 0.06
    decoder, _ = load(out)
    set_cache_scales(decoder, open_checkpoint(str(out)))
    assert [block.attention.need.key_scale for block in decoder.blocks] == pytest.approx(keys)


def test_what_awq_refuses(tmp_path: Path) -> None:
    checkpoint, twin = plain_folder(tmp_path / "plain", "gemma2")
    decoder, recorder = observe(checkpoint, texts(twin), 8)
    changes = plan(checkpoint, decoder, "awq", 32)
    with pytest.raises(ConfigError, match="use int8 or fp8"):
        scale_aware(decoder, recorder, changes, checkpoint, print)
