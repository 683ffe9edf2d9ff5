"""Metrics of the whole mesh, which schedulers report to tokenizers and these to gateways."""

from collections.abc import Iterator
from itertools import chain

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.gateway.mesh.tokenizers import Tokenizers
from shared.wire.messages import Overview


class MeshMetrics(Collector):
    """Reads figures of the whole mesh, the same on every gateway, from the last heartbeats whenever
    the metrics are scraped. They are up to two seconds old.

    Without a scheduler, the figures that only schedulers know are absent: a 0 would mean that the
    mesh idles.
    """

    def __init__(self, tokenizers: Tokenizers) -> None:
        self._tokenizers = tokenizers

    def describe(self) -> list[Metric]:
        """Claims no names: a scheduler has some of them too, and tests run both in one process."""
        return []

    def collect(self) -> Iterator[Metric]:
        reported = chain.from_iterable(each.peer.status.overviews for each in self._tokenizers)
        overviews = list({each.scheduler: each for each in reported}.values())
        yield _replicas(len(self._tokenizers), overviews)
        if overviews:
            yield from _load(self._tokenizers.model.names[0], overviews)


def _replicas(num_tokenizers: int, overviews: list[Overview]) -> Metric:
    text = "Connected services, ready or not; tokenizers: to this gateway"
    family = GaugeMetricFamily("shoal_mesh_replicas", text, labels=["service"])
    family.add_metric(["tokenizer"], num_tokenizers)
    family.add_metric(["scheduler"], len(overviews))
    family.add_metric(["worker"], sum(each.num_workers for each in overviews))
    return family


def _load(model: str, overviews: list[Overview]) -> Iterator[Metric]:
    num_blocks = sum(each.num_blocks for each in overviews)
    num_free = sum(each.num_free_blocks for each in overviews)
    figures = {
        "vllm:num_requests_running": (
            "Sequences that have a slot in a worker",
            sum(each.num_running for each in overviews),
        ),
        "vllm:num_requests_waiting": (
            "Sequences that wait for a slot",
            sum(each.num_waiting for each in overviews),
        ),
        "vllm:kv_cache_usage_perc": (
            "Share of all KV blocks in use, 0 to 1",
            1 - num_free / num_blocks if num_blocks else 0.0,
        ),
    }
    for name, (text, value) in figures.items():
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([model], value)
        yield family
