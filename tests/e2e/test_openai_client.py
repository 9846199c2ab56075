"""The real `openai` client against a real server with the real model."""

from __future__ import annotations

import random

import openai
import pytest

from tests.e2e.servers import RunningServer, wait_for

pytestmark = pytest.mark.model
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
COUNTING = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,"


def test_chat_answers(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="small", messages=QUESTION, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    total = answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.total_tokens == total


def test_stream_equals_plain(client: openai.OpenAI) -> None:
    shared = {"model": "small", "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    plain = client.chat.completions.create(**shared)
    chunks = list(
        client.chat.completions.create(
            **shared, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == plain.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.usage.completion_tokens for c in chunks if c.usage] == [plain.usage.completion_tokens]


def test_seeded_answers_repeat_alone_and_in_a_batch(client: openai.OpenAI) -> None:
    seed = random.randrange(2**31)
    shared = {"model": "small", "prompt": COUNTING, "temperature": 1.3, "max_tokens": 24}
    alone = client.completions.create(**shared, seed=seed)
    several = client.completions.create(**shared, seed=seed, n=4)
    assert several.choices[0].text == alone.choices[0].text, f"seed {seed}"
    assert len({choice.text for choice in several.choices}) > 1, f"seed {seed}"
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]


def test_prompts_as_text_list_and_ids(client: openai.OpenAI, server: RunningServer) -> None:
    ids = openai.OpenAI(base_url=server.url, api_key="none").post(
        "/tokenize", body={"model": "small", "prompt": COUNTING}, cast_to=dict
    )["tokens"]
    shared = {"model": "small", "temperature": 0, "max_tokens": 8}
    by_text = client.completions.create(prompt=COUNTING, **shared).choices[0].text
    by_ids = client.completions.create(prompt=ids, **shared).choices[0].text
    both = client.completions.create(prompt=[COUNTING, "The capital of France is"], **shared)
    assert by_text == by_ids == both.choices[0].text
    assert both.choices[1].text.startswith(" Paris")


def test_logprobs_belong_to_the_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="small", messages=QUESTION, temperature=0, logprobs=True, top_logprobs=3
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    joined = b"".join(bytes(token.bytes or ()) for token in choice.logprobs.content)
    assert joined.decode().startswith(choice.message.content or "")
    for token in choice.logprobs.content:
        assert token.top_logprobs[0].logprob == token.logprob <= 0


def test_stop_text_is_never_sent(client: openai.OpenAI) -> None:
    chunks = client.completions.create(
        model="small", prompt=COUNTING, temperature=0, max_tokens=20, stop=["14, 15"], stream=True
    )
    assert "".join(c.choices[0].text for c in chunks) == " 12, 13, "


def test_errors_have_their_types(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="large", prompt="x")
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="small", prompt="x", temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="maximum context length is 1024"):
        client.completions.create(model="small", prompt=[5] * 2000)


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [card.id for card in client.models.list()] == ["small"]


def test_prefix_is_found_again(client: openai.OpenAI) -> None:
    ids = [random.randrange(1000, 40_000) for _ in range(100)]
    usage = [
        client.completions.create(model="small", prompt=ids, max_tokens=1).usage for _ in range(2)
    ]
    assert [u.prompt_tokens_details.cached_tokens for u in usage] == [0, 96]


def test_a_closed_stream_frees_its_pages(client: openai.OpenAI, server: RunningServer) -> None:
    stream = client.completions.create(
        model="small", prompt=COUNTING, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert server.gauge("vllm:num_requests_running") == 1
    stream.close()
    wait_for(lambda: server.gauge("vllm:num_requests_running") == 0, server, 5)
    assert server.gauge("vllm:kv_cache_usage_perc") == 0


def test_echo_keeps_both_numbers_of_alternatives(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="small",
        prompt=COUNTING,
        echo=True,
        logprobs=1,
        max_tokens=2,
        temperature=0,
        extra_body={"prompt_logprobs": 4},
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    tops = choice.logprobs.top_logprobs or []
    assert all(1 <= len(top) <= 2 for top in tops if top)
    prompt = choice.model_extra["prompt_logprobs"]  # type: ignore[index]
    assert all(4 <= len(entry) <= 5 for entry in prompt if entry)
