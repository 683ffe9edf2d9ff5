"""The parts of a model that adapters change, and the layers of checkpoints in them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
from torch import Tensor, nn

from kernels.cpu.adapter import adapter_bytes
from services.worker.layers.embedding import LMHead
from services.worker.layers.experts import Experts, Router
from services.worker.layers.gated import GatedProducts
from services.worker.layers.linear import Linear
from services.worker.layers.parallel import Rows, Shard, as_shard
from services.worker.models.decoder import DecoderLM
from services.worker.weights.stacked_experts import FAMILIES

FIRSTS = ("gate_up_proj", "up_proj")  # parameters of experts, with gates and without


class Part(NamedTuple):
    """A layer of a checkpoint, [outputs.total, inputs.total], in a product: ``outputs`` are its
    rows there, from output ``first`` of the product on, and ``inputs`` its columns. The inputs of
    a table are ids."""

    first: int
    outputs: Shard | Rows
    inputs: Shard
    is_table: bool = False

    @property
    def is_elsewhere(self) -> bool:
        """Another rank has it."""
        return not self.outputs.num or not self.inputs.num


class Site(NamedTuple):
    """A linear layer, a router, an embedding or an output head, and its layers by their full names
    in a checkpoint. Several may have rows of one layer. Memory is planned for any adapter of the
    ``common`` ones."""

    module: nn.Module
    parts: Mapping[str, Part]
    is_common: bool = True


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


class Layers(NamedTuple):
    """What an adapter may change: (outputs, inputs) of each whole layer by its full name; the names
    of the experts' layers that one tensor may have together, [its experts], by its path and the
    parameter; and the embeddings. ``note`` ends the error for another layer."""

    shapes: Mapping[str, tuple[int, int]]
    stacks: Mapping[str, Mapping[str, Sequence[str]]] = {}
    tables: frozenset[str] = frozenset()
    note: str = ""


def find_sites(model: DecoderLM) -> list[Site]:
    """Those of a layer's experts are adjacent: the router, then gates and downs of each expert in
    turn, also of experts on other ranks."""
    takes_turns = any(
        stacks.takes_turns
        for name in model.config.architectures
        if (stacks := FAMILIES.get(name)) is not None
    )
    mixtures = {
        f"model.layers.{path}": each
        for path, each in model.model.layers.named_modules()
        if isinstance(each, Experts) and not each.of_images
    }
    return [
        *_common_sites(model),
        *(site for path, each in mixtures.items() for site in _of_experts(path, each, takes_turns)),
        *_ends(model),
    ]


def _common_sites(model: DecoderLM) -> list[Site]:
    experts = [each for each in model.modules() if isinstance(each, Experts)]
    routed = {linear for each in experts for linear in each.experts.modules()}
    return [
        Site(linear, _parts(f"model.layers.{path}", linear))
        for path, linear in model.model.layers.named_modules()
        if isinstance(linear, Linear) and linear not in routed and not linear.is_empty
    ]


def _parts(path: str, linear: Linear) -> dict[str, Part]:
    parent, _, own = path.rpartition(".")
    parts, first = {}, 0
    for (name, outputs), size in zip(linear.parts.items(), linear.sizes, strict=True):
        parts[f"{parent}.{name or own}"] = Part(first, outputs, linear.input_shard)
        first += size
    return parts


def _of_experts(path: str, experts: Experts, takes_turns: bool) -> Iterator[Site]:
    gate = experts.gate
    yield Site(gate, _router_parts(path, gate), is_common=False)
    networks = cast(Iterable[GatedProducts], experts.experts)
    for number, each in enumerate(networks):
        own = f"{path}.experts.{number}"
        gates = _parts(f"{own}.gate_up_proj", each.gate_up_proj)
        if len(gates) > 1:
            gates[f"{own}.gate_up_proj"] = _joined([*gates.values()], takes_turns)
        yield Site(each.gate_up_proj, gates, is_common=False)
        yield Site(each.down_proj, _parts(f"{own}.down_proj", each.down_proj), is_common=False)


def _router_parts(path: str, gate: Router) -> dict[str, Part]:
    """None if it does more than multiply."""
    if type(gate).choose is not Router.choose:
        return {}
    pieces = getattr(gate, "checkpoint_pieces", lambda name: {f"{name}.weight": None})("gate")
    name = next(iter(pieces)).removesuffix(".weight")
    outputs, inputs = gate.weight.shape
    return {f"{path}.{name}": Part(0, as_shard(outputs), as_shard(inputs))}


def _joined(parts: Sequence[Part], takes_turns: bool) -> Part:
    """Gates and ups in one tensor, where they may take turns."""
    ids = []
    for number, part in enumerate(parts):
        assert isinstance(part.outputs, Shard)
        start, num, total = part.outputs
        own = np.arange(start, start + num)
        ids.append(own * len(parts) + number if takes_turns else own + number * total)
    total = sum(part.outputs.total for part in parts)
    return Part(0, Rows(np.concatenate(ids), total), parts[0].inputs)


def _ends(model: DecoderLM) -> Iterator[Site]:
    """The embedding, which all ranks change alike, and the output head."""
    table, head = model.model.embed_tokens, model.lm_head
    hidden, vocab = as_shard(table.inputs), as_shard(table.vocab.total)
    parts = {"model.embed_tokens": Part(0, hidden, vocab, is_table=True)}
    yield Site(table, parts, is_common=False)
    if isinstance(head, LMHead):
        parts = {"lm_head": Part(0, head.vocab, as_shard(head.inputs))}
        yield Site(head, parts, is_common=False)


def layer_shapes(sites: Sequence[Site]) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of each whole layer that an adapter may change."""
    return {
        name: (part.outputs.total, part.inputs.total)
        for site in sites
        for name, part in site.parts.items()
    }


def layers_of(sites: Sequence[Site]) -> Layers:
    stacks: dict[str, dict[str, list[str]]] = {}
    for site in sites:
        *_, name = site.parts or ("",)  # the joined part is the last one
        path, is_in, rest = name.partition(".experts.")
        if is_in and not site.is_common and isinstance(site.module, Linear):
            own = rest.rpartition(".")[2]
            parameter = own if own in FIRSTS else "down_proj"
            stacks.setdefault(f"{path}.experts", {}).setdefault(parameter, []).append(name)
    tables = (name for site in sites for name, part in site.parts.items() if part.is_table)
    return Layers(layer_shapes(sites), stacks, frozenset(tables))


def packed_bytes(sites: Sequence[Site], ranks: Mapping[str, int], itemsize: int) -> int:
    """The memory of an adapter with some ``ranks`` of layers, on this rank."""
    return sum(
        adapter_bytes(ranks[name], part.inputs.num, part.outputs.num, itemsize)
        for site in sites
        for name, part in site.parts.items()
        if name in ranks
    )
