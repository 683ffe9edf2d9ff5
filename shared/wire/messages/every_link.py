"""Messages of every link: Hello, heartbeats, the end of a connection, and reports."""

from enum import IntEnum
from typing import Annotated, Literal

from msgspec import Meta

from shared.wire.messages.media import MediumKind
from shared.wire.messages.ranges import (
    MAX_CELLS,
    MAX_GROUPS,
    MAX_LABELS,
    MAX_MODEL_LEN,
    MAX_REPORTED_PEERS,
    MAX_SETTINGS,
    MAX_STATS,
    Activation,
    Int32,
    Int64,
    Name,
    NumSigmas,
    NumStages,
    NumSteps,
    PooledSize,
    PoolingType,
    Reason,
    Row,
    Runner,
    Seconds,
    ServiceName,
    Share,
)


class SamplingDefaults(Row, frozen=True):
    """Defaults of a request: generation_config.json's values, else OpenAI's."""

    temperature: Annotated[float, Meta(ge=0, le=1e3)] = 1.0
    top_k: Int32 = 0
    top_p: Share = 1.0
    min_p: Share = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    top_n_sigma: NumSigmas = 0.0


class PoolingInfo(Row, frozen=True):
    """The output of a pooling model for one text: an embedding of ``size`` values, or the logits of
    ``size`` classes with the names ``labels``.

    ``activation`` is applied unless a request asks for another. An embedding may be cut to one of
    ``dimensions``, or to any number of its first values if it ``is_matryoshka``.
    """

    task: Literal["embed", "classify"]
    pooling_type: PoolingType
    activation: Activation
    size: PooledSize
    labels: Annotated[list[Reason], Meta(max_length=MAX_LABELS)] = []
    is_matryoshka: bool = False
    dimensions: Annotated[list[PooledSize], Meta(max_length=MAX_LABELS)] = []


class ModelInfo(Row, frozen=True):
    """The model served by the mesh; clients see it in ``/v1/models``.

    ``fingerprint`` identifies the weights and the vocabulary: peers with different ones refuse each
    other. A tokenizer sends ``names``, ``defaults``, and ``tool_parser`` and ``reasoning_parser``,
    the model's formats in ``shared/dialects`` (empty: none). A worker sends the fields that change
    its output: the types, the quantization and ``logprobs_mode``. The model generates text if its
    ``runner`` is ``generate``, and has ``pooling`` otherwise.
    """

    names: list[Reason]
    fingerprint: Name
    vocab_size: Int32
    max_model_len: Int32
    created: Int64
    defaults: SamplingDefaults = SamplingDefaults()
    dtype: Name = ""
    load_format: Name = ""
    logprobs_mode: Name = ""
    tool_parser: Name = ""
    reasoning_parser: Name = ""
    quantization: Name = ""  # "none": weights as in the checkpoint
    kv_cache_dtype: Name = ""  # "auto": KV elements of ``dtype``
    activation_dtype: Name = ""  # "auto": inputs of quantized weights of ``dtype``
    runner: Runner = ""
    pooling: PoolingInfo | None = None
    lm_head_quantization: Name = ""  # "none": output head as in the checkpoint
    embedding_quantization: Name = ""  # "none": embeddings as in the checkpoint
    media: list[MediumKind] = []  # that prompts may hold
    more_media: list[MediumKind] = []  # of kinds that peers below their minor do not know

    @property
    def all_media(self) -> tuple[MediumKind, ...]:
        return *self.media, *self.more_media


class Group(Row, frozen=True):
    """Layers of a model with block tables of their own: a token sees its last ``window`` keys, its
    own included, or all of them."""

    window: Annotated[int, Meta(ge=1, le=MAX_MODEL_LEN)] | None = None


EVERY_LAYER = (Group(),)


class Capacity(Row, frozen=True):
    """The sizes of one worker: blocks, slots, tokens per step, vocabulary.

    It makes ``num_speculative_tokens`` drafts per sequence and step, or fewer if it
    ``adapts_depth``. A step that takes longer than ``stall_s`` hangs. A pooling model returns
    ``pooled_size`` values per prompt; 0: it generates text. A plan has at most ``max_num_steps``
    steps. A pipeline of ``num_stages`` computes one plan per stage at a time; no two of these plans
    may share a sequence. A block holds the KV of ``block_size`` tokens in the layers of one of
    ``groups``; all groups draw on the same blocks. Some layers keep a state of each sequence, with
    room for ``num_states`` copies; None: no layer does. Its running sequences have at most
    ``max_adapters`` different adapters. It computes prompts with these ``media``, each item of the
    ``whole_media`` in one step.
    """

    num_blocks: Int32
    block_size: Int32
    max_num_seqs: Int32
    max_num_batched_tokens: Int32
    max_model_len: Int32
    vocab_size: Int32 = 0
    num_speculative_tokens: Int32 = 0
    adapts_depth: bool = False
    stall_s: Seconds = 60.0
    pooled_size: PooledSize = 0
    max_num_steps: NumSteps = 1
    num_stages: NumStages = 1
    groups: Annotated[tuple[Group, ...], Meta(min_length=1, max_length=MAX_GROUPS)] = EVERY_LAYER
    num_states: Int32 | None = None
    max_adapters: Int32 = 0
    media: Annotated[tuple[MediumKind, ...], Meta(max_length=2)] = ()
    more_media: Annotated[tuple[MediumKind, ...], Meta(max_length=2)] = ()  # as in ModelInfo
    whole_media: Annotated[tuple[MediumKind, ...], Meta(max_length=2)] = ()

    @property
    def all_media(self) -> tuple[MediumKind, ...]:
        return *self.media, *self.more_media, *self.whole_media


