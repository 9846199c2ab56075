"""/v1/models, /tokenize and /detokenize."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidRequest
from octavo.server.body import read_object
from octavo.server.context import Serving, serving_of
from octavo.server.decode import check_names, to_record
from octavo.server.errors import json_response
from octavo.server.prompts import chat_prompt, checked_ids
from octavo.server.schema import DetokenizeRequest, TokenizeRequest


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
    """A text or a conversation to token ids. It need not fit the context."""
    serving = serving_of(request)
    serving.require_ready()
    settings = serving.settings
    raw = await read_object(request, settings.max_body_bytes)
    check_names(raw, TokenizeRequest, (), strict=settings.strict_fields)
    body = to_record(raw, TokenizeRequest)
    serving.model_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Send either prompt or messages.", "prompt")
    tokenizer = serving.engine.tokenizer
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        ids = await tokenizer.encode_async(body.prompt, special)
    else:
        ids = (await chat_prompt(serving, body)).ids
    answer: dict[str, object] = {
        "count": len(ids),
        "max_model_len": serving.engine.limits.max_model_len,
        "tokens": ids,
    }
    if body.return_token_strs:
        answer["token_strs"] = [tokenizer.token_text(token) for token in ids]
    return json_response(answer)


async def detokenize(request: Request) -> Response:
    """Token ids to text, special tokens included."""
    serving = serving_of(request)
    serving.require_ready()
    settings = serving.settings
    raw = await read_object(request, settings.max_body_bytes)
    check_names(raw, DetokenizeRequest, (), strict=settings.strict_fields)
    body = to_record(raw, DetokenizeRequest)
    serving.model_name(body.model)
    tokenizer = serving.engine.tokenizer
    ids = checked_ids(body.tokens, serving.engine.limits.vocab_size, "tokens")
    return json_response({"prompt": tokenizer.decode(ids, skip_special_tokens=False)})


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
