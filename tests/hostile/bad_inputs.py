"""The table of bad inputs beyond `tests/server/test_bad_input.py`, whose tables are part of it.

Each entry: where it goes, the field that the refusal must name, and the body. All of them are 400s
with default settings. Not for: raw bytes and headers, which are in the other table too.
"""

from __future__ import annotations

from typing import Any

from tests.server import test_bad_input as tables

CHAT, COMPLETIONS = tables.CHAT, tables.COMPLETIONS
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
GENERATE, INFER = "/v2/models/{model}/generate", "/v2/models/{model}/infer"
RESPONSES, EMBEDDINGS = "/v1/responses", "/v1/embeddings"
USER = tables.USER

Entry = tuple[str, str, dict[str, Any]]


def asked(content: Any) -> dict[str, Any]:
    """A chat with this content."""
    return {"messages": [{"role": "user", "content": content}]}


def answered(**fields: Any) -> dict[str, Any]:
    """A chat whose history holds this answer of the assistant."""
    return {"messages": [USER, {"role": "assistant", **fields}, USER]}


def called(**function: Any) -> dict[str, Any]:
    """A chat whose history holds this call."""
    return answered(content=None, tool_calls=[{"id": "a", "type": "function", **function}])


def part(**fields: Any) -> dict[str, Any]:
    return asked([{"type": "text", "text": "Hi"}, fields])


def text_tensor(**changes: Any) -> dict[str, Any]:
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"], **changes}
    return {"inputs": [tensor]}


