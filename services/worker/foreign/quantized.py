"""Loads a quantized checkpoint into a model of transformers.

transformers renames and joins the checkpoint's tensors, as it does for dense ones. Layers in codes
are taken out before: linear layers and stacks of experts keep them, and for all other modules the
layer's values, in the model's dtype, stand in the state dict.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from services.worker.foreign.coded import CodedExperts, CodedLinear, stack_experts
from services.worker.foreign.families import find_family, of_texts
from services.worker.foreign.model import ATTENTION
from services.worker.foreign.tensor_places import STACKS, Places, Stored, find_places
from services.worker.layers.weights import Quantized, Weight, are_alike, joined
from services.worker.startup.implementations import errors_as_config_errors
from services.worker.weights.checkpoint import StoredTensor, open_checkpoint
from services.worker.weights.schemes import find_scheme
from services.worker.weights.schemes.scheme import StoredCodes, dense
from shared.errors import ConfigError
from shared.model_folder import weight_files

log = logging.getLogger(__name__)


def load_quantized(
    folder: Path, config: Any, quantization: Mapping[str, Any], dtype: torch.dtype, device: str
) -> PreTrainedModel:
    """The model of ``config`` in host memory, for a ``device`` of this type. Raises ConfigError
    naming a tensor that is missing, damaged, or of no use."""
    scheme = find_scheme(quantization)
    log.info("the weights are quantised already: %s", scheme)
    checkpoint = open_checkpoint(weight_files(folder))
    family, config = find_family(config)
    with errors_as_config_errors(), torch.device("meta"):
        empty: Any = family._from_config(config, dtype=dtype)
    places = find_places(checkpoint, scheme, empty)
    load: Any = _without_codes(family, places).from_pretrained
    model: PreTrainedModel
    with errors_as_config_errors():
        model, info = load(
            None,
            config=config,
            state_dict={name: _Lazy(stored, dtype) for name, stored in places.others.items()},
            dtype=dtype,
            attn_implementation=of_texts(ATTENTION),
            output_loading_info=True,
        )
    check_loaded(info)
    for path, stored in places.linears.items():
        linear: Any = model.get_submodule(path)
        linear.fill(stored.read(dtype))
    for path in places.mixtures:
        parts = [places.experts[f"{path}.{name}"] for name in STACKS]
        _fill_experts(model, path, [_read_experts(each, dtype) for each in parts], device)
    return model


def check_loaded(info: Mapping[str, Any]) -> None:
    """Raises ConfigError unless each parameter was found."""
    if lacking := [*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])]:
        raise ConfigError(f"the folder lacks tensors, or has others: {', '.join(sorted(lacking))}")


class _Lazy:
    """A tensor of a state dict, which is read when transformers takes ``[...]`` of it."""

    def __init__(self, stored: Stored, dtype: torch.dtype) -> None:
        self._stored, self._dtype = stored, dtype

    def __getitem__(self, index: Any) -> Tensor:
        if isinstance(self._stored, StoredTensor):
            return self._stored.read_all()
        return self._stored.read(self._dtype).values.detach()


def _without_codes(family: Any, places: Places) -> Any:
    """``family`` with nothing for transformers to load where the weights are codes."""

    def make(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        family.__init__(self, config, *args, **kwargs)
        for path in places.linears:
            self.set_submodule(path, CodedLinear(self.get_submodule(path)))
        for path in places.mixtures:
            module = self.get_submodule(path)
            module._is_hf_initialized = True
            for name in STACKS:
                module.register_parameter(name, None)

    return type(family.__name__, (family,), {"__init__": make, "__module__": family.__module__})


def _read_experts(parts: Mapping[str, Sequence[StoredCodes]], dtype: torch.dtype) -> list[Weight]:
    """Each expert's weight, in codes if its parts have them in one form."""
    experts: list[Weight] = []
    for layers in zip(*(parts[pattern] for pattern in parts), strict=True):
        found = [layer.read(dtype) for layer in layers]
        coded = [each for each in found if isinstance(each, Quantized)]
        if len(coded) == len(found) and are_alike(coded):
            experts.append(joined(coded) if len(coded) > 1 else coded[0])
        else:
            experts.append(dense(torch.cat([each.values for each in found]), dtype))
    return experts


def _fill_experts(model: Any, path: str, weights: list[list[Weight]], device: str) -> None:
    """Values are put into the module of transformers if codes cannot be used."""
    stacks = [stack for experts in weights if (stack := stack_experts(experts, device))]
    if len(stacks) == len(STACKS):
        model.set_submodule(path, CodedExperts(*stacks))
        return
    module = model.get_submodule(path)
    for name, experts in zip(STACKS, weights, strict=True):
        values = torch.stack([each.values.detach() for each in experts])
        module.register_parameter(name, nn.Parameter(values, requires_grad=False))
