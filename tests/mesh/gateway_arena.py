"""A gateway's end of the mesh by itself."""

import asyncio

import numpy as np

from services.gateway.mesh.job import Job, Prompt
from services.gateway.mesh.mesh import Mesh
from services.gateway.mesh.observer import UNOBSERVED, RequestObserver
from services.gateway.mesh.output_collector import OutputCollector
from shared.errors import CodecError
from shared.wire.codec import Array
from shared.wire.envelope import RequestOptions
from shared.wire.messages import (
    Accepted,
    Converted,
    Delta,
    Deltas,
    Failed,
    Finished,
    Heartbeat,
    Lost,
    Mark,
    Message,
    ModelInfo,
    OutputStart,
    ReportedPeer,
    RequestKey,
    RunKind,
    ServiceName,
    ServiceReport,
    SpanReport,
    State,
    Stats,
    Submit,
    TextOptions,
    TokenRun,
    Vocabulary,
)
from tests.mesh.arena_parts import (
    NO_ARRAYS,
    NO_IDS,
    PARAMS,
    PLAIN,
    PROMPT,
    SPANS,
    Example,
    FakePeer,
    Lies,
    connect,
)

OTHER = Job("m", [Prompt("ids", PROMPT)], 1, PLAIN, TextOptions(), RequestOptions(), True, False)


class GatewayArena:
    """An open prompt of two choices, and a tokenizer's messages about it; another tokenizer has
    another prompt."""

    model = ModelInfo(["m"], "f", 100, 64, 1)

    def __init__(self) -> None:
        draft = TokenRun(1, 1, kind=RunKind.DRAFTS, num_accepted=1)
        with_draft = TokenRun(2, 2, 1, num_drafts=1, num_accepted=1)
        rows = [
            Delta("r/0", 1, 0, 0, draft),
            Delta("r/0", 1, 0, 0, with_draft, "ab", 2, [Mark(0, 1, 0, 5)]),
            Delta("r/0", 1, 1, 0, TokenRun(1, 2, 1), "c"),
        ]
        buffers = [
            np.array([5, 5, 6, 7], np.int32),
            np.zeros(1 + 3 * 2, np.float32),
            np.ones(3, np.int32),
            np.ones(4, np.int32),
        ]
        reports = [
            SpanReport("r/0", 1, "tokenizer", "t", SPANS),
            SpanReport("r/0/0", 1, "scheduler", "s", SPANS),
            SpanReport("r/0/0", 1, "worker", "w", SPANS),
        ]
        prompts = [Prompt("ids", PROMPT)]
        self._job = Job("m", prompts, 2, PARAMS, TextOptions(), RequestOptions(), True, False)
        vocabulary: list[np.ndarray] = [np.zeros(100, np.uint8), np.ones(100, np.int32)]
        self.examples: list[Example] = [
            (Accepted("r/0", 1, OutputStart.REASONING, left_out=["f.pattern"]), [PROMPT]),
            (Deltas(rows, [Finished("r/0", 1, 0, "stop", 2, "x", 1)], reports), buffers),
            (Failed("r/0", 1, 503, "t", "c", "m", "prompt", 1.0), []),
            (Lost([RequestKey("r/0", 1)], True, "s", 1), []),
            (Converted("convert-0"), [PROMPT]),
            (Vocabulary(), vocabulary),
            (report("tokenizer", "t", "scheduler"), []),
        ]
        self.lies: Lies = {
            "other lengths than bytes": (5, Vocabulary(), [vocabulary[0], 2 * vocabulary[1]]),
            "an id that the model does not have": (0, Accepted("r/0", 1), [PROMPT + 100]),
        }

    async def take(self, index: int, message: Message, arrays: list[Array]) -> bool:
        mesh, peer, is_good = Mesh(1, 1, 1), connect("tokenizer", self.model), True
        observer = self.observer_in(mesh)
        beside = connect("tokenizer", self.model, name="beside")
        for load, each in enumerate((peer, beside)):
            each.status = Heartbeat(State.READY, "", load, 0)
            mesh.on_up(each)
        with (
            mesh.generate("r", self._job, observer) as collector,
            mesh.generate("other", OTHER) as other,
        ):
            if index:
                mesh.on_message(peer, Accepted("r/0", 1), [PROMPT])
            converting = asyncio.create_task(
                mesh.conversions.convert("", Prompt("text", NO_IDS), True)
            )
            await asyncio.sleep(0)
            try:
                if isinstance(message, ServiceReport):
                    self.show(message)
                else:
                    mesh.on_message(peer, message, arrays)
            except CodecError:
                is_good = False
                mesh.on_down(peer, "a bad message")
            while (update := collector._take()) is not None:
                collector.consumed(update)
            _check_other(mesh, beside, other)
            converting.cancel()
            await asyncio.gather(converting, return_exceptions=True)
        assert not mesh._prompts()
        return is_good

    def observer_in(self, mesh: Mesh) -> RequestObserver:
        return UNOBSERVED

    def show(self, report: ServiceReport) -> None:
        """Nothing here lists services."""

    async def close(self) -> None:
        """Nothing stays open."""


def report(service: ServiceName, instance: str, below: ServiceName) -> ServiceReport:
    peers = [ReportedPeer(below, "b", 2, State.READY, "r", 1, "lost", 0.001, {"load": 1})]
    stats: Stats = {"open": 1, "share": 0.5, "model": "m"}
    return ServiceReport(service, instance, State.NOT_READY, "r", True, 5.0, peers, stats)


def _check_other(mesh: Mesh, beside: FakePeer, collector: OutputCollector) -> None:
    """The request at ``beside`` still gets its output."""
    assert [submit.request for submit, _ in beside.take(Submit)] == ["other/0"]
    ids, finished = np.array([5, 6, 7], np.int32), Finished("other/0", 1, 0, "length", 3)
    mesh.on_message(beside, Accepted("other/0", 1), [PROMPT])
    deltas = Deltas([Delta("other/0", 1, 0, 0, TokenRun(3), "abc", 0)], [finished])
    mesh.on_message(beside, deltas, [ids, *NO_ARRAYS[1:]])
    update = collector._take()
    assert update is not None
    assert (update.text, update.arrays.ids.tolist()) == ("abc", [5, 6, 7])
    assert update.finished == finished
    assert collector.prompt_ids[0] is PROMPT
    assert collector._error is None
