"""Request records of the API: names, types and nothing else.

A field that is absent or null is unset. Types are strict: no text for a number, no boolean for an
integer. What a value may be is checked where it is used; fields that are known but cannot be
honoured stand in `refusals.py`. The OpenAPI document is made of these records.
Next file: `decode.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

Ids = list[int]


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_timeline: bool | None = None  # where the time went, as an event before the usage
    include_obfuscation: bool | None = None  # padding against traffic analysis; none is sent


class Generation(Struct, kw_only=True):
    """Fields that both generating routes have."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: Annotated[float | None, Meta(description="0 is greedy; 0 to 100")] = None
    top_p: float | None = None
    top_k: Annotated[int | None, Meta(description="0 or -1 is off")] = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[
        dict[str, float] | None, Meta(description="token id as text to a bias, -100 to 100")
    ] = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: Ids | None = None
    bad_words: list[str] | None = None
    logprob_token_ids: Ids | None = None
    response_format: Annotated[
        dict[str, Any] | None, Meta(description="type text, json_object or json_schema")
    ] = None
    structured_outputs: Annotated[
        dict[str, Any] | None,
        Meta(description="one of json, json_object, regex, choice, grammar, structural_tag"),
    ] = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: Annotated[
        int | None,
        Meta(
            description="keep so many prompt tokens; -1 leaves room for max_tokens, or for a "
            "quarter of the context (1,024 tokens at most) if that is unset"
        ),
    ] = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: Annotated[int | None, Meta(description="lower is served first")] = None
    request_id: str | None = None
    cache_salt: str | None = None
    timeout: Annotated[
        float | None, Meta(description="seconds in which the answer must be complete, else 504")
    ] = None
    # These change no output and are accepted for the sake of clients that send them.
    user: str | None = None
    session_id: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class ChatRequest(Generation, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Annotated[
        int | None, Meta(description="wins over max_tokens; unset: what is left of the context")
    ] = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Annotated[
        str | None, Meta(description="handed to the chat template as an argument")
    ] = None
    include_reasoning: bool | None = None
    tools: Annotated[
        list[dict[str, Any]] | None, Meta(description="functions that the model may call")
    ] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None,
        Meta(description='none, auto, required, or {"type": "function", "function": {"name"}}'),
    ] = None
    parallel_tool_calls: bool | None = None
    prediction: Any = None  # a hint for speed, which may be passed over


class ResponsesRequest(Struct, kw_only=True):
    """Body of POST /v1/responses."""

    input: Annotated[
        str | list[dict[str, Any]], Meta(description="a text, or messages, calls and their results")
    ]
    model: str | None = None
    instructions: Annotated[str | None, Meta(description="a system message before the input")] = (
        None
    )
    max_output_tokens: int | None = None
    text: Annotated[
        dict[str, Any] | None,
        Meta(description='{"format": {"type": text, json_object or json_schema, ...}}'),
    ] = None
    tools: Annotated[
        list[dict[str, Any]] | None, Meta(description="functions that the model may call")
    ] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None,
        Meta(description='none, auto, required, or {"type": "function", "name": ...}'),
    ] = None
    parallel_tool_calls: bool | None = None
    reasoning: Annotated[dict[str, Any] | None, Meta(description='{"effort": ...}')] = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # As in a chat request.
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: int | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    # These change no output and are accepted for the sake of clients that send them.
    user: str | None = None
    session_id: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None  # nothing is stored, and answers say so
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class CompletionRequest(Generation, kw_only=True):
    """Body of POST /v1/completions."""

    # Text, list of texts, list of ids, or list of lists of ids; told apart in `prompts.py`.
    prompt: Annotated[
        str | list[Any], Meta(description="text, list of texts, token ids, or list of token ids")
    ]
    logprobs: Annotated[int | None, Meta(description="alternatives for each token")] = None
    echo: bool | None = None


class Pooled(Struct, kw_only=True):
    """Fields of requests that are answered by vectors of texts."""

    model: str | None = None
    pooling: Annotated[
        Literal["last", "mean"] | None,
        Meta(description="which hidden states make the vector; last if left out"),
    ] = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    request_id: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    user: str | None = None


class EmbeddingRequest(Pooled, kw_only=True):
    """Body of POST /v1/embeddings."""

    input: Annotated[
        str | list[Any], Meta(description="text, list of texts, token ids, or list of token ids")
    ]
    encoding_format: Literal["float", "base64"] | None = None
    normalize: Annotated[
        bool | None, Meta(description="false leaves vectors at their own length")
    ] = None


class ScoreRequest(Pooled, kw_only=True):
    """Body of POST /v1/score."""

    text_1: Annotated[str | list[str], Meta(description="one text, or as many as in text_2")]
    text_2: str | list[str]


class RerankRequest(Pooled, kw_only=True):
    """Body of POST /v1/rerank."""

    query: str
    documents: list[str]
    top_n: Annotated[int | None, Meta(description="how many are answered; 0 is all")] = None


class TokenizeRequest(Struct, kw_only=True):
    """Body of POST /tokenize: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """Body of POST /detokenize."""

    tokens: Ids
    model: str | None = None