MESSAGES: list[Entry] = [
    (CHAT, "messages[0].content", asked(True)),
    (CHAT, "messages[0].content", asked({})),
    (CHAT, "messages[0].content", asked([])),
    (CHAT, "messages[0].content", asked([None])),
    (CHAT, "messages[0].content", asked(["Hi"])),
    (CHAT, "messages[0].content", asked([{"type": "text"}] * 4097)),
    (CHAT, "messages[0].content", asked([{"type": "text", "text": None}])),
    (CHAT, "messages[0].content", asked([{"type": "text", "text": ["x"]}])),
    (CHAT, "messages[0].content[1]", part(type="image_url", image_url={"url": "http://x/y.png"})),
    (
        CHAT,
        "messages[0].content[1]",
        part(type="image_url", image_url={"url": "file:///etc/hosts"}),
    ),
    (CHAT, "messages[0].content[1]", part(type="input_audio", input_audio={"data": "AA=="})),
    (CHAT, "messages[0].content[1]", part(type="video_url", video_url={"url": "http://x/y.mp4"})),
    (CHAT, "messages[0].content[1]", part(type="file", file={"file_id": "../../etc/passwd"})),
    (CHAT, "messages[0].content[1]", part(type="image_embeds", image_embeds="AA==")),
    (CHAT, "messages[0].content[1]", part(type=None, text="x")),
    (CHAT, "messages[0].content[1]", part(type=["text"], text="x")),
    (CHAT, "messages[0].name", {"messages": [{**USER, "name": 5}]}),
    (CHAT, "messages[0].tool_calls", {"messages": [{**USER, "tool_calls": []}]}),
    (CHAT, "messages[0].role", {"messages": [{"role": None, "content": "x"}]}),
    (CHAT, "messages[0].role", {"messages": [{"role": "User", "content": "x"}]}),
    (CHAT, "messages[0].role", {"messages": [{"role": "user\n", "content": "x"}]}),
    (CHAT, "messages[1].tool_calls", answered(content=None, tool_calls="call")),
    (CHAT, "messages[1].tool_calls", answered(content=None, tool_calls=[5])),
    (CHAT, "messages[1].tool_calls", answered(content=None, tool_calls=[{}] * 129)),
    (CHAT, "messages[1].tool_calls[0].function", called()),
    (CHAT, "messages[1].tool_calls[0].function", called(function="f")),
    (CHAT, "messages[1].tool_calls[0].function", called(function={"arguments": "{}"})),
    (CHAT, "messages[1].tool_calls[0].function", called(function={"name": "", "arguments": "{}"})),
    (CHAT, "messages[1].tool_calls[0].function", called(function={"name": "f", "arguments": 5})),
    (CHAT, "messages[1].tool_calls[0].function", called(function={"name": "f", "arguments": []})),
    (CHAT, "messages[1].tool_calls[0]", called(type="shell", function={"name": "f"})),
    (CHAT, "messages[1].tool_calls[0]", called(id=None, function={"name": "f"})),
    (CHAT, "messages[1].content", answered(content=7)),
    (CHAT, "messages[1].refusal", answered(content=None, refusal=7)),
    (CHAT, "messages[1].audio", answered(content="x", audio={"id": "a"})),
    (CHAT, "messages[1].function_call", answered(content="x", function_call={"name": "f"})),
    (CHAT, "messages[0].tool_call_id", {"messages": [{"role": "tool", "content": "x"}]}),
    (
        CHAT,
        "messages[0].tool_call_id",
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": 9}]},
    ),
]
TEMPLATES: list[Entry] = [
    (CHAT, "chat_template", {**asked("x"), "chat_template": "{{ messages }}"}),
    (CHAT, "chat_template", {**asked("x"), "chat_template": ""}),
    (CHAT, "chat_template", {**asked("x"), "chat_template": 5}),
    (CHAT, "chat_template_kwargs", {**asked("x"), "chat_template_kwargs": {"nothing": 1}}),
    (CHAT, "chat_template_kwargs", {**asked("x"), "chat_template_kwargs": {"messages": []}}),
    (CHAT, "chat_template_kwargs", {**asked("x"), "chat_template_kwargs": {"tokenize": True}}),
    (CHAT, "chat_template_kwargs", {**asked("x"), "chat_template_kwargs": {"chat_template": "x"}}),
    (CHAT, "chat_template_kwargs", {**asked("x"), "chat_template_kwargs": {"": 1}}),
    (CHAT, "reasoning_effort", {**asked("x"), "reasoning_effort": 5}),
    (
        CHAT,
        "continue_final_message",
        {**asked("x"), "continue_final_message": True, "add_generation_prompt": True},
    ),
    (TOKENIZE, "chat_template", {**asked("x"), "chat_template": "{{ messages }}"}),
]
CODE: list[Entry] = [
    (path, name, {**good, name: value})
    for path, good in ((CHAT, asked("x")), (COMPLETIONS, {"prompt": "x"}))
    for name, value in (
        ("logits_processors", [{"qualname": "os.system", "args": ["true"]}]),
        ("custom_logit_processor", "gASVAAAA"),
        ("prompt_embeds", "gASVAAAA"),
        ("kv_transfer_params", {"remote_host": "10.0.0.1"}),
        ("vllm_xargs", {"a": "__import__"}),
        ("lora_path", "../../etc"),
        ("lora_request", {"path": "/etc"}),
        ("mm_processor_kwargs", {"a": 1}),
        ("documents", [{"text": 1}]),
        ("extra_body", {"a": 1}),
    )
]
TOKENS: list[Entry] = [
    (TOKENIZE, "prompt", {"prompt": ["x"]}),
    (TOKENIZE, "prompt", {"prompt": None}),
    (TOKENIZE, "add_special_tokens", {"prompt": "x", "add_special_tokens": 1}),
    (TOKENIZE, "return_token_strs", {"prompt": "x", "return_token_strs": "yes"}),
    (TOKENIZE, "messages", {"messages": {}}),
    (TOKENIZE, "messages[0]", {"messages": [{"role": "user"}]}),
    (TOKENIZE, "add_generation_prompt", {**asked("x"), "add_generation_prompt": 0}),
    (DETOKENIZE, "tokens", {"tokens": None}),
    (DETOKENIZE, "tokens", {"tokens": {}}),
    (DETOKENIZE, "tokens", {"tokens": [None]}),
    (DETOKENIZE, "tokens", {"tokens": ["5"]}),
    (DETOKENIZE, "tokens", {"tokens": [1.5]}),
    (DETOKENIZE, "tokens", {"tokens": [2**31]}),
    (DETOKENIZE, "tokens", {"tokens": [-(2**63)]}),
    (DETOKENIZE, "tokens", {"tokens": [5] * (2**20 + 1)}),
    (DETOKENIZE, "token", {"token": [5]}),
    (DETOKENIZE, "model", {"tokens": [5], "model": 1}),
]
KSERVE: list[Entry] = [
    (GENERATE, "text_input", {}),
    (GENERATE, "text_input", {"text_input": 5}),
    (GENERATE, "text_input", {"text_input": None}),
    (GENERATE, "prompt", {"text_input": "x", "prompt": "y"}),
    (GENERATE, "parameters", {"text_input": "x", "parameters": 5}),
    (GENERATE, "parameters", {"text_input": "x", "parameters": [1]}),
    (GENERATE, "temperature", {"text_input": "x", "parameters": {"temperature": -1}}),
    (GENERATE, "temprature", {"text_input": "x", "parameters": {"temprature": 1}}),
    (GENERATE, "max_tokens", {"text_input": "x", "max_tokens": -1}),
    (GENERATE, "stop", {"text_input": "x", "stop": [""]}),
    (GENERATE, "image", {"text_input": "x", "image": "AA=="}),
    (GENERATE, "stop_words", {"text_input": "x", "stop_words": ["y"]}),
    (GENERATE, "sampling_parameters", {"text_input": "x", "sampling_parameters": "{"}),
    (GENERATE, "sampling_parameters", {"text_input": "x", "sampling_parameters": "[1]"}),
    (INFER, "inputs", {}),
    (INFER, "inputs", {"inputs": []}),
    (INFER, "inputs", {"inputs": {}}),
    (INFER, "inputs", {"inputs": [5]}),
    (INFER, "text_input", text_tensor(shape=[2])),
    (INFER, "text_input", text_tensor(shape=[-1])),
    (INFER, "text_input", text_tensor(shape=[2**40, 2**40])),
    (INFER, "text_input", text_tensor(shape=[1] * 99)),
    (INFER, "text_input", text_tensor(data=[5])),
    (INFER, "text_input", text_tensor(data=None)),
    (INFER, "text_input", text_tensor(datatype="FP32", data=[1.0])),
    (INFER, "datatype", text_tensor(datatype="OBJECT")),
    (INFER, "text_in", text_tensor(name="text_in")),
]
OTHERS: list[Entry] = [
    (RESPONSES, "input", {}),
    (RESPONSES, "input", {"input": 5}),
    (RESPONSES, "input", {"input": []}),
    (RESPONSES, "input[0]", {"input": [5]}),
    (RESPONSES, "input[0]", {"input": [{"role": "king", "content": "x"}]}),
    (RESPONSES, "input[0]", {"input": [{"type": "message", "role": "user", "content": None}]}),
    (RESPONSES, "input[0]", {"input": [{"type": "computer_call", "id": "a"}]}),
    (
        RESPONSES,
        "input[0].content[0]",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}
            ]
        },
    ),
    (RESPONSES, "instructions", {"input": "x", "instructions": 5}),
    (RESPONSES, "max_output_tokens", {"input": "x", "max_output_tokens": -1}),
    (RESPONSES, "max_output_tokens", {"input": "x", "max_output_tokens": "5"}),
    (RESPONSES, "temperature", {"input": "x", "temperature": -1}),
    (RESPONSES, "previous_response_id", {"input": "x", "previous_response_id": "resp_1"}),
    (RESPONSES, "background", {"input": "x", "background": True}),
    (RESPONSES, "tools", {"input": "x", "tools": [{"type": "web_search"}]}),
    (RESPONSES, "tool_choice", {"input": "x", "tool_choice": "required"}),
    (RESPONSES, "inputs", {"input": "x", "inputs": 1}),
    (EMBEDDINGS, "input", {}),
    (EMBEDDINGS, "input", {"input": []}),
    (EMBEDDINGS, "input", {"input": ""}),
    (EMBEDDINGS, "input", {"input": 5}),
    (EMBEDDINGS, "input", {"input": [10**9]}),
    (EMBEDDINGS, "input", {"input": [-1]}),
    (EMBEDDINGS, "input", {"input": ["x", 5]}),
    (EMBEDDINGS, "input", {"input": [[]]}),
    (EMBEDDINGS, "input", {"input": ["x"] * 5000}),
    (EMBEDDINGS, "input", {"input": "owl " * 5000}),
    (EMBEDDINGS, "encoding_format", {"input": "x", "encoding_format": "hex"}),
    (EMBEDDINGS, "dimensions", {"input": "x", "dimensions": 7}),
    (EMBEDDINGS, "dimensions", {"input": "x", "dimensions": -1}),
]
ENTRIES = MESSAGES + TEMPLATES + CODE + TOKENS + KSERVE + OTHERS
