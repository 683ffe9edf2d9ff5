"""Metrics of the whole mesh, as its schedulers report it to the tokenizers we are connected to."""

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.gateway.mesh.mesh import Mesh
from shared.messages import Overview


class MeshMetrics(Collector):
    """Figures of the whole mesh, the same on every gateway, read from the last heartbeats whenever
    the metrics are asked for. Up to two seconds old.

    Where no scheduler is known, those that only a scheduler knows are absent: a 0 would say that
    the mesh idles.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def describe(self) -> list[Metric]:
        """Claims no names: a scheduler has some of them too, and tests run both in one process."""
        return []

    def collect(self) -> Iterator[Metric]:
        tokenizers = self._mesh.tokenizers
        overviews = {
            peer.status.overview.scheduler: peer.status.overview
            for peer in tokenizers
            if peer.status.overview is not None
        }
        yield _replicas(len(tokenizers), list(overviews.values()))
        if overviews:
            yield from _load(self._mesh.model.names[0], list(overviews.values()))


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
