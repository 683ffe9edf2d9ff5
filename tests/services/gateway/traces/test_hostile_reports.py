"""Reports of services that lie: a trace stays a tree, and nothing breaks."""

from services.gateway.mesh.mesh import Mesh
from services.gateway.mesh.observer import RequestObserver
from services.gateway.traces.context import trace_context
from services.gateway.traces.objects import SpanObject, spans_of
from services.gateway.traces.store import TraceStore
from shared.errors import CodecError
from shared.wire.codec import Array, decode
from shared.wire.messages import Deltas, Message
from tests.mesh.gateway_arena import GatewayArena
from tests.mesh.hostile import odd_versions


class TracedArena(GatewayArena):
    """Its open prompt is traced."""

    def observer_in(self, mesh: Mesh) -> RequestObserver:
        self._store = TraceStore("g", 1 << 16, 60.0)
        self._trace = self._store.trace(trace_context(None), "/v1/completions")
        mesh.on_report = self._store.add
        return self._trace

    async def spans(self, index: int, message: Message, arrays: list[Array]) -> list[SpanObject]:
        await self.take(index, message, arrays)
        kept = self._store.end(self._trace)
        assert kept is not None
        return spans_of(kept)


async def test_whatever_a_report_says_each_span_has_a_parent() -> None:
    arena = TracedArena()
    ((index, message, arrays),) = (
        (index, *example)
        for index, example in enumerate(arena.examples)
        if isinstance(example[0], Deltas)
    )
    assert len(await arena.spans(index, message, arrays)) > 3
    for odd in odd_versions(message, arrays):
        try:
            decoded = decode(odd.frames)
        except CodecError:
            continue
        spans = await arena.spans(index, *decoded)
        assert {span.parent for span in spans} <= {None, *(span.id for span in spans)}, odd.name
