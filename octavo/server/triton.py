"""The KServe v2 protocol as NVIDIA Triton speaks it: text in, text out, under /v2.

`generate`, `generate_stream` and `infer` are other spellings of a completion: their settings are
the fields of POST /v1/completions, read as strictly and run the same way. Settings may stand at
the top, in `parameters`, in `sampling_parameters` (an object or its text), or, for `infer`, in
input tensors of their name. Errors are `{"error": "..."}`; a stream ends without `[DONE]`.
There is one version of a model, 1. Not for: tensors (`tensors.py`), metadata (`kserve.py`).
Next file: `tensors.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidRequest
from octavo.server.answer import Call, begin, finish
from octavo.server.body import check_encoding, read_bytes, unhurried
from octavo.server.completions import completion_job, prompt_text
from octavo.server.context import Serving, serving_of
from octavo.server.decode import check_names, parse_object, shorten, to_record
from octavo.server.errors import json_response, named_as_sent
from octavo.server.feed import Framing
from octavo.server.generation import Choice, Job, Usage
from octavo.server.kserve import VERSION, described, in_triton_words, served_model
from octavo.server.refusals import COMPLETION_REFUSED, Refusals, refuse_unsupported
from octavo.server.schema import CompletionRequest
from octavo.server.stream import stream, whole
from octavo.server.tensors import (
    HEAD_LENGTH,
    InferHead,
    Tensor,
    WantedOutput,
    read_infer,
    write_infer,
)
from octavo.text.assembler import Delta

THREAD_FROM = 64 * 1024  # bytes of a body that is read in a thread
_NO_PLACE = "there is no output for it here; use /v1/completions"
_PATH_SAYS = "the path names it; leave it out"
_NO_SEQUENCES = "requests are independent of each other; leave it out"

# Fields of a completion that mean nothing here, and Triton's own that cannot be honoured.
TRITON_REFUSED: Refusals = {
    **COMPLETION_REFUSED,
    "model": ((), _PATH_SAYS),
    "prompt": ((), "use text_input"),
    "request_id": ((), "use id"),
    "echo": ((False,), "use exclude_input_in_output = false"),
    "logprobs": ((), _NO_PLACE),
    "prompt_logprobs": ((), _NO_PLACE),
    "logprob_token_ids": ((), _NO_PLACE),
    "return_token_ids": ((False,), _NO_PLACE),
    "return_tokens_as_token_ids": ((False,), _NO_PLACE),
    "stream_options": ((), _NO_PLACE),
    "return_logprobs": ((False,), _NO_PLACE),
    "return_cumulative_logprob": ((False,), _NO_PLACE),
    "image": ((), "this model takes and gives text only; leave it out"),
    "stop_words": ((), "use stop"),
    "end_id": ((), "use stop_token_ids"),
    "beam_width": ((1,), "there is no beam search; use n with a temperature"),
    "sequence_id": ((0, ""), _NO_SEQUENCES),
    "sequence_start": ((False,), _NO_SEQUENCES),
    "sequence_end": ((False,), _NO_SEQUENCES),
}


class Wishes(msgspec.Struct, kw_only=True):
    """What a caller wants of the answer's form, under the names of Triton's vLLM backend."""

    stream: bool | None = None
    exclude_input_in_output: bool = True
    return_finish_reason: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that has been read: a completion, and the wishes around it."""

    id: str
    body: CompletionRequest
    wishes: Wishes
    ignored: list[str]


@in_triton_words
async def generate(request: Request) -> Response:
    """Continue a text; the answer is one object."""
    call, job, ask = await _begin_generate(request)
    if ask.wishes.stream:
        raise InvalidRequest("stream = true goes with generate_stream only.", "stream")
    choices, usage = await whole(request, call, job)
    return finish(json_response(_answer(call, job, ask, choices, usage)), call)


@in_triton_words
async def generate_stream(request: Request) -> Response:
    """Continue a text; the answer is a stream of objects, or one with `stream: false`."""
    call, job, ask = await _begin_generate(request)
    wishes = ask.wishes
    if wishes.stream is False:
        choices, usage = await whole(request, call, job)
        data = _event(_answer(call, job, ask, choices, usage))
        response = Response(data, media_type="text/event-stream")
        return finish(response, call)
    if job.params.n > 1:
        raise InvalidRequest(f"n = {job.params.n} does not go with a stream; use 1.", "n")
    if not wishes.exclude_input_in_output:
        raise InvalidRequest(
            "exclude_input_in_output = false does not go with a stream.", "exclude_input_in_output"
        )
    return await stream(request, call, job, TritonChunks(call, job, ask), FRAMING)


