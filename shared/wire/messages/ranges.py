"""The protocol version, and the range of each number and name in a message."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

PROTOCOL_MAJOR = 3
PROTOCOL_MINOR = 18
POOLING_MINOR = 1  # the first with pooling
CONVERTED_MINOR = 2  # the first with all conversions of Convert, not to ids alone
REPORT_MINOR = 2  # the first with Inquire and ServiceReport
CELLS_MINOR = 3  # the first with several schedulers, each with its own workers
OPTIONS_MINOR = 6  # the first with RequestOptions
GROUPS_MINOR = 7  # the first with groups of layers
STATES_MINOR = 8  # the first with states of layers
ADAPTERS_MINOR = 9  # the first with adapters
MEDIA_MINOR = 10  # the first with images
STORES_MINOR = 11  # the first with stores of KV blocks
MOVES_MINOR = 12  # the first with KV blocks that move between workers
GUESTS_MINOR = 13  # the first with KV blocks that move between cells
VIDEO_MINOR = 14  # the first with videos
STORED_STATES_MINOR = 14  # the first with stores of states
STORED_WINDOWS_MINOR = 15  # the first with stores of layers with windows
MOVED_POINTS_MINOR = 16  # the first with moves of layers with windows or states
ENCODERS_MINOR = 17  # the first with workers that encode images for others
DISK_STORES_MINOR = 18  # the first with stores on a disk below stores in memory

ServiceName = Literal["gateway", "tokenizer", "scheduler", "worker"]
FinishReason = Literal["stop", "length", "abort", "repetition"]
PromptKind = Literal["text", "ids", "chat", "pair"]
ConvertedTo = Literal["ids", "text", "offsets", "tokenizer"]
Runner = Literal["", "generate", "pooling"]
PoolingType = Literal["last", "mean", "cls"]
Activation = Literal["none", "normalize", "sigmoid", "softmax"]

# Unread output a sequence may have, in tokens and bytes; see Credit.
WINDOW_TOKENS = 256
WINDOW_BYTES = 4 << 20
MAX_STOP_IDS = 128  # of a request
MAX_LOGPROB_IDS = 128
MAX_PATTERN_SIZE = 512  # tokens of a repeated pattern
MAX_PATTERN_COUNT = 512
# Bounds of Capacity: a scheduler has state for each unit.
MAX_BLOCKS = 1 << 24
MAX_BLOCK_SIZE = 256
MAX_SEQS = 1 << 16
MAX_STATES = 8 * MAX_SEQS
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
REPETITION_DETECTED = "repetition_detected"  # vLLM's name
ALL_TOKENS = -1  # as SamplingParams.logprobs: the whole vocabulary
MIN_LOGPROB = -9999.0  # of an impossible token, as in vLLM: JSON has no infinity
MAX_REASON_CHARS = 4000
MAX_NAME_CHARS = 256
MAX_JSON_CHARS = 256 << 10  # of tools, documents, template arguments and a template, each
MAX_FORMAT_CHARS = 256 << 10  # of a schema, an expression or a grammar of a client
MAX_GRAMMAR_CHARS = 512 << 10  # of the grammar made of it
MAX_TOOLS = 512
MAX_LEFT_OUT = 8  # schema keywords reported to a client
TOOL_NAME = r"[a-zA-Z0-9_.-]{1,128}"
MAX_MARKER_IDS = 64
MAX_POOLED_SIZE = 1 << 16  # values per prompt
MAX_LABELS = 4096
MAX_STAGES = 64  # of a worker
MAX_GROUPS = 16  # of layers
MAX_STATS = 64  # of a service in a ServiceReport
MAX_SETTINGS = 256  # of a rank
MAX_REPORTED_PEERS = 65_536
MAX_SPANS = 256  # of a report
MAX_TRACED = 16  # traced prompts of a request, and traced choices of a prompt
MAX_CELLS = 256  # overviews in a tokenizer's heartbeat
MAX_ADAPTERS = 1024  # of a mesh

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
AdapterDigest = Annotated[str, Meta(pattern="^([0-9a-f]{32})?$")]  # empty: the model itself
EMPTY_ROW = msgspec.Raw(b"\x90")  # all fields have their defaults
SpanValue = bool | int | float | Name


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part of a message; never sent alone."""
