"""The tensors of an adapter's file, by the layers that they change."""

import difflib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from services.worker.adapters.config import AdapterConfig
from services.worker.adapters.sites import Layers
from services.worker.adapters.tensor_file import TensorFile
from services.worker.weights.checkpoint import StoredTensor
from shared.errors import ConfigError

log = logging.getLogger(__name__)

PREFIX = "base_model.model."
TENSOR = re.compile(r"(?P<layer>.+)\.(?P<kind>lora|lora_embedding)_(?P<which>[AB])(\.weight)?")
COPY, BASE = ".base_layer.weight", ".base_layer"
COPY_ROWS = 4096  # compared at a time
HEAD = "lm_head"
JOINED, PARTS = "gate_up_proj", ("gate_proj", "up_proj", "w1", "w3")
RENAMES: tuple[Callable[[str], str], ...] = (
    lambda name: name,
    lambda name: name.replace("model.language_model.", "model.", 1),
    lambda name: name.replace("language_model.", "", 1),
    lambda name: name if name.startswith(HEAD) else f"model.{name}",
    lambda name: name.replace(".mlp.", ".block_sparse_moe.", 1),
)
"""A file's names → the base's; the first that fits all names is taken."""

Shapes = Mapping[str, list[int]]  # by the names of tensors


class Target(NamedTuple):
    """Two tensors of a file by name, ``a`` and ``b``, of its ``layer``, and ``ours``: one layer, or
    the same one of each expert."""

    layer: str
    a: str
    b: str
    ours: Sequence[str]
    rank: int
    scale: float
    sizes: tuple[int, int]  # numbers of a and b


class _Pair(NamedTuple):
    """Names and shapes of A and B."""

    a: str
    b: str
    of_a: list[int]
    of_b: list[int]
    is_embedding: bool


def find_targets(
    shapes: Shapes, layers: Layers, config: AdapterConfig
) -> tuple[dict[str, Target], dict[str, str]]:
    """The target of each tensor; and our layers of copies of the base's weights. Raises
    ConfigError."""
    copies = {name: _layer_of(name).removesuffix(COPY) for name in shapes if name.endswith(COPY)}
    pairs = _find_pairs({name: each for name, each in shapes.items() if name not in copies})
    names = [*pairs, *copies.values()]
    rename = next(
        (each for each in RENAMES if all(_is_known(each(n), layers) for n in names)), None
    )
    if rename is None:
        raise ConfigError(_unknown_layer(names, layers))
    targets: dict[str, Target] = {}
    changed: dict[str, str] = {}
    for layer, pair in pairs.items():
        target = _target(layer, rename(layer), pair, layers, config)
        for each in _with_parts(target.ours):
            if each in changed:
                raise ConfigError(f"tensors {changed[each]} and {pair.a} change the same experts")
            changed[each] = pair.a
        targets |= {pair.a: target, pair.b: target}
    ours = {name: rename(layer) for name, layer in copies.items()}
    _check_ends(shapes, ours, layers, config, {*changed})
    return targets, ours


def _find_pairs(shapes: Shapes) -> dict[str, _Pair]:
    found: dict[str, dict[str, tuple[str, bool]]] = {}
    for name in sorted(shapes):
        match = TENSOR.fullmatch(_layer_of(name))
        if match is None or (match["kind"] == "lora") != name.endswith(".weight"):
            raise ConfigError(f"tensor {name} is not supported; lora_A and lora_B of layers are")
        is_embedding, which = match["kind"] != "lora", match["which"]
        first, _ = found.setdefault(match["layer"], {}).setdefault(which, (name, is_embedding))
        if first != name:
            raise ConfigError(f"tensors {first} and {name} are both A or both B of a layer")
    if not found:
        raise ConfigError("the file of weights has no tensors")
    for layer, pair in found.items():
        if missing := {"A", "B"} - pair.keys():
            raise ConfigError(f"layer {layer} has no lora_{missing.pop()}")
    return {
        layer: _Pair(a, b, shapes[a], shapes[b], is_embedding)
        for layer, pair in found.items()
        for (a, is_embedding), (b, _) in [(pair["A"], pair["B"])]
    }


def _layer_of(name: str) -> str:
    return name.removeprefix(PREFIX)


def _is_known(name: str, layers: Layers) -> bool:
    return name in layers.shapes or name.removesuffix(BASE) in layers.stacks