@in_triton_words
async def infer(request: Request) -> Response:
    """Continue the texts of an input tensor; the answers are an output tensor."""
    serving = serving_of(request)
    model = served_model(request)
    check_encoding(request.headers)
    data = await read_bytes(request, serving.settings.max_body_bytes)
    length = request.headers.get(HEAD_LENGTH)

    def work() -> tuple[InferHead, dict[str, Tensor], Ask]:
        head, inputs = read_infer(data, length)
        return head, inputs, _read_tensors(head, inputs, strict=serving.settings.strict_fields)

    head, inputs, ask = await unhurried(work, large=len(data) >= THREAD_FROM)
    wanted = _wanted(head, ask.wishes)
    call, job = await _begin(request, serving, ask, model)
    if ask.wishes.stream:
        raise InvalidRequest("stream = true goes with generate_stream only.", "stream")
    choices, usage = await whole(request, call, job)
    made = _outputs(call, job, ask, inputs["text_input"].shape, choices=choices, usage=usage)
    by_name = {tensor.name: tensor for tensor in made}
    outputs = [by_name[name] for name in wanted]
    first: dict[str, object] = {"model_name": call.model, "model_version": VERSION}
    if ask.id:
        first["id"] = ask.id
    content, head_length = write_infer(first, outputs, list(wanted.values()))
    response = Response(content, media_type="application/json")
    if head_length is not None:
        response = Response(content, media_type="application/octet-stream")
        response.headers[HEAD_LENGTH] = str(head_length)
    return finish(response, call)


async def _begin_generate(request: Request) -> tuple[Call, Job, Ask]:
    serving = serving_of(request)
    model = served_model(request)
    check_encoding(request.headers)
    data = await read_bytes(request, serving.settings.max_body_bytes)

    def work() -> Ask:
        return _read_object(parse_object(data), strict=serving.settings.strict_fields)

    ask = await unhurried(work, large=len(data) >= THREAD_FROM)
    call, job = await _begin(request, serving, ask, model)
    return call, job, ask


async def _begin(request: Request, serving: Serving, ask: Ask, model: str) -> tuple[Call, Job]:
    call = replace(begin(request, serving, ask.body, ask.ignored, "triton"), model=model)
    with named_as_sent({"prompt": "text_input"}):
        return call, await completion_job(call, ask.body)


def _read_object(body: dict[str, Any], *, strict: bool) -> Ask:
    """A generate request: settings at the top and below, each once. Raises InvalidRequest."""
    text = body.pop("text_input", None)
    if not isinstance(text, str):
        raise InvalidRequest("text_input must be a text.", "text_input")
    name = body.pop("id", None)
    if not isinstance(name, str | None):
        raise InvalidRequest("id must be a text.", "id")
    return _ask(name or "", text, [body, _object(body.pop("parameters", None))], strict=strict)


def _read_tensors(head: InferHead, inputs: dict[str, Tensor], *, strict: bool) -> Ask:
    """An infer request: inputs other than the text are settings. Raises InvalidRequest."""
    if "text_input" not in inputs or inputs["text_input"].datatype != "BYTES":
        raise InvalidRequest("inputs: send text_input with datatype BYTES.", "inputs")
    texts = inputs["text_input"].values
    if not texts:
        raise InvalidRequest("inputs: text_input is empty.", "inputs")
    settings: dict[str, Any] = {}
    for name, tensor in inputs.items():
        if name == "text_input":
            continue
        if len(tensor.values) != 1:
            raise InvalidRequest(
                f"inputs: {shorten(name)} has {len(tensor.values)} elements; send 1.", "inputs"
            )
        settings[name] = tensor.values[0]
    parameters = dict(head.parameters)
    parameters.pop("binary_data_output", None)
    if (microseconds := parameters.pop("timeout", None)) is not None:
        if type(microseconds) is not int or microseconds < 0:
            raise InvalidRequest("timeout must be a whole number of microseconds.", "timeout")
        settings["timeout"] = microseconds / 1e6 if microseconds else None
    return _ask(head.id or "", texts, [settings, parameters], strict=strict)


def _ask(name: str, prompt: str | list[str], layers: list[dict[str, Any]], *, strict: bool) -> Ask:
    """The completion that settings of several places make. Raises InvalidRequest."""
    fields: dict[str, Any] = {}
    wishes: dict[str, Any] = {}
    for layer in [*layers, _sampling_parameters(layers)]:
        for key, value in layer.items():
            target = wishes if key in Wishes.__struct_fields__ else fields
            if key in target and target[key] != value:
                raise InvalidRequest(f"{shorten(key)} is given twice.", shorten(key))
            target[key] = value
    known = {*TRITON_REFUSED, *Wishes.__struct_fields__}
    ignored = check_names(fields, CompletionRequest, known, strict=strict)
    refuse_unsupported(fields, TRITON_REFUSED)
    body = to_record({**fields, "prompt": prompt}, CompletionRequest)
    given = {key: value for key, value in wishes.items() if value is not None}
    return Ask(name, body, to_record(given, Wishes), ignored)


