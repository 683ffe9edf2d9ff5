"""Distribution of a model's tokens over its experts."""

from collections.abc import Iterator

import numpy as np
import torch
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from services.worker.layers.experts import Experts
from services.worker.models.decoder import DecoderLM
from shared.errors import ConfigError

BOUNDS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)  # of loads
MIN_TOKENS = 100  # per expert, on average: fewer are too noisy
MAX_GROUPS = 8  # of the trunk's layers
MTP_LAYERS = "mtp"


class ExpertLoads(Collector):
    """Counts the tokens of each of ``model``'s experts on ``device``.

    An expert's load is its share of its layer's tokens times the number of experts. Each scrape
    observes the loads of a layer over all tokens since its last observation, unless these are too
    few: then they count at a later scrape. Raises ConfigError if the model has no experts.
    """

    def __init__(self, model: DecoderLM, device: torch.device) -> None:
        layers = {
            path: module for path, module in model.named_modules() if isinstance(module, Experts)
        }
        if not layers:
            raise ConfigError("enable-expert-distribution-metrics: the model has no experts")
        num_experts = max(each.gate.num_experts for each in layers.values())
        self._counts = torch.zeros(len(layers), num_experts, dtype=torch.int64, device=device)
        for experts, counts in zip(layers.values(), self._counts, strict=True):
            experts.counts = counts
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._before = np.zeros(self._counts.shape, np.int64)
        self._groups = list(_groups(list(layers)))
        self._names = list(dict.fromkeys(self._groups))
        self._buckets = {name: np.zeros(len(BOUNDS) + 1, np.int64) for name in self._names}
        self._sums = dict.fromkeys(self._names, 0.0)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        self._observe()
        family = HistogramMetricFamily(
            "shoal_expert_load",
            "Tokens of an expert, over the mean of its layer's experts",
            labels=["layers"],
        )
        bounds = [*map(str, BOUNDS), "+Inf"]
        for name in self._names:
            totals = self._buckets[name].cumsum().tolist()
            family.add_metric([name], list(zip(bounds, totals, strict=True)), self._sums[name])
        yield family

    def _observe(self) -> None:
        counts = self._read()
        for layer, name in enumerate(self._groups):
            since = counts[layer] - self._before[layer]
            if (mean := since.mean()) < MIN_TOKENS:
                continue
            loads = since / mean
            places = np.searchsorted(BOUNDS, loads)
            self._buckets[name] += np.bincount(places, minlength=len(BOUNDS) + 1)
            self._sums[name] += float(loads.sum())
            self._before[layer] = counts[layer]

    def _read(self) -> np.ndarray:
        if self._stream is None:
            return self._counts.numpy().copy()
        with torch.cuda.stream(self._stream):  # does not wait for steps
            return self._counts.cpu().numpy()


def _groups(paths: list[str]) -> Iterator[str]:
    """The name of each layer's group: consecutive layers of the trunk, as 3-10, or the MTP head."""
    numbers = [int(path.split(".")[2]) for path in paths if path.startswith("model.layers.")]
    for group in np.array_split(numbers, min(MAX_GROUPS, len(numbers))):
        name = f"{group[0]}-{group[-1]}" if len(group) > 1 else f"{group[0]}"
        yield from [name] * len(group)
    yield from [MTP_LAYERS] * (len(paths) - len(numbers))
