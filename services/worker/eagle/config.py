"""The config.json of an EAGLE-3 head, in its authors' layout or that of speculators."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from services.worker.config.model_config import ModelConfig
from services.worker.models.llama import LlamaForCausalLM
from shared.errors import ConfigError
from shared.model_folder import CONFIG_FILE, decode_json, find_file

LAYER = "transformer_layer_config"  # of speculators


class Nested(msgspec.Struct, frozen=True):
    """NVIDIA's and SGLang's keys: layers by their outputs."""

    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    use_aux_hidden_state: bool = True


class EagleConfig(LlamaForCausalLM.Config, frozen=True):
    """The keys of the layer, and of the head around it."""

    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    fc_norm: bool = False
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    eagle_config: Nested | None = None

    def tapped(self, num_layers: int) -> list[int]:
        """The layers of a trunk of ``num_layers`` with inputs that the head reads."""
        nested = self.eagle_config or Nested()
        if self.eagle_aux_hidden_state_layer_ids:
            found = self.eagle_aux_hidden_state_layer_ids
        elif nested.eagle_aux_hidden_state_layer_ids:
            found = [layer + 1 for layer in nested.eagle_aux_hidden_state_layer_ids]
        else:
            found = [2, num_layers // 2, num_layers - 3]
        return sorted(found)

    def problems_with(self, model: ModelConfig) -> Iterator[str]:
        """The unsupported features of the head, and of its use for ``model``."""
        yield from self.problems()
        if self.num_hidden_layers != 1:
            yield f"num_hidden_layers {self.num_hidden_layers} is not supported; only 1 is"
        for key in ("hidden_size", "vocab_size"):
            own, other = getattr(self, key), getattr(model, key)
            if own != other:
                yield f"{key} {own} is another than the model's, {other}"
        if self.target_hidden_size not in (None, model.hidden_size):
            yield (
                f"target_hidden_size {self.target_hidden_size} is another than the model's"
                f" hidden_size, {model.hidden_size}"
            )
        if not 0 < self.num_drafted <= self.vocab_size:
            yield f"draft_vocab_size {self.num_drafted} is not from 1 to vocab_size"
        if self.fc_norm:
            yield "fc_norm true is not supported"
        if self.quantization_config:
            yield "quantization_config is not supported; the head must be dense"
        if self.eagle_config is not None and not self.eagle_config.use_aux_hidden_state:
            yield "eagle_config.use_aux_hidden_state false is not supported; only EAGLE-3 is"
        tapped, num = self.tapped(model.num_hidden_layers), model.num_hidden_layers
        if len({*tapped}) < len(tapped) or not all(0 <= layer < num for layer in tapped):
            yield (
                f"eagle_aux_hidden_state_layer_ids: the inputs of layers {tapped} are not those of"
                f" different layers from 0 to {num - 1}"
            )

    @property
    def num_drafted(self) -> int:
        """The number of tokens that it drafts."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size


def read_eagle_config(folder: Path, model: ModelConfig) -> EagleConfig:
    """Raises ConfigError if ``folder`` has no head for ``model``."""
    path = find_file(folder, CONFIG_FILE)
    given = decode_json(path, dict[str, Any])
    if LAYER in given:  # its keys are about the layer, and norm_before_residual is on by default
        above = {key: each for key, each in given.items() if each is not None and key != LAYER}
        given = {"norm_before_residual": True} | given[LAYER] | above
    try:
        config = msgspec.convert({"architectures": []} | given, EagleConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"model: {path}: {error}") from None
    for problem in config.problems_with(model):
        raise ConfigError(f"model: {path}: {problem}")
    return config
