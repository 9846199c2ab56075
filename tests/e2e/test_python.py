"""The Python interface with the real model: LLM and AsyncLLMEngine under the names people know."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path

import pytest

from octavo import LLM, AsyncEngineArgs, AsyncLLMEngine, SamplingParams
from octavo.errors import ConfigError, InvalidRequest
from octavo.foreign import LLM_ABSENT, LLM_ENGINE_ABSENT
from octavo.sampling_params import RequestOutputKind

pytestmark = pytest.mark.model
SIZES = {"max_model_len": 512, "num_gpu_blocks_override": 128, "max_num_seqs": 8}
PROMPTS = ["The capital of France is", "1, 2, 3, 4, 5, 6, 7, 8,", "Once upon a time"]


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> LLM:
    return LLM(str(smollm2_gguf), **SIZES)


def test_generate_keeps_the_order(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    assert [output.prompt for output in outputs] == PROMPTS
    assert outputs[0].outputs[0].text.startswith(" Paris")
    assert outputs[1].outputs[0].text.startswith(" 9, 10")
    assert all(output.finished for output in outputs)


def test_batched_answers_equal_lone_ones(llm: LLM) -> None:
    seed = random.randrange(2**31)
    params = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=20, seed=seed)
    together = llm.generate(PROMPTS * 2, params, use_tqdm=False)
    alone = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in PROMPTS]
    for index, output in enumerate(together):
        assert output.outputs[0].token_ids == alone[index % 3].outputs[0].token_ids, f"seed {seed}"


def test_chat_and_choices(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(temperature=1.5, n=3, max_tokens=16, logprobs=2, prompt_logprobs=1)
    (output,) = llm.chat(messages, params, use_tqdm=False)
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert len({choice.text for choice in output.outputs}) > 1
    for choice in output.outputs:
        assert choice.logprobs is not None
        assert len(choice.logprobs) == len(choice.token_ids)
        first = [next(iter(position)) for position in choice.logprobs]
        assert first == choice.token_ids
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids or ())
    assert output.prompt_logprobs[0] is None


def test_prompts_that_cannot_be_served(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="maximum context length is 512"):
        llm.generate([[5] * 600], use_tqdm=False)
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        llm.generate([[49152]], use_tqdm=False)
    with pytest.raises(InvalidRequest, match="neither"):
        llm.generate({}, use_tqdm=False)
    # What was refused has left nothing behind.
    assert llm.generate(PROMPTS[0], SamplingParams(max_tokens=1), use_tqdm=False)[0].finished


def test_unknown_options_are_named(smollm2_gguf: Path) -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        LLM(str(smollm2_gguf), max_num_seq=4)
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        LLM(str(smollm2_gguf), tensor_parallel_size=8)


async def test_async_engine_streams_and_aborts(smollm2_gguf: Path) -> None:
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=str(smollm2_gguf), **SIZES))
    try:
        final = await _collect(engine, RequestOutputKind.FINAL_ONLY)
        deltas = await _collect(engine, RequestOutputKind.DELTA)
        growing = await _collect(engine, RequestOutputKind.CUMULATIVE)
        assert len(final) == 1
        text = final[0].outputs[0].text
        assert "".join(output.outputs[0].text for output in deltas) == text
        assert growing[-1].outputs[0].text == text
        assert [output.finished for output in growing][-2:] == [False, True]
        await _abort_ends_a_request(engine)
        await engine.check_health()
        assert engine.get_num_unfinished_requests() == 0
    finally:
        await engine.close()
    assert engine.is_stopped


def test_a_changed_record_is_checked_again(llm: LLM) -> None:
    params = SamplingParams()
    params.repetition_penalty = "high"  # type: ignore[assignment]
    with pytest.raises(InvalidRequest, match="repetition_penalty"):
        llm.generate(PROMPTS[0], params, use_tqdm=False)


async def _collect(engine: AsyncLLMEngine, kind: RequestOutputKind) -> list:
    params = SamplingParams(temperature=0, max_tokens=10, output_kind=kind)
    return [output async for output in engine.generate(PROMPTS[1], params, f"request-{kind}")]


async def _abort_ends_a_request(engine: AsyncLLMEngine) -> None:
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    reasons = []

    async def consume() -> None:
        async for output in engine.generate("Once", params, "to-abort"):
            reasons.append(output.outputs[0].finish_reason)

    task = asyncio.create_task(consume())
    while not reasons:
        await asyncio.sleep(0.01)
    await engine.abort("to-abort")
    await asyncio.wait_for(task, 5)
    assert reasons[-1] == "abort"
    assert len(reasons) < 400


def test_a_seed_of_the_engine_repeats(smollm2_gguf: Path) -> None:
    seed = random.randrange(2**31)
    texts = []
    for _ in range(2):
        llm = LLM(str(smollm2_gguf), seed=seed, **SIZES)
        params = SamplingParams(temperature=1.5, max_tokens=16)
        texts.append([o.outputs[0].text for o in llm.generate(PROMPTS, params, use_tqdm=False)])
        llm.shutdown()
    assert texts[0] == texts[1], f"seed {seed}"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"override_generation_config": {"nonsense": 1}}, "nonsense"),
        ({"override_generation_config": {"temperature": "hot"}}, "temperature"),
        ({"revision": "main", "model": "smollm2-135m"}, "revision"),
        ({"max_model_len": 10_000}, "8192"),
    ],
)
def test_options_that_cannot_be_honoured(smollm2_gguf: Path, options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(**{"model": str(smollm2_gguf), **options})


def test_overrides_reach_every_part(smollm2_gguf: Path) -> None:
    longer = {"max_position_embeddings": 16384}
    llm = LLM(str(smollm2_gguf), hf_overrides=longer, max_model_len=10_000, max_num_seqs=1)
    assert llm.info.max_model_len == 10_000


def test_outputs_tell_their_times_and_metrics_count_them(llm: LLM) -> None:
    def counted(name: str) -> int:
        return sum(one.value for one in llm.get_metrics() if one.name == name)  # type: ignore[union-attr]

    before = counted("vllm:generation_tokens")
    params = SamplingParams(max_tokens=5, ignore_eos=True, n=2, output_kind=RequestOutputKind.DELTA)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert counted("vllm:generation_tokens") - before == 30
    for output in outputs:
        times = output.metrics
        assert times is not None
        assert times.queued_ts <= times.scheduled_ts <= times.first_token_ts <= times.last_token_ts
        assert times.first_token_latency == times.first_token_ts - times.queued_ts > 0
        assert times.num_generation_tokens == 10
        assert [len(choice.token_ids) for choice in output.outputs] == [5, 5]
    latencies = [one for one in llm.get_metrics() if one.name == "vllm:e2e_request_latency_seconds"]
    assert latencies[0].count == latencies[0].buckets["+Inf"] >= 6  # type: ignore[union-attr]


def test_queued_requests_run_when_waited_for(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, temperature=0)
    ids = llm.enqueue(PROMPTS, params)
    ids += llm.enqueue_chat([{"role": "user", "content": "Hello"}], params)
    between = llm.generate(PROMPTS[1], params, use_tqdm=False)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert outputs[1].outputs[0].text == between[0].outputs[0].text
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_one_step_at_a_time(llm: LLM) -> None:
    engine = llm.llm_engine
    whole = llm.generate(PROMPTS[1], SamplingParams(max_tokens=6, temperature=0), use_tqdm=False)
    kind = RequestOutputKind.DELTA
    engine.add_request(
        "a", PROMPTS[1], SamplingParams(max_tokens=6, temperature=0, output_kind=kind)
    )
    engine.add_request("b", PROMPTS[0], SamplingParams(max_tokens=300, ignore_eos=True))
    with pytest.raises(InvalidRequest, match="running already"):
        engine.add_request("a", PROMPTS[0], SamplingParams())
    parts: list[str] = []
    while not parts or engine.get_num_unfinished_requests() > 1:
        parts += [one.outputs[0].text for one in engine.step() if one.request_id == "a"]
    assert "".join(parts) == whole[0].outputs[0].text
    engine.abort_request(["b", "unknown"])
    assert not engine.has_unfinished_requests()
    assert engine.step() == []
    used = [one.value for one in llm.get_metrics() if one.name == "vllm:kv_cache_usage_perc"]  # type: ignore[union-attr]
    assert used == [0]


def test_what_others_have_is_missing_with_its_reason(llm: LLM) -> None:
    for table, owner in ((LLM_ABSENT, llm), (LLM_ENGINE_ABSENT, llm.llm_engine)):
        for name, remedy in table.items():
            assert not hasattr(owner, name)
            with pytest.raises(AttributeError, match=re.escape(f"is not offered: {remedy}.")):
                getattr(owner, name)
    with pytest.raises(AttributeError, match="has no attribute 'wings'"):
        llm.wings  # noqa: B018
    with pytest.raises(InvalidRequest, match="tokenization_kwargs"):
        llm.generate("x", tokenization_kwargs={"truncation": True})
    with pytest.raises(InvalidRequest, match="content_format"):
        llm.chat([{"role": "user", "content": "x"}], chat_template_content_format="openai")
