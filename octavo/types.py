"""The records that cross rooms and processes: requests in, plans down, results up, outputs back.

All are frozen msgspec structs, integers and bytes for the most part, so that each can be logged,
compared, replayed and sent. `bytes` fields marked i32 or u8 hold packed little-endian integers;
`pack` and `unpack` convert. Times are `time.monotonic()` seconds, one clock for all processes of
a machine. Not for: text (see `text/`), device tensors (see `forward.py`).
Next file: `engine/sequence.py`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Literal, TypeAlias

from msgspec import Struct

FinishReason: TypeAlias = Literal["stop", "length", "abort", "timeout", "error"]

# Flags of a row of a StepPlan.
SAMPLE = 1  # the row's last position is sampled
FROM_DEVICE = 2  # the input token is the slot's last sampled one, not yet known to the host
LAST_CHUNK = 4  # the row's last prompt token is in this step
PROMPT_LOGPROBS = 8  # log-probs of the prompt tokens computed in this step are wanted
POOL = 16  # the hidden states of the row's tokens are wanted, as its sequence pools them

# An operation of workers: begin to compile the grammar `text`, and say if it is `ready`.
PREPARE = "grammar"


def pack(values: Iterable[int]) -> bytes:
    """i32 values to bytes."""
    return array("i", values).tobytes()


def unpack(data: bytes) -> memoryview:
    """A read-only view of packed i32 values; `list(unpack(b))` gives ints."""
    return memoryview(data).cast("i")


class Grammar(Struct, frozen=True, array_like=True):
    """What an answer must match. Checked by the API process before it is sent (`grammar/`)."""

    text: str  # in the form of the grammar library
    end_ids: tuple[int, ...]  # allowed where the grammar may end; each ends the answer
    json: bool = False  # all of it is JSON: its numbers are kept from running on


class TokenParams(Struct, frozen=True, array_like=True):
    """A request's sampling settings in terms of token ids: all that core and worker need.

    Made from the public `SamplingParams` by `SamplingParams.to_token_params`; texts (stop strings,
    bad words) have become ids or stayed in the API process by then.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    seed: int = 0  # unsigned 64 bit, drawn by the API process if the caller gave none
    stop_ids: tuple[int, ...] = ()  # end tokens included unless ignore_eos
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_ids: tuple[int, ...] = ()  # empty is all
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences of ids that must not be completed
    logprobs: int | None = None  # number of alternatives; -1 is the whole vocabulary
    prompt_logprobs: int | None = None
    logprob_ids: tuple[int, ...] = ()  # extra ids whose log-probs are wanted
    grammar: Grammar | None = None
    pooling: str = ""  # "last" or "mean" of the prompt's hidden states is wanted; empty is none

    @property
    def needs_history(self) -> bool:
        """True if the sampler must know the tokens that came before."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.bad_words
            or self.prompt_logprobs is not None
            or self.grammar is not None
        )


# API process -> core


class AddRequest(Struct, frozen=True, array_like=True, tag="add"):
    """One sequence to generate. `n` choices are `n` requests that share `group`."""

    id: str
    prompt_ids: list[int]
    params: TokenParams
    arrival: float
    group: str = ""  # requests of one group share prompt pages even if prefix caching is off
    emitted_ids: list[int] = []  # already sent to the client (a stream resumed elsewhere)
    priority: int = 0  # lower is served first
    deadline: float = 0.0  # 0 is none
    cache_salt: str = ""
    adapter: str = ""
    suspect: bool = False  # was in flight when an engine died: run alone first
    tenant: str = ""  # whose share of the engine it takes, by name
    weight: float = 1.0  # of the tenant's share


class Abort(Struct, frozen=True, array_like=True, tag="abort"):
    """Ends requests at any moment; unknown ids are no error."""

    ids: list[str]


class Control(Struct, frozen=True, array_like=True, tag="control"):
    """An operation on the whole engine: `reset_prefix_cache`, `snapshot`, `drain`, `stop`."""

    id: int
    op: str
    args: dict[str, str] = {}


ToCore: TypeAlias = AddRequest | Abort | Control


# core -> worker


class Admit(Struct, frozen=True, array_like=True):
    """A sequence enters a slot. `history` (i32) is all its known tokens, if params need them."""

    slot: int
    num_prompt: int
    params: TokenParams
    history: bytes = b""
    adapter: str = ""


class StepPlan(Struct, frozen=True, array_like=True):
    """One step for the worker: R rows, decode rows (one token, sampled) first."""

    step: int
    epoch: int
    slots: bytes  # i32[R]
    starts: bytes  # i32[R] position of the row's first token
    lengths: bytes  # i32[R] number of tokens
    flags: bytes  # u8[R]
    tokens: bytes  # i32, the input tokens of all rows that are not FROM_DEVICE, in row order
    block_rows: bytes = b""  # i32[N] row of each newly attached block
    block_at: bytes = b""  # i32[N] its index in the row's block table
    block_ids: bytes = b""  # i32[N]
    admits: tuple[Admit, ...] = ()

    @property
    def num_rows(self) -> int:
        return len(self.flags)

    @property
    def num_tokens(self) -> int:
        return sum(memoryview(self.lengths).cast("i"))


# worker -> core


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Log-probs at one position: the token itself, the best ones in falling order, `logprob_ids`.

    The token may be there twice or more; `len(ids)` is 1 + alternatives + wanted ids.
    """

    ids: list[int]
    values: list[float]
    rank: int  # of the token itself, 1 is the most likely