def _unknown_layer(names: Sequence[str], layers: Layers) -> str:
    def num_known(rename: Callable[[str], str]) -> int:
        return sum(_is_known(rename(name), layers) for name in names)

    rename = max(RENAMES, key=num_known)
    unknown = next(name for name in names if not _is_known(rename(name), layers))
    nearest = difflib.get_close_matches(rename(unknown), layers.shapes, n=1, cutoff=0.0)
    return (
        f"layer {unknown} is not one of the model's that adapters may change; the nearest is"
        f" {nearest[0]}{layers.note}"
    )


def _target(layer: str, ours: str, pair: _Pair, layers: Layers, config: AdapterConfig) -> Target:
    if ours not in layers.shapes:
        return _stack_target(layer, ours.removesuffix(BASE), pair, layers, config)
    if pair.is_embedding != (ours in layers.tables):
        raise ConfigError(f"tensor {pair.a} is not supported for layer {layer}")
    outputs, inputs = layers.shapes[ours]
    rank = config.rank_of(layer)
    for name, shape, expected in (
        (pair.a, pair.of_a, [rank, inputs]),
        (pair.b, pair.of_b, [outputs, rank]),
    ):
        if shape != expected:
            raise ConfigError(f"tensor {_layer_of(name)} is {shape}, expected {expected}")
    sizes = rank * inputs, outputs * rank
    return Target(layer, pair.a, pair.b, [ours], rank, config.scale_of(layer), sizes)


def _stack_target(
    layer: str, path: str, pair: _Pair, layers: Layers, config: AdapterConfig
) -> Target:
    """PEFT nests the parameters of a module, so shapes tell which one it is; of two equal ones the
    inner one is the first."""
    module, wanted, found = layer.removesuffix(BASE), [], []
    stacks = layers.stacks[path].items()
    named = [each for each in stacks if config.is_targeted(f"{module}.{each[0]}")]
    for parameter, experts in named or stacks:
        outputs, inputs = layers.shapes[experts[0]]
        key = f"{module}.{parameter}"
        rank = config.rank_of(key)
        expected = [rank * len(experts), inputs], [outputs, rank * len(experts)]
        if (pair.of_a, pair.of_b) == expected:
            sizes = len(experts) * rank * inputs, len(experts) * rank * outputs
            scale = config.scale_of(key)
            found.append(Target(layer, pair.a, pair.b, experts, rank, scale, sizes))
        wanted.append(f"{expected[0]} and {expected[1]} for {parameter}")
    if not found:
        raise ConfigError(
            f"tensors {_layer_of(pair.a)} and {_layer_of(pair.b)} are {pair.of_a} and {pair.of_b},"
            f" expected {' or '.join(wanted)}"
        )
    return found[0 if layer.endswith(BASE) else -1]


def _with_parts(ours: Sequence[str]) -> Sequence[str]:
    """With the gates and ups that a tensor of both changes."""
    if not ours[0].endswith(f".{JOINED}"):
        return ours
    paths = [name.removesuffix(JOINED) for name in ours]
    return [path + name for path in paths for name in (JOINED, *PARTS)]


def _check_ends(
    shapes: Shapes,
    copies: Mapping[str, str],
    layers: Layers,
    config: AdapterConfig,
    changed: set[str],
) -> None:
    """Copies are of changed embeddings and heads; an adapter of tied ones has both."""
    for name, ours in copies.items():
        is_end = ours in layers.tables or ours == HEAD
        outputs, inputs = layers.shapes.get(ours, (0, 0))
        expected = [inputs, outputs] if ours in layers.tables else [outputs, inputs]
        if not is_end or shapes[name] != expected:
            raise ConfigError(
                f"tensor {name} {shapes[name]} is no copy of the base's embedding or output head"
            )
    if config.ensure_weight_tying and changed & layers.tables and HEAD not in changed:
        raise ConfigError(f"ensure_weight_tying: the file has no tensors of {HEAD}")


def check_copies(
    file: TensorFile, copies: Mapping[str, str], find_base: Callable[[str], StoredTensor | None]
) -> None:
    """Copies are passed over, since they are the base's. Raises ConfigError for another one."""
    for name, ours in copies.items():
        base = find_base(f"{ours}.weight")
        if base is None or not base.is_dense:
            log.info("tensor %s is taken for a copy of the base's, which is not dense", name)
            continue
        first = 0
        for rows in file.rows(name, COPY_ROWS):
            if not torch.equal(rows.to(base.dtype), base.read(0, first, len(rows))):
                raise ConfigError(f"tensor {name} is no copy of the base's: it was trained too")
            first += len(rows)
