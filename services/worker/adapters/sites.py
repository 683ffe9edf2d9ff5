"""The products of a model that adapters change, and the layers of checkpoints in them."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from services.worker.layers.experts import Experts
from services.worker.layers.linear import Linear
from services.worker.layers.parallel import Rows, Shard
from services.worker.models.decoder import DecoderLM


class Part(NamedTuple):
    """A layer of a checkpoint, [outputs.total, inputs.total], in a product: ``outputs`` are its
    rows there, from output ``first`` of the product on, and ``inputs`` its columns."""

    first: int
    outputs: Shard | Rows
    inputs: Shard


class Site(NamedTuple):
    """A product, and its layers by their full names in a checkpoint. Several products may have rows
    of one layer."""

    linear: Linear
    parts: Mapping[str, Part]


class LowRank(NamedTuple):
    """B A, the change of a whole layer: a [rank, inputs] and b [outputs, rank], with the adapter's
    scale in b. Both have the model's type."""

    a: Tensor
    b: Tensor


class LoadedAdapter(NamedTuple):
    """The changes of layers by their full names in a checkpoint. ``digest``: of all the bytes they
    were made from."""

    digest: str
    rank: int
    num_bytes: int
    layers: Mapping[str, LowRank]


def find_sites(model: DecoderLM) -> list[Site]:
    """The products of the trunk, without those of routed experts."""
    experts = [each for each in model.modules() if isinstance(each, Experts)]
    routed = {linear for each in experts for linear in each.modules()}
    layers = model.model.layers
    return [
        Site(linear, _parts(f"model.layers.{path}", linear))
        for path, linear in layers.named_modules()
        if isinstance(linear, Linear) and linear not in routed and not linear.is_empty
    ]


def _parts(path: str, linear: Linear) -> dict[str, Part]:
    parent, _, own = path.rpartition(".")
    parts, first = {}, 0
    for (name, outputs), size in zip(linear.parts.items(), linear.sizes, strict=True):
        parts[f"{parent}.{name or own}"] = Part(first, outputs, linear.input_shard)
        first += size
    return parts


def layer_shapes(sites: list[Site]) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of each whole layer that an adapter may change."""
    return {
        name: (part.outputs.total, part.inputs.total)
        for site in sites
        for name, part in site.parts.items()
    }