class StepResult(Struct, frozen=True, array_like=True):
    """What a step gave: one token for each row with SAMPLE, in row order."""

    step: int
    tokens: bytes  # i32[S]
    logprobs: dict[int, TokenLogprobs] = {}  # by index into tokens, where asked for
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}  # by row, a value per position computed
    bad: tuple[int, ...] = ()  # indices into tokens that could not be sampled; ignore the token
    forward_ms: float = 0.0
    bad_reasons: tuple[str, ...] = ()  # one for each of `bad`
    pooled: dict[int, bytes] = {}  # by row with POOL, f32[H]: the last hidden state or their sum


class WorkerInfo(Struct, frozen=True):
    """What a started worker can do, and what it took to start it."""

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    device: str
    dtype: str
    weight_bytes: int
    kv_bytes: int
    notes: tuple[str, ...] = ()  # choices made and their reasons, one line each
    timings: tuple[tuple[str, float], ...] = ()  # (phase, seconds) of the start
    depth: int = 1  # steps in flight that keep the device busy
    lookahead: int = 0  # unknown tokens that a sequence may run ahead


# core -> API process


class TraceEvent(Struct, frozen=True, array_like=True):
    """Something that befell a sequence; `engine/trace.py` writes them.

    kind       values                                                        text
    queue      first seen by a plan; seconds behind others, then lacking     -
               sequences, pages, budget; the same three for those ahead
    prefix     tokens found, tokens that could be; then of a miss: first     hit, new, evicted,
               differing block, tokens that would have hit, age in seconds   salt, adapter, ...
    chunk      first token, tokens, when it landed, number of the step       -
    preempted  -                                                             pages, recovery

    `who` and `tenant` are the sequence that was the cause, and whose it was.
    """

    kind: str
    at: float
    values: tuple[float, ...] = ()
    text: str = ""
    who: str = ""
    tenant: str = ""


class SequenceOutput(Struct, frozen=True, array_like=True):
    """News of one sequence. `reason` is set once, on the last one."""

    id: str
    new_ids: list[int]
    reason: FinishReason | None = None
    stop_id: int | None = None  # the token that ended it, if one did; it is the last of new_ids
    logprobs: list[TokenLogprobs] | None = None  # one a new id
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # one a prompt token, None at first
    num_cached: int = 0  # prompt tokens found in the prefix cache, on the first output
    scheduled_at: float = 0.0  # when it first left the queue
    preemptions: int = 0
    error: str = ""  # with reason "error"
    trace: tuple[TraceEvent, ...] = ()  # since the last output that had some
    pooled: bytes = b""  # f32[H], with the first token of a sequence that pools


class StepStats(Struct, frozen=True, array_like=True):
    """State and counts after a step; counts are of this step alone."""

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0  # owned by a sequence; cached blocks without an owner do not count
    blocks_cached: int = 0
    blocks_total: int = 0
    prompt_tokens: int = 0  # computed in this step
    sampled_tokens: int = 0
    prefix_queries: int = 0  # in tokens
    prefix_hits: int = 0
    preemptions: int = 0
    recoveries: int = 0
    queued_tokens: int = 0  # prompt tokens of waiting sequences
    step_ms: float = 0.0


class StepOutputs(Struct, frozen=True, array_like=True, tag="outputs"):
    """All news of one step, for all requests together."""

    outputs: list[SequenceOutput]
    stats: StepStats


class Ready(Struct, frozen=True, array_like=True, tag="ready"):
    """The core has loaded its model and takes requests."""

    info: WorkerInfo


class Progress(Struct, frozen=True, array_like=True, tag="progress"):
    """Sent twice a second: proof of life and of movement."""

    at: float
    phase: str  # "loading", "idle", "running", "draining"
    last_step: float  # when a step last ended
    pending: int  # requests not finished
    detail: str = ""  # while loading: what is being done
    allowed: float = 0.0  # seconds that the step under way may take because of its size


class ControlReply(Struct, frozen=True, array_like=True, tag="reply"):
    """Answer to a Control of the same id."""

    id: int
    result: dict[str, str] = {}
    error: str = ""


class Died(Struct, frozen=True, array_like=True, tag="died"):
    """The core cannot go on; `error` is for the operator, and `kind` names the exception."""

    error: str
    kind: str


FromCore: TypeAlias = StepOutputs | Ready | Progress | ControlReply | Died
