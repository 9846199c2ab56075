"""The real `litellm` against a real server: both of its providers that fit, plain and streamed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.servers import RunningServer

pytestmark = pytest.mark.model
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def litellm() -> Any:
    """Imported without its look at the network for a list of prices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        import litellm

        litellm.suppress_debug_info = True
        return litellm


@pytest.fixture
def shared(server: RunningServer) -> dict[str, Any]:
    return {"api_base": f"{server.url}/v1", "api_key": "none", "num_retries": 0}


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_chat_plain_and_streamed(litellm: Any, shared: dict[str, Any], provider: str) -> None:
    asked = {"model": f"{provider}/small", "messages": QUESTION, "temperature": 0, **shared}
    plain = litellm.completion(max_tokens=20, **asked)
    assert "Paris" in plain.choices[0].message.content
    assert plain.choices[0].finish_reason == "stop"
    chunks = list(
        litellm.completion(
            max_tokens=20, stream=True, stream_options={"include_usage": True}, **asked
        )
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == plain.choices[0].message.content
    counts = [chunk.usage.completion_tokens for chunk in chunks if getattr(chunk, "usage", None)]
    assert counts[-1] == plain.usage.completion_tokens


async def test_chat_in_an_event_loop(litellm: Any, shared: dict[str, Any]) -> None:
    asked = {"model": "hosted_vllm/small", "messages": QUESTION, "temperature": 0, **shared}
    plain = await litellm.acompletion(max_tokens=8, **asked)
    stream = await litellm.acompletion(max_tokens=8, stream=True, **asked)
    parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(parts) == plain.choices[0].message.content


def test_text_completion(litellm: Any, shared: dict[str, Any]) -> None:
    prompt = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,"
    answer = litellm.text_completion(
        model="text-completion-openai/small", prompt=prompt, max_tokens=8, temperature=0, **shared
    )
    assert answer.choices[0].text.startswith(" 12, 13")


def test_errors_become_its_own(litellm: Any, shared: dict[str, Any]) -> None:
    long = [{"role": "user", "content": "owl " * 3000}]
    with pytest.raises(litellm.ContextWindowExceededError):  # what its fallbacks act on
        litellm.completion(model="hosted_vllm/small", messages=long, **shared)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(model="hosted_vllm/large", messages=QUESTION, **shared)
    with pytest.raises(litellm.BadRequestError, match="wings"):
        litellm.completion(
            model="hosted_vllm/small", messages=QUESTION, extra_body={"wings": 2}, **shared
        )
