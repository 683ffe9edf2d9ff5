"""The versions of the protocol, and the range of each number and name in a message."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

PROTOCOL_MAJOR = 3
PROTOCOL_MINOR = 6
POOLING_MINOR = 1  # that knows of pooling
CONVERTED_MINOR = 2  # that makes of a prompt what Convert asks for, not its ids alone
REPORT_MINOR = 2  # that knows of Inquire and ServiceReport
CELLS_MINOR = 3  # that knows of several schedulers, each with workers of its own
OPTIONS_MINOR = 6  # that knows of RequestOptions

ServiceName = Literal["gateway", "tokenizer", "scheduler", "worker"]
FinishReason = Literal["stop", "length", "abort", "repetition"]
PromptKind = Literal["text", "ids", "chat", "pair"]
ConvertedTo = Literal["ids", "text", "offsets", "tokenizer"]
Runner = Literal["", "generate", "pooling"]
PoolingType = Literal["last", "mean", "cls"]
Activation = Literal["none", "normalize", "sigmoid", "softmax"]

# What a sequence may emit beyond what its client has taken; see Credit.
WINDOW_TOKENS = 256
WINDOW_BYTES = 4 << 20
MAX_STOP_IDS = 128  # of a request
MAX_LOGPROB_IDS = 128
MAX_PATTERN_SIZE = 512  # tokens that are looked for as a repetition
MAX_PATTERN_COUNT = 512
# Bounds of Capacity: a scheduler keeps something for each of these.
MAX_BLOCKS = 1 << 24
MAX_BLOCK_SIZE = 256
MAX_SEQS = 1 << 16
MAX_BATCHED_TOKENS = 1 << 20
MAX_MODEL_LEN = 1 << 24
MAX_VOCAB_SIZE = 1 << 24
MAX_SPECULATIVE_TOKENS = 16
MAX_STEPS = 1 << 10  # of a plan
MAX_STALL_S = 86_400.0
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1000
MAX_BAD_WORDS = 128
MAX_CHOICES = 4096
MAX_PRIORITY = 1000  # of a request, early and late
REPETITION_DETECTED = "repetition_detected"  # vLLM's word
ALL_TOKENS = -1  # as SamplingParams.logprobs: the whole vocabulary
MIN_LOGPROB = -9999.0  # of a token that cannot be sampled: JSON has no infinity; vLLM's is the same
MAX_REASON_CHARS = 4000
MAX_NAME_CHARS = 256
MAX_JSON_CHARS = 256 << 10  # of tools, documents, template arguments and a template, each
MAX_FORMAT_CHARS = 256 << 10  # of a schema, an expression or a grammar of a client
MAX_GRAMMAR_CHARS = 512 << 10  # of what becomes of it
MAX_TOOLS = 512
MAX_LEFT_OUT = 8  # places that are named to a client
TOOL_NAME = r"[a-zA-Z0-9_.-]{1,128}"
MAX_MARKER_IDS = 64
MAX_POOLED_SIZE = 1 << 16  # numbers that a model gives of a text
MAX_LABELS = 4096
MAX_STAGES = 64  # of a worker
MAX_STATS = 64  # of a service in a ServiceReport
MAX_SETTINGS = 256  # of a rank
MAX_REPORTED_PEERS = 65_536
MAX_SPANS = 256  # of a report
MAX_TRACED = 16  # prompts of a request, and choices of a prompt, that are traced
MAX_CELLS = 256  # schedulers that a tokenizer speaks of

Int32 = Annotated[int, Meta(ge=0, le=2**31 - 1)]  # a count, an index or an id
Int64 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
NumSteps = Annotated[int, Meta(ge=1, le=MAX_STEPS)]
NumLogprobs = Annotated[int, Meta(ge=ALL_TOKENS, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-1e3, le=1e3)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Share = Annotated[float, Meta(ge=0, le=1)]
NumSigmas = Annotated[float, Meta(ge=0, le=1e3)]  # 0: no filter
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Reason = Annotated[str, Meta(max_length=MAX_REASON_CHARS)]
Json = Annotated[str, Meta(max_length=MAX_JSON_CHARS)]
PooledSize = Annotated[int, Meta(ge=0, le=MAX_POOLED_SIZE)]
NumStages = Annotated[int, Meta(ge=1, le=MAX_STAGES)]
EMPTY_ROW = msgspec.Raw(b"\x90")  # all fields have their defaults
SpanValue = bool | int | float | Name


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part of a message; never sent alone."""