def _sampling_parameters(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Takes `sampling_parameters` out of the layers: an object, or a text that is one."""
    found: dict[str, Any] = {}
    for layer in layers:
        value = layer.pop("sampling_parameters", None)
        if isinstance(value, str):
            try:
                value = parse_object(value.encode()) if value.strip() else {}
            except InvalidRequest as error:
                where = "sampling_parameters"
                raise InvalidRequest(f"{where} must be JSON: {error.message}", where) from None
        found.update(_object(value, "sampling_parameters"))
    return found


def _object(value: object, name: str = "parameters") -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object.", name)
    return value


def _texts(call: Call, job: Job, ask: Ask, choices: list[Choice]) -> list[str]:
    texts = ["".join(choice.texts) for choice in choices]
    if ask.wishes.exclude_input_in_output:
        return texts
    tokenizer = call.serving.engine.tokenizer
    return [prompt_text(job.prompt_of(index), tokenizer) + text for index, text in enumerate(texts)]


def _answer(
    call: Call, job: Job, ask: Ask, choices: list[Choice], usage: Usage
) -> dict[str, object]:
    """A generate answer; with `n` above 1 its outputs are lists."""
    texts = _texts(call, job, ask, choices)
    reasons = [choice.finish_reason for choice in choices]
    answer = _object_head(call, ask)
    answer["text_output"] = texts[0] if len(texts) == 1 else texts
    if ask.wishes.return_finish_reason:
        answer["finish_reason"] = reasons[0] if len(reasons) == 1 else reasons
    if ask.wishes.return_num_input_tokens:
        answer["num_input_tokens"] = usage.prompt_tokens
    if ask.wishes.return_num_output_tokens:
        answer["num_output_tokens"] = usage.completion_tokens
    return answer


def _object_head(call: Call, ask: Ask) -> dict[str, object]:
    head: dict[str, object] = {"model_name": call.model, "model_version": VERSION}
    return {"id": ask.id, **head} if ask.id else head


def _outputs(
    call: Call, job: Job, ask: Ask, shape: list[int], *, choices: list[Choice], usage: Usage
) -> list[Tensor]:
    """The output tensors, in the shape of the input; `n` above 1 adds a dimension."""
    if job.params.n > 1:
        shape = [*shape, job.params.n]
    made = [Tensor("text_output", "BYTES", shape, _texts(call, job, ask, choices))]
    if ask.wishes.return_finish_reason:
        reasons = [choice.finish_reason or "" for choice in choices]
        made.append(Tensor("finish_reason", "BYTES", shape, reasons))
    if ask.wishes.return_num_input_tokens:
        made.append(Tensor("num_input_tokens", "UINT32", [1], [usage.prompt_tokens]))
    if ask.wishes.return_num_output_tokens:
        made.append(Tensor("num_output_tokens", "UINT32", [1], [usage.completion_tokens]))
    return made


def _wanted(head: InferHead, wishes: Wishes) -> dict[str, bool]:
    """The outputs that are asked for, and whether each goes as bytes. Raises InvalidRequest."""
    every = _flag(head.parameters, "binary_data_output", default=False)
    optional = {
        "finish_reason": wishes.return_finish_reason,
        "num_input_tokens": wishes.return_num_input_tokens,
        "num_output_tokens": wishes.return_num_output_tokens,
    }
    made = ["text_output", *(name for name, wanted in optional.items() if wanted)]
    for one in head.outputs or ():
        if one.name not in made:
            raise InvalidRequest(
                f"outputs: {shorten(one.name)} is not made here; there is {', '.join(made)}.",
                "outputs",
            )
    if not head.outputs:
        return dict.fromkeys(made, every)
    return {one.name: _as_bytes(one, every) for one in head.outputs}


def _as_bytes(wanted: WantedOutput, default: bool) -> bool:
    for name in wanted.parameters:
        if name != "binary_data":
            raise InvalidRequest(
                f"outputs: the parameter {shorten(name)} is not supported; leave it out.", "outputs"
            )
    return _flag(wanted.parameters, "binary_data", default=default)


def _flag(parameters: dict[str, Any], name: str, *, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} = {shorten(str(value))} must be true or false.", name)
    return value


class TritonChunks:
    """Events of a streamed answer: one object for each piece of text."""

    def __init__(self, call: Call, job: Job, ask: Ask) -> None:
        self._head = _object_head(call, ask)
        self._job = job
        self._wishes = ask.wishes
        self._made = 0

    def write(self, index: int, delta: Delta) -> bytes:
        """The event of a delta, if it has text or is the last."""
        self._made += len(delta.token_ids)
        if not (delta.text or delta.finish_reason):
            return b""
        return _event(_stream_answer(self._head, self._job, self._wishes, delta, self._made))

    def usage(self) -> bytes:
        """Nothing: the last answer has the counts."""
        return b""


def _stream_answer(
    head: dict[str, object], job: Job, wishes: Wishes, delta: Delta, made: int
) -> dict[str, object]:
    answer = {**head, "text_output": delta.text}
    if delta.finish_reason is None:
        return answer
    if wishes.return_finish_reason:
        answer["finish_reason"] = delta.finish_reason
    if wishes.return_num_input_tokens:
        answer["num_input_tokens"] = len(job.prompts[0].ids)
    if wishes.return_num_output_tokens:
        answer["num_output_tokens"] = made
    return answer


def _event(content: dict[str, object]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def _error_event(error: Exception) -> bytes:
    return _event(described(error))


FRAMING = Framing(done=b"", error=_error_event)
