"""Fields that clients know and this server cannot honour: refused by name, never passed over.

Each has values that ask for nothing, such as `best_of: 1`; those are accepted. Not for: unknown
fields (`decode.py`) or wrong values of fields that are supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from octavo.errors import InvalidRequest

_JSON = "use response_format, or structured_outputs with json"
_TEXT_ONLY = "this model takes and gives text only; leave it out"

# name: (values that ask for nothing, what to do about any other)
Refusals: TypeAlias = Mapping[str, tuple[tuple[object, ...], str]]

_COMMON: Refusals = {
    "best_of": ((1,), "it was removed; use n and choose yourself"),
    "use_beam_search": ((False,), "there is no beam search; use n with a temperature"),
    "length_penalty": ((1, 1.0), "it belongs to beam search, which there is none of"),
    "early_stopping": ((False,), "it belongs to beam search, which there is none of"),
    "guided_json": ((), "it was renamed; use structured_outputs with json"),
    "guided_regex": ((), "it was renamed; use structured_outputs with regex"),
    "guided_choice": ((), "it was renamed; use structured_outputs with choice"),
    "guided_grammar": ((), "it was renamed; use structured_outputs with grammar"),
    "guided_json_object": ((False,), "it was renamed; use structured_outputs with json_object"),
    "guided_decoding_backend": ((), "structured_outputs have one backend; leave it out"),
    "guided_whitespace_pattern": (
        (),
        "use structured_outputs with disable_any_whitespace, or leave it out: blanks are bounded",
    ),
    "regex": ((), "use structured_outputs with regex"),
    "json_schema": ((), _JSON),
    "ebnf": ((), "use structured_outputs with grammar"),
    "logits_processors": (([],), "code in requests is not run; use logit_bias"),
    "prompt_embeds": ((), "send text or token ids as prompt"),
    "kv_transfer_params": (({},), "caches are not moved between servers; leave it out"),
    "vllm_xargs": (({},), "there are no extra arguments; leave it out"),
    "mm_processor_kwargs": (({},), _TEXT_ONLY),
    "media_io_kwargs": (({},), _TEXT_ONLY),
    "repetition_detection": ((), "it is not built; use frequency_penalty"),
    "watermarking": ((False,), "there is no watermark; leave it out"),
    "stream_interval": ((1,), "each token is sent at once; leave it out"),
    "return_prompt_text": ((False,), "use echo in /v1/completions, or /detokenize"),
    "thinking_token_budget": ((), "thought has no limit of its own; use max_tokens"),
    "skip_reading_prefix_cache": ((False,), "use cache_salt for a cache of your own"),
    "deterministic": ((False,), "it is not built yet; set seed, or temperature 0"),
    "lora_path": ((), "adapters are not supported yet; leave it out"),
}
_CHAT: Refusals = {
    "add_special_tokens": ((False,), "the chat template writes them itself; leave it out"),
    "functions": (([],), "use tools"),
    "function_call": (("none", "auto"), "use tool_choice"),
    "documents": (([],), "put documents into the messages"),
    "audio": ((), _TEXT_ONLY),
    "modalities": ((["text"],), _TEXT_ONLY),
    "web_search_options": ((), "this server does not search; leave it out"),
    "verbosity": (("medium",), "ask for a short or long answer in a message"),
    "echo": ((False,), "use /v1/completions with echo"),
    "suffix": (("",), "use /v1/completions; filling in the middle is not supported there either"),
}
_COMPLETION: Refusals = {
    "suffix": (("",), "filling in the middle is not supported by this model; leave it out"),
}
_STORED = "nothing is stored here; send the whole conversation as input"
RESPONSES_REFUSED: Refusals = {
    "previous_response_id": ((), _STORED),
    "conversation": ((), _STORED),
    "prompt": ((), "prompts are not stored here; send the text as input"),
    "background": ((False,), "answers are not kept; leave it out, and stream the answer"),
    "truncation": (("disabled",), "shorten the input; use disabled"),
    "max_tool_calls": ((), "only functions of the caller are called; leave it out"),
    "context_management": (([],), "shorten the input; leave it out"),
    "moderation": ((), "there is none; leave it out"),
    "image": ((), _TEXT_ONLY),
    "prompt_cache_options": (({},), "the prefix cache is always on; leave it out"),
    "n": ((1,), "a response has one answer; send several requests"),
    "messages": ((), "send them as input"),
    "max_tokens": ((), "use max_output_tokens"),
    "response_format": ((), "use text.format"),
}
CHAT_REFUSED = {**_COMMON, **_CHAT}
COMPLETION_REFUSED = {**_COMMON, **_COMPLETION}


EMBEDDING_REFUSED: Refusals = {
    "dimensions": ((), "vectors have the model's own size; cut and scale them yourself"),
    "messages": ((), "render the conversation with /tokenize and send its ids as input"),
    "prompt": ((), "use input"),
    "late_interaction": ((), "a text is one vector; leave it out"),
    "use_activation": ((True,), "use normalize"),
    "embed_dtype": (("float32",), "vectors are float32; leave it out"),
    "endianness": (("native", "little"), "base64 holds little-endian numbers; leave it out"),
}


SCORE_REFUSED: Refusals = {
    "queries": ((), "use text_1, or query at /v1/rerank"),
    "items": ((), "use text_2, or documents at /v1/rerank"),
    "instruction": ((), "put it before the texts yourself"),
    "dimensions": ((), "vectors have the model's own size; leave it out"),
    "use_activation": ((True,), "scores are cosines as they are; leave it out"),
    "softmax": ((False,), "scores are cosines as they are; leave it out"),
    "return_documents": ((True,), "documents are always returned; leave it out"),
    "max_tokens_per_doc": ((0,), "use truncate_prompt_tokens"),
}


def refuse_unsupported(body: Mapping[str, Any], table: Refusals) -> None:
    """Raises InvalidRequest for the first field of `table` that asks for something."""
    for name in body.keys() & table.keys():
        value = body[name]
        harmless, remedy = table[name]
        if value is None or any(_same(value, one) for one in harmless):
            continue
        raise InvalidRequest(f"{name} is not supported here: {remedy}.", name)


def _same(value: object, other: object) -> bool:
    """Equality that does not take `True` for 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other
