"""/v1/models, /tokenize and /detokenize."""

from __future__ import annotations

from typing import NoReturn

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidRequest
from octavo.server.body import read_record, unhurried
from octavo.server.context import Serving, serving_of
from octavo.server.errors import json_list, json_response
from octavo.server.prompts import chat_prompt, checked_ids, chosen_template
from octavo.server.reading import Wishes, plan
from octavo.server.schema import DetokenizeRequest, TokenizeRequest

# Bounds of one request: more would hold up others while JSON of it is read or written. What fits
# the context is never too much.
MAX_IDS = 2**18
MAX_CHARACTERS = 8  # of a text to /tokenize, for each id
THREAD_FROM = 8192  # ids
FEW = 64  # commas between the fields of a body, and in a model's name
CHAT_ONLY = (  # fields of /tokenize that say nothing of a plain text
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "tools",
)


async def list_models(request: Request) -> Response:
    """All names under which the model is served."""
    serving = serving_of(request)
    serving.require_ready()
    cards = [_card(serving, name) for name in serving.engine.model_names]
    return json_response({"object": "list", "data": cards})


async def show_model(request: Request) -> Response:
    """One of them. A name may hold slashes."""
    serving = serving_of(request)
    serving.require_ready()
    name = request.path_params["name"]
    serving.model_name(name)
    return json_response(_card(serving, name))


async def tokenize(request: Request) -> Response:
    """A text of up to 262,144 tokens, or a conversation that fits the context, to token ids."""
    serving = serving_of(request)
    serving.require_ready()
    body, _ = await read_record(request, serving.settings, TokenizeRequest, {})
    serving.model_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Send either prompt or messages.", "prompt")
    tokenizer, most = serving.engine.tokenizer, _most_ids(serving)
    if body.prompt is not None:
        for name, value in msgspec.structs.asdict(body).items():
            if name in CHAT_ONLY and value is not None:
                raise InvalidRequest(f"{name} goes with messages, not with prompt.", name)
        if len(body.prompt) > MAX_CHARACTERS * most:
            raise InvalidRequest(
                f"prompt has {len(body.prompt)} characters; send at most {MAX_CHARACTERS * most} "
                "at a time.",
                "prompt",
            )
        special = body.add_special_tokens is not False
        ids = await tokenizer.encode_packed(body.prompt, special)
    else:
        template = await chosen_template(serving, body.chat_template)
        shown = plan(serving, Wishes(tools=body.tools, tool_choice="none"), template)
        ids = (await chat_prompt(serving, body, template, shown)).ids
    if len(ids) > most:
        raise InvalidRequest(
            f"prompt has {len(ids)} tokens; send at most {most} at a time.", "prompt"
        )
    answer: dict[str, object] = {
        "count": len(ids),
        "max_model_len": serving.engine.limits.max_model_len,
    }

    def work() -> Response:
        answer["tokens"] = json_list(ids)
        if body.return_token_strs:
            answer["token_strs"] = json_list([tokenizer.token_text(token) for token in ids])
        return json_response(answer)

    return await unhurried(work, large=len(ids) >= THREAD_FROM)


async def detokenize(request: Request) -> Response:
    """Up to 262,144 token ids to text, special tokens included."""
    serving = serving_of(request)
    serving.require_ready()
    engine, most = serving.engine, _most_ids(serving)

    def look(data: bytes) -> None:
        """Counts before millions of numbers are made, in which time no other thread runs."""
        if (count := data.count(b",")) > most + FEW:
            _refuse_ids(count, most)

    body, _ = await read_record(request, serving.settings, DetokenizeRequest, {}, look=look)
    serving.model_name(body.model)
    if len(body.tokens) > most:
        _refuse_ids(len(body.tokens), most)

    def work() -> Response:
        ids = checked_ids(body.tokens, engine.limits.vocab_size, "tokens")
        return json_response({"prompt": engine.tokenizer.decode(ids, skip_special_tokens=False)})

    return await unhurried(work, large=len(body.tokens) >= THREAD_FROM)


def _refuse_ids(count: int, most: int) -> NoReturn:
    raise InvalidRequest(f"tokens has {count} ids; send at most {most} at a time.", "tokens")


def _most_ids(serving: Serving) -> int:
    return max(MAX_IDS, serving.engine.limits.max_model_len)


def _card(serving: Serving, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": serving.started,
        "owned_by": "octavo",
        "root": serving.engine.model_names[0],
        "parent": None,
        "max_model_len": serving.engine.limits.max_model_len,
        "permission": [],
    }
