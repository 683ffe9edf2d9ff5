"""Messages of every link: Hello, heartbeats, the end of a connection, and reports."""

from enum import IntEnum
from typing import Annotated, Literal

from msgspec import Meta

from shared.wire.messages.ranges import (
    MAX_CELLS,
    MAX_LABELS,
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
    """Used where a request sets no value: generation_config.json's values, else OpenAI's."""

    temperature: Annotated[float, Meta(ge=0, le=1e3)] = 1.0
    top_k: Int32 = 0
    top_p: Share = 1.0
    min_p: Share = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    top_n_sigma: NumSigmas = 0.0


class PoolingInfo(Row, frozen=True):
    """What a model that pools gives of a text: an embedding of ``size`` numbers, or the logits of
    as many classes, which have the names ``labels``.

    ``activation`` is applied to it unless a request wants another. An embedding may be cut to one
    of ``dimensions``, or to any number of its first numbers if it ``is_matryoshka``.
    """

    task: Literal["embed", "classify"]
    pooling_type: PoolingType
    activation: Activation
    size: PooledSize
    labels: Annotated[list[Reason], Meta(max_length=MAX_LABELS)] = []
    is_matryoshka: bool = False
    dimensions: Annotated[list[PooledSize], Meta(max_length=MAX_LABELS)] = []


class ModelInfo(Row, frozen=True):
    """Describes the model that the mesh serves; clients see it in ``/v1/models``.

    ``fingerprint`` identifies the weights and the vocabulary: peers with different ones refuse
    each other. ``names`` and ``defaults`` are a tokenizer's, what is below them a worker's: with
    others it would write other texts. ``tool_parser`` and ``reasoning_parser`` name the formats of
    ``shared/dialects`` in which it calls tools and reasons; empty: it does not. It writes texts if
    its ``runner`` is ``generate``, and has ``pooling`` otherwise.
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
    quantization: Name = ""  # "none": the weights are as in the checkpoint
    kv_cache_dtype: Name = ""  # "auto": the KV cache has numbers of ``dtype``
    activation_dtype: Name = ""  # "auto": so has what quantised weights are multiplied with
    runner: Runner = ""
    pooling: PoolingInfo | None = None
    lm_head_quantization: Name = ""  # "none": the output head's weights are as in the checkpoint
    embedding_quantization: Name = ""  # "none": so are the embeddings


class Capacity(Row, frozen=True):
    """What one worker holds: cache blocks, slots and tokens a step; entries of its logits.

    It drafts up to ``num_speculative_tokens`` of a sequence in a step, always as many unless
    ``adapts_depth``: then as many as pay. A step that has not ended after ``stall_s`` hangs. A
    model that pools gives ``pooled_size`` numbers of a prompt; 0: it writes texts. A plan may ask
    for ``max_num_steps``. It computes as many plans at a time as it has ``num_stages``, as long as
    none has a sequence of another.
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


INSTANCE = r"[A-Za-z0-9._-]{1,32}"  # what a process may be called
Instance = Annotated[str, Meta(pattern=f"^{INSTANCE}$")]
Stats = Annotated[dict[Name, int | float | Name], Meta(max_length=MAX_STATS)]


class RankInfo(Row, frozen=True):
    """One of the processes that are a worker together: ``rank`` counts from 0. ``settings`` are
    those that have to be the same for all, and what else has to be, by name."""

    rank: Int32
    settings: Annotated[dict[Name, Name], Meta(max_length=MAX_SETTINGS)] = {}


class Hello(Row, tag=1, frozen=True):
    """First message of either side. A tokenizer and a worker send their model, a worker its
    capacity too, and to the first rank another one sends what it is.

    ``still_s`` ago the sender stood still for so long that peers may have given it up; None: it
    never has, or its minor is below 5.
    """

    major: Int32
    minor: Int32
    service: ServiceName
    instance: Name
    model: ModelInfo | None = None
    capacity: Capacity | None = None
    rank: RankInfo | None = None
    still_s: Seconds | None = None


class State(IntEnum):
    """What a peer may be asked. The order is of no meaning."""

    NOT_READY = 0
    READY = 1
    DRAINING = 2


class Overview(Row, frozen=True):
    """Figures of a cell: the scheduler ``scheduler`` (an instance) and its workers.

    It has ``num_slots`` for sequences, and ``is_ready`` where a worker takes some. A scheduler that
    ``is_leaving`` hands over what it has. ``spare`` is the worker to go where a cell lacks some;
    empty: none, or one is going.
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

    ``load`` is the number of open requests (worker: sequences); ``num_steps`` counts finished steps
    of the step thread, so that a peer sees progress and not merely life.

    ``sent_s`` is the sender's monotonic clock. ``echo_s`` repeats the receiver's last ``sent_s``,
    and ``held_s`` is how long ago the sender received it; both are 0 before its first heartbeat.
    ``overview`` is a scheduler's; a tokenizer passes on those of its schedulers, up to a second
    old: ``more_overviews`` has all but the first.
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
    """The sender leaves on purpose; nothing follows. A service that breaks sends no Bye."""

    reason: Reason


class Refused(Row, tag=4, frozen=True):
    """The answer to a first message that is no acceptable Hello, by the process ``instance``."""

    reason: Reason
    instance: Name = ""


class Inquire(Row, tag=17, frozen=True):
    """Down the chain, and from a tokenizer up to the gateways that did not ask: somebody looks at
    the mesh. Answered by a ServiceReport. A tokenizer and a scheduler pass it on, and the reports
    that come back. Peers below minor ``REPORT_MINOR`` do not know it."""


Ended = Literal["", "lost", "left"]


class ReportedPeer(Row, frozen=True):
    """A peer as its neighbour knows it: by its Hello and its last heartbeat, and by ``stats`` of
    the neighbour's own. One that has ``ended`` did so up to half a minute ago; ``left``: it said
    Bye."""

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
    """Any service → who asked: how it fares, and which peers it has. ``was_ready``: it was before,
    if it is not now."""

    service: ServiceName
    instance: Instance
    state: State
    reason: Reason
    was_ready: bool
    uptime_s: Seconds
    peers: Annotated[list[ReportedPeer], Meta(max_length=MAX_REPORTED_PEERS)]
    stats: Stats
