"""The adapters that a gateway's tokenizers have, by the names of clients."""

from collections.abc import Callable, Sequence

from msgspec.structs import replace
from prometheus_client import Gauge

from services.gateway.http.violations import unknown_model
from services.gateway.mesh.tokenizers import Tokenizers
from shared.adapters.joined import digests, join, served
from shared.errors import ADAPTER_LOST, RETRY_AFTER_S, RequestError, Unavailable
from shared.link.peer import Peer
from shared.wire.envelope import RequestOptions
from shared.wire.messages import Adapter, ModelInfo

ADAPTERS = Gauge("shoal_adapters", "Adapters of the mesh, by name and bytes", ["state"])
CONFLICTS = Gauge(
    "shoal_adapter_conflicts", "Names whose adapters differ between workers; one of them is served"
)


class KnownAdapters:
    """Knows the list of each tokenizer. A request keeps the adapter that its name stood for when it
    came, and goes to tokenizers that have it. ``on_change`` is called after a change."""

    def __init__(self, tokenizers: Tokenizers, on_change: Callable[[], None]) -> None:
        self.all: list[Adapter] = []
        self.by_name: dict[str, Adapter] = {}
        self._tokenizers = tokenizers
        self._on_change = on_change
        self._lists: dict[Peer, list[Adapter]] = {}
        self._digests: dict[Peer, set[str]] = {}
        tokenizers.objections.append(self._objection)

    def note(self, tokenizer: Peer, adapters: list[Adapter]) -> None:
        self._lists[tokenizer], self._digests[tokenizer] = adapters, digests(adapters)
        self._update()

    def forget(self, tokenizer: Peer) -> None:
        self._digests.pop(tokenizer, None)
        if self._lists.pop(tokenizer, None) is not None:
            self._update()

    # --- requests -------------------------------------------------------------------------------

    def names(self, model: ModelInfo) -> Sequence[str]:
        """A model that pools has none."""
        return () if model.pooling is not None else [*self.by_name]

    def with_variant(self, options: RequestOptions, name: str) -> RequestOptions:
        model = self._tokenizers.model
        if name in model.names:
            return options
        base, _, variant = name.partition(":")
        found = self.by_name.get(name)
        if found is None and base in model.names:
            found = self.by_name.get(variant)
        if found is None:
            raise unknown_model(name, [*model.names, *self.by_name])
        return replace(options, adapter=found.digest)

    def _objection(self, tokenizer: Peer, options: RequestOptions) -> RequestError | None:
        if not options.adapter or options.adapter in self._digests.get(tokenizer, ()):
            return None
        return Unavailable(
            f"no connected tokenizer knows a worker with the adapter {options.adapter}",
            code=ADAPTER_LOST,
            retry_after_s=RETRY_AFTER_S,
        )

    # --- private --------------------------------------------------------------------------------

    def _update(self) -> None:
        self.all = join(self._lists.values())
        self.by_name = served(self.all)
        num_refused = sum(bool(each.problem) for each in self.all)
        num_retired = sum(each.is_retired and not each.problem for each in self.all)
        num_other = len(self.all) - num_refused - num_retired
        for state, num in (
            ("served", len(self.by_name)),
            ("retired", num_retired),
            ("refused", num_refused),
        ):
            ADAPTERS.labels(state).set(num)
        CONFLICTS.set(num_other - len(self.by_name))
        self._on_change()
