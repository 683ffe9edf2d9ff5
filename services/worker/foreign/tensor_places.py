"""The place of each tensor of a quantized checkpoint in a model of transformers."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.pytorch_utils import Conv1D

from services.worker.foreign.coded import has_plain_experts
from services.worker.weights.check_tensors import CACHE_SCALES
from services.worker.weights.checkpoint import Checkpoint, StoredTensor
from services.worker.weights.load import find_layer
from services.worker.weights.schemes.scheme import Scheme, StoredCodes
from shared.errors import ConfigError

# Parts that transformers does not compute, and does not always name as such.
DRAFTING = re.compile(r"(^|\.)mtp(_|\.)")
UNUSED = ("rotary_emb.inv_freq", *CACHE_SCALES)
LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")
# The parameters of experts, and the operations and dimensions that make them of a checkpoint's.
STACKS: dict[str, list[tuple[type, int]]] = {
    "gate_up_proj": [(MergeModulelist, 0), (Concatenate, 1)],
    "down_proj": [(MergeModulelist, 0)],
}
Stored = StoredTensor | StoredCodes


@dataclass
class Places:
    """``linears`` by their paths in the model; ``experts`` by their parameter in the model, with
    the layers of each source pattern in the experts' order; and ``others`` by their names in the
    checkpoint."""

    linears: dict[str, StoredCodes] = field(default_factory=dict)
    experts: dict[str, dict[str, list[StoredCodes]]] = field(default_factory=dict)
    others: dict[str, Stored] = field(default_factory=dict)

    @property
    def mixtures(self) -> list[str]:
        """The paths of modules with experts in codes."""
        return sorted({target.rpartition(".")[0] for target in self.experts})


def find_places(checkpoint: Checkpoint, scheme: Scheme, model: Any) -> Places:
    """``model`` has no memory. Raises ConfigError for a tensor that the architecture does not have,
    or has in another shape."""
    return _Search(checkpoint, scheme, model).run()


class _Search:
    def __init__(self, checkpoint: Checkpoint, scheme: Scheme, model: Any) -> None:
        self._checkpoint, self._scheme, self._model = checkpoint, scheme, model
        self._wanted: dict[str, Tensor] = model.state_dict()
        mapping = get_model_conversion_mapping(model)
        self._renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        self._converters = [each for each in mapping if isinstance(each, WeightConverter)]
        self._by_pattern = {
            pattern: converter
            for converter in self._converters
            for pattern in converter.source_patterns
        }
        self._places = Places()
        self._counts: Counter[tuple[str, str]] = Counter()  # of targets and patterns
        self._unused = [re.compile(each) for each in model._keys_to_ignore_on_load_unexpected or ()]

    def run(self) -> Places:
        for name, stored in sorted(self._stored(), key=lambda each: _natural(each[0])):
            self._place(name, stored)
        self._check_counts()
        for path in self._places.mixtures:
            self._check_experts(path)
        return self._places

    def _place(self, name: str, stored: Stored) -> None:
        places, prefix = self._places, self._model.base_model_prefix
        target, pattern = rename_source_key(
            name, self._renamings, self._converters, prefix, self._wanted
        )
        if target not in self._wanted and name in self._wanted:
            target, pattern = name, None
        if pattern is not None:
            self._counts[target, pattern] += 1
        if target not in self._wanted:
            self._check_unused(target, stored)
        elif isinstance(stored, StoredTensor):
            _check_floats(stored, self._wanted[target])
            places.others[name] = stored
        elif pattern is None and self._is_linear(target):
            self._check_shape(stored, self._wanted[target].shape)
            places.linears[target.removesuffix(".weight")] = stored
        elif pattern is not None and self._is_of_experts(target, pattern):
            patterns = self._by_pattern[pattern].source_patterns
            parts = places.experts.setdefault(target, {each: [] for each in patterns})
            parts[pattern].append(stored)
        else:
            self._check_direction(stored, target)
            places.others[name] = stored

    def _stored(self) -> Iterator[tuple[str, Stored]]:
        """Layers in codes, by the name that their weight would have, and all other tensors."""
        tensors = self._checkpoint.tensors
        used: set[str] = set()
        ends = [f".{suffix}" for suffix in self._scheme.suffixes]
        for layer in {
            name.removesuffix(end) for name in tensors for end in ends if name.endswith(end)
        }:
            found = find_layer(self._checkpoint, f"{layer}.weight", self._scheme)
            if isinstance(found, StoredCodes):
                used |= {each.name for each in found.tensors.values()}
                yield f"{layer}.weight", found
        yield from ((name, each) for name, each in tensors.items() if name not in used)

    def _check_unused(self, target: str, stored: Stored) -> None:
        """Raises ConfigError unless the tensor is known to be of no use: of drafts, or scales of
        keys and values."""
        config = self._model.config.get_text_config()
        num_drafting = getattr(config, "num_nextn_predict_layers", None) or 0
        first: int = config.num_hidden_layers
        drafting = range(first, first + num_drafting)
        layer = LAYER.search(target)
        is_unused = (
            target.endswith(UNUSED)
            or DRAFTING.search(target)
            or (layer is not None and int(layer[2]) in drafting)
            or any(pattern.search(target) for pattern in self._unused)
            or (isinstance(stored, StoredTensor) and self._scheme.ignores(stored))
        )
        if not is_unused:
            name = stored.name if isinstance(stored, StoredTensor) else stored.layer
            raise ConfigError(f"model: {stored.file}: the architecture has no tensor {name}")

    def _is_linear(self, target: str) -> bool:
        """The head is none of them: it is computed in float32."""
        path, _, own = target.rpartition(".")
        module = self._model.get_submodule(path)
        is_head = module is self._model.get_output_embeddings()
        return own == "weight" and type(module) is nn.Linear and not is_head

    def _check_direction(self, stored: StoredCodes, target: str) -> None:
        path, _, _ = target.rpartition(".")
        if isinstance(self._model.get_submodule(path), Conv1D):
            raise ConfigError(
                f"model: {stored.file}: layer {stored.layer} is quantised; transformers keeps it"
                " transposed (Conv1D), which is not supported"
            )

    def _is_of_experts(self, target: str, pattern: str) -> bool:
        path, _, own = target.rpartition(".")
        operations = self._by_pattern[pattern].operations
        if STACKS.get(own) != [(type(each), getattr(each, "dim", None)) for each in operations]:
            return False
        module = self._model.get_submodule(path)
        names = [name for name, _ in module.named_parameters()]
        return sorted(names) == sorted(STACKS) and has_plain_experts(module)

    def _check_counts(self) -> None:
        """Raises ConfigError if experts are missing."""
        for (target, pattern), count in self._counts.items():
            is_stack = isinstance(self._by_pattern[pattern].operations[0], MergeModulelist)
            num = len(self._wanted[target]) if is_stack and target in self._wanted else count
            if count != num:
                raise ConfigError(
                    f"model: {self._checkpoint.folder} has {count} tensors {pattern} for {target};"
                    f" the architecture has {num}"
                )

    def _check_experts(self, path: str) -> None:
        """Experts that are not all in codes become values. Raises ConfigError for another shape."""
        places = self._places
        found = {name: places.experts.get(f"{path}.{name}", {}) for name in STACKS}
        is_whole = True
        for name, patterns in found.items():
            num, outputs, inputs = self._wanted[f"{path}.{name}"].shape
            lengths = {len(layers) for layers in patterns.values()}
            is_whole = is_whole and lengths == {num}
            for stored in (each for layers in patterns.values() for each in layers):
                self._check_shape(stored, [outputs // len(patterns), inputs])
        if not is_whole:
            for name, patterns in found.items():
                places.experts.pop(f"{path}.{name}", None)
                layers = [each for layers in patterns.values() for each in layers]
                places.others |= {f"{each.layer}.weight": each for each in layers}

    def _check_shape(self, stored: StoredCodes, shape: Sequence[int]) -> None:
        if stored.shape != list(shape):
            raise ConfigError(
                f"model: {stored.file}: {stored.label} {stored.shape};"
                f" the architecture has {list(shape)} of floats"
            )


def _natural(name: str) -> str:
    """Sorts names by their numbers, as transformers does."""
    return re.sub(r"\d+", lambda digits: digits[0].zfill(9), name)


def _check_floats(stored: StoredTensor, wanted: Tensor) -> None:
    if wanted.is_floating_point() and not stored.is_dense:
        raise ConfigError(
            f"model: {stored.file}: {stored.label} {stored.shape}, without scales of its own;"
            f" the architecture has {list(wanted.shape)} of floats"
        )
