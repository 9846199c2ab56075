"""The whole worker on a small real model: starting it, and batches against single sequences."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from octavo.config import WorkerConfig
from octavo.device.cpu import CpuDevice
from octavo.errors import CheckpointError, ConfigError
from octavo.executor.local import LocalExecutor
from octavo.types import PROMPT_LOGPROBS, SAMPLE, Admit, StepPlan, TokenParams, pack, unpack
from octavo.worker.worker import Worker
from tests.worker.test_runner import BLOCK_SIZE, BLOCKS, SLOTS, Driver, Live, random_sequence
from tests.worker.tiny import write_tiny

VARIANTS = [("native", "auto", "auto"), ("reference", "sdpa", "float32")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), seed=1)


def config_of(folder: Path, **changes: object) -> WorkerConfig:
    settings: dict[str, object] = {
        "model": str(folder),
        "block_size": BLOCK_SIZE,
        "max_num_seqs": SLOTS,
        "max_num_batched_tokens": 256,
        "num_blocks": BLOCKS,
        "threads": 1,
    }
    return WorkerConfig(**{**settings, **changes})  # type: ignore[arg-type]


def worker_of(folder: Path, variant: tuple[str, str, str], **changes: object) -> Worker:
    kernels, attention, dtype = variant
    worker = Worker(
        config_of(folder, kernels=kernels, attention_backend=attention, dtype=dtype, **changes)
    )
    try:
        worker.load()
    except ConfigError as error:
        if kernels == "native":
            pytest.skip(f"no native kernels here: {error}")
        raise
    return worker


def test_start_says_what_it_did(folder: Path) -> None:
    heard: list[str] = []
    executor = LocalExecutor(config_of(folder, kernels="reference"), report=heard.append)
    assert not executor.alive()
    info = executor.start()
    assert executor.alive()
    assert (info.num_blocks, info.block_size, info.vocab_size) == (BLOCKS, BLOCK_SIZE, 96)
    assert info.max_model_len == 128
    assert info.device == "cpu"
    assert info.kv_bytes == BLOCKS * BLOCK_SIZE * 2 * 2 * 2 * 16 * (4 if "32" in info.dtype else 2)
    notes = "\n".join(info.notes)
    for word in ("threads:", "dtype:", "kernels", "attention:", "layers:", "kv cache:"):
        assert word in notes, notes
    phases = [phase for phase, _ in info.timings]
    assert phases == [
        "import", "open", "kernels", "build", "load", "fuse", "cache", "warm-up"
    ]  # fmt: skip
    assert [word for word in heard if not word.startswith("load ")] == phases
    assert set(executor.control("memory")) == {"free", "total"}
    with pytest.raises(ConfigError, match="'fly'"):
        executor.control("fly")
    executor.close()
    executor.close()
    assert not executor.alive()


def test_importing_the_executor_does_not_bring_torch() -> None:
    code = "import sys, octavo.executor.local; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"block_size": 0}, "block_size"),
        ({"block_size": 257}, "block_size"),
        ({"dtype": "int3"}, "dtype"),
        ({"dtype": "float32", "kv_cache_dtype": "bfloat16"}, "kv_cache_dtype"),
        ({"quantization": "awq"}, "quantization"),
        ({"max_model_len": 129}, "max_model_len"),
        ({"num_blocks": 31}, "max_model_len"),
        ({"kernels": "magic"}, "kernels"),
        ({"attention_backend": "magic"}, "attention_backend"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    folder: Path, change: dict[str, object], option: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Worker(config_of(folder, **{"kernels": "reference", **change})).load()
    assert caught.value.option == option


class Cramped(CpuDevice):
    """A machine with little memory left."""

    def free_memory(self) -> int:
        return 100_000


def test_weights_that_do_not_fit_are_refused_before_loading(folder: Path) -> None:
    heard: list[str] = []
    with pytest.raises(ConfigError, match="weights need 337") as caught:
        Worker(config_of(folder, kernels="reference", dtype="float32"), Cramped(1)).load(
            heard.append
        )
    assert caught.value.option == "model"
    assert heard[-1] == "build"


def test_a_cache_that_cannot_fit_is_refused_before_loading(folder: Path) -> None:
    heard: list[str] = []
    with pytest.raises(ConfigError, match="One sequence of 128 tokens needs"):
        Worker(config_of(folder, num_blocks=31)).load(heard.append)
    assert heard[-1] == "kernels"


def test_fused_kernels_leave_torch_one_thread(folder: Path) -> None:
    before = torch.get_num_threads()
    try:
        worker_of(folder, VARIANTS[0], threads=2)
        assert torch.get_num_threads() == 1
        worker_of(folder, VARIANTS[1], threads=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_missing_model_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        LocalExecutor(config_of(tmp_path / "nowhere")).start()


def test_dummy_weights_need_only_a_config(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    info = Worker(config_of(tmp_path, load_format="dummy", max_model_len=-1, num_blocks=9)).load()
    assert info.max_model_len == 36
    assert info.weight_bytes > 0


def plan_of(tokens: list[int], params: TokenParams, *, epoch: int = 0, slot: int = 0) -> StepPlan:
    blocks = -(-len(tokens) // BLOCK_SIZE)
    flags = SAMPLE | (PROMPT_LOGPROBS if params.prompt_logprobs is not None else 0)
    return StepPlan(
        step=1,
        epoch=epoch,
        slots=pack([slot]),
        starts=pack([0]),
        lengths=pack([len(tokens)]),
        flags=bytes([flags]),
        tokens=pack(tokens),
        block_rows=pack([0] * blocks),
        block_at=pack(range(blocks)),
        block_ids=pack(range(blocks)),
        admits=(Admit(slot, len(tokens), params, pack(tokens)),),
    )


def test_after_a_failed_step_its_epoch_is_void(folder: Path) -> None:
    executor = LocalExecutor(config_of(folder, kernels="reference"))
    executor.start()
    params = TokenParams(max_tokens=1, temperature=0.0)
    good = executor.submit(plan_of([5, 6, 7], params))
    assert good.done()
    expected = list(unpack(good.result().tokens))
    failed = executor.submit(plan_of([5, 6, 7], params, slot=10_000))
    assert failed.done()
    with pytest.raises(IndexError):
        failed.result()
    with pytest.raises(IndexError):
        executor.submit(plan_of([5, 6, 7], params)).result()
    assert executor.alive()
    again = executor.submit(plan_of([5, 6, 7], params, epoch=1))
    assert list(unpack(again.result().tokens)) == expected


def run_together(worker: Worker, sequences: list[Live], seed: int) -> None:
    assert worker._runner is not None
    Driver(random.Random(seed), worker._runner, sequences).run()


def fresh(sequence: Live) -> Live:
    return Live(list(sequence.prompt), sequence.params, list(sequence.prompt))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seed", range(4))
def test_a_batch_gives_what_each_sequence_gives_alone(
    folder: Path, variant: tuple[str, str, str], seed: int
) -> None:
    """Greedy and random, with rules and log-probs, chunked, preempted, in any slot and block."""
    worker = worker_of(folder, variant)
    rng = random.Random(seed)
    together = [random_sequence(rng) for _ in range(10)]
    alone = [fresh(sequence) for sequence in together]
    run_together(worker, together, seed)
    for number, sequence in enumerate(alone):
        run_together(worker, [sequence], 1000 + number)
        other = together[number]
        assert sequence.tokens == other.tokens, f"seed {seed}"
        assert not sequence.bad
        assert not other.bad
        close = [
            *zip(sequence.logprobs, other.logprobs, strict=True),
            *(
                (sequence.prompt_logprobs[at], other.prompt_logprobs[at])
                for at in range(1, len(sequence.prompt) if other.prompt_logprobs else 0)
            ),
        ]
        for one, two in close:
            if variant[0] == "native":
                assert one == two  # to the bit
            else:
                # Plain torch may sum in another order at another batch size.
                assert (one.ids, one.rank) == (two.ids, two.rank)
                assert one.values == pytest.approx(two.values, abs=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seed", range(3))
def test_a_poisoned_sequence_harms_only_itself(
    tmp_path: Path, variant: tuple[str, str, str], seed: int
) -> None:
    """Its pages are used again by others, NaN and all."""
    poison = 95  # no prompt has it
    worker = worker_of(write_tiny(tmp_path, seed=2, poison=poison), variant)
    rng = random.Random(seed)
    healthy = [random_sequence(rng) for _ in range(9)]
    for sequence in healthy:
        sequence.params = TokenParams(
            max_tokens=sequence.params.max_tokens,
            temperature=sequence.params.temperature,
            seed=sequence.params.seed,
            bad_words=((poison,),),
        )
    poisoned = [random_sequence(rng) for _ in range(3)]
    for sequence in poisoned:
        sequence.prompt[rng.randrange(len(sequence.prompt))] = poison
        sequence.tokens = list(sequence.prompt)
    alone = [fresh(sequence) for sequence in healthy]
    mixed = [*healthy, *poisoned]
    rng.shuffle(mixed)
    run_together(worker, mixed, seed)
    assert all(sequence.bad for sequence in poisoned)
    clean = worker_of(write_tiny(tmp_path / "clean", seed=2), variant)
    for number, sequence in enumerate(alone):
        run_together(clean, [sequence], number)
        assert healthy[number].tokens == sequence.tokens, f"seed {seed}"
        assert not healthy[number].bad