INSTANCE = r"[A-Za-z0-9._-]{1,32}"  # the name of a process
Instance = Annotated[str, Meta(pattern=f"^{INSTANCE}$")]
Stats = Annotated[dict[Name, int | float | Name], Meta(max_length=MAX_STATS)]


class RankInfo(Row, frozen=True):
    """One rank of a worker; ``rank`` counts from 0. ``settings`` are the settings and other values
    that all ranks must share, by name."""

    rank: Int32
    settings: Annotated[dict[Name, Name], Meta(max_length=MAX_SETTINGS)] = {}


class Hello(Row, tag=1, frozen=True):
    """First message of either side. A tokenizer and a worker send their model, and a worker its
    capacity. A further rank of a worker sends its ``rank`` to the first one.

    Workers that exchange features of images have the same ``layout`` of them.
    ``still_s`` ago the sender last stood still for so long that peers may have dropped it; None:
    never, or its minor is below 5.
    """

    major: Int32
    minor: Int32
    service: ServiceName
    instance: Name
    model: ModelInfo | None = None
    capacity: Capacity | None = None
    rank: RankInfo | None = None
    still_s: Seconds | None = None
    layout: Name = ""


class State(IntEnum):
    """The readiness of a peer. The order has no meaning."""

    NOT_READY = 0
    READY = 1
    DRAINING = 2


class Overview(Row, frozen=True):
    """Figures of a cell: the scheduler ``scheduler`` (an instance) and its workers.

    It has ``num_slots`` for sequences, and ``is_ready`` if a worker takes some. A scheduler that
    ``is_leaving`` hands its sequences over. ``spare`` is the worker to move to a cell with fewer;
    empty: none, or one is moving.
    """

    scheduler: Name
    num_workers: Int64
    num_running: Int64
    num_waiting: Int64
    num_blocks: Int64
    num_free_blocks: Int64
    num_slots: Int64 = 0
    is_leaving: bool = False
    spare: Name = ""
    is_ready: bool = True


class Heartbeat(Row, tag=2, frozen=True):
    """Sent twice a second by the IO thread, and at once when ``state`` changes.

    ``load`` is the number of open requests (worker: sequences). ``num_steps`` counts finished steps
    of the step thread, so that a peer sees progress and not merely life.

    ``sent_s`` is the sender's monotonic clock. ``echo_s`` repeats the receiver's last ``sent_s``,
    and ``held_s`` is the time since the sender received it; both are 0 before its first heartbeat.
    A scheduler sends its ``overview``. A tokenizer passes on its schedulers' overviews, up to a
    second old, the first in ``overview`` and the others in ``more_overviews``.
    """

    state: State
    reason: Reason
    load: Int64
    num_steps: Int64
    sent_s: Seconds = 0.0
    echo_s: Seconds = 0.0
    held_s: Seconds = 0.0
    overview: Overview | None = None
    more_overviews: Annotated[list[Overview], Meta(max_length=MAX_CELLS)] = []

    @property
    def overviews(self) -> list[Overview]:
        return [] if self.overview is None else [self.overview, *self.more_overviews]


class Bye(Row, tag=3, frozen=True):
    """The sender leaves on purpose; nothing follows. A failing service sends no Bye."""

    reason: Reason


class Refused(Row, tag=4, frozen=True):
    """The answer of the process ``instance`` to an unacceptable first message."""

    reason: Reason
    instance: Name = ""


class Inquire(Row, tag=17, frozen=True):
    """A request for the state of the mesh: down the chain, and from a tokenizer up to its other
    gateways. Answered by a ServiceReport. Tokenizers and schedulers pass it on, and the reports
    back. Peers below minor ``REPORT_MINOR`` do not know it."""


Ended = Literal["", "lost", "left"]


class ReportedPeer(Row, frozen=True):
    """A peer as seen by its neighbour: its Hello, its last heartbeat, and ``stats`` of the
    neighbour. ``ended`` within the last half a minute; ``left``: it said Bye."""

    service: ServiceName
    instance: Instance
    minor: Int32
    state: State
    reason: Reason
    load: Int64
    ended: Ended = ""
    round_trip_s: Seconds | None = None
    stats: Stats = {}


class ServiceReport(Row, tag=29, frozen=True):
    """Any service → the sender of Inquire: its state and its peers. ``was_ready``: it was ready
    before, if it is not now."""

    service: ServiceName
    instance: Instance
    state: State
    reason: Reason
    was_ready: bool
    uptime_s: Seconds
    peers: Annotated[list[ReportedPeer], Meta(max_length=MAX_REPORTED_PEERS)]
    stats: Stats
