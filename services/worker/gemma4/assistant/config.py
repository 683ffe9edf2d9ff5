"""The config.json of an assistant model, Google's draft model for a Gemma 4."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from services.worker.config.model_config import Num, Window
from services.worker.gemma4.config import Count, Gemma4Config
from shared.errors import ConfigError
from shared.model_folder import CONFIG_FILE, decode_json, find_file


class LayersConfig(Gemma4Config, frozen=True, kw_only=True):
    """Of the assistant's layers, which have no keys and values of their own."""

    vocab_size_per_layer_input: Count = 262_144

    def problems(self) -> list[str]:
        num, shared = self.num_hidden_layers, self.num_kv_shared_layers
        unsupported = {
            "hidden_size_per_layer_input": self.num_inputs,
            "enable_moe_block": self.enable_moe_block,
            "use_double_wide_mlp": self.use_double_wide_mlp,
            "quantization_config": self.quantization_config,
        }
        found = [f"{key} {value} is not supported" for key, value in unsupported.items() if value]
        if shared not in (0, num):
            found.append(f"num_kv_shared_layers {shared} is not num_hidden_layers, {num}")
        return [*found, *super().problems()]

    def _sharing_problems(self) -> list[str]:
        return []


class UnifiedLayersConfig(LayersConfig, frozen=True, kw_only=True):
    """Has the defaults of ``UnifiedConfig``."""

    sliding_window: Window = 1024
    use_bidirectional_attention: str | None = "vision"
    hidden_size_per_layer_input: Count | None = 0


LAYERS = {"gemma4_assistant": LayersConfig, "gemma4_unified_assistant": UnifiedLayersConfig}


class Clusters(NamedTuple):
    """The tokens of the ``num_chosen`` likeliest of ``num`` clusters are drafted."""

    num: int
    num_chosen: int


class AssistantConfig(msgspec.Struct, frozen=True, kw_only=True):
    backbone_hidden_size: Num
    use_ordered_embeddings: bool = False
    num_centroids: Num = 2048
    centroid_intermediate_top_k: Num = 32
    tie_word_embeddings: bool = True
    quantization_config: dict[str, Any] | None = None

    @property
    def clusters(self) -> Clusters | None:
        """None: all tokens are drafted."""
        found = Clusters(self.num_centroids, self.centroid_intermediate_top_k)
        return found if self.use_ordered_embeddings else None

    def problems_with(self, layers: LayersConfig, model: Gemma4Config) -> Iterator[str]:
        """The unsupported features of the assistant, and of its use for ``model``."""
        if self.backbone_hidden_size != model.hidden_size:
            yield (
                f"backbone_hidden_size {self.backbone_hidden_size} is another than the model's"
                f" hidden_size, {model.hidden_size}"
            )
        if not self.tie_word_embeddings:
            yield "tie_word_embeddings false is not supported"
        if self.quantization_config:
            yield "quantization_config is not supported; the assistant must be dense"
        clusters, vocab_size = self.clusters, layers.vocab_size
        if clusters is not None and vocab_size % clusters.num:
            yield f"num_centroids {clusters.num} does not divide vocab_size {vocab_size}"
        if clusters is not None and clusters.num_chosen > clusters.num:
            yield (
                f"centroid_intermediate_top_k {clusters.num_chosen} is above num_centroids"
                f" {clusters.num}"
            )
        problems = [*layers.problems(), *_differences(layers, model)]
        yield from (f"text_config: {problem}" for problem in problems)


def source_of(kind: str, model: Gemma4Config) -> int:
    """The model's layer with the keys and values that the assistant's layers of a ``kind`` read:
    the last of its kind with its own."""
    return max(layer for layer in range(model.num_own) if model.kinds[layer] == kind)


def read_assistant_config(
    folder: Path, model: Gemma4Config
) -> tuple[AssistantConfig, LayersConfig]:
    """Raises ConfigError if ``folder`` has no assistant for ``model``."""
    path = find_file(folder, CONFIG_FILE)
    given = _known(decode_json(path, dict[str, Any]))
    kind = given.get("model_type")
    if kind not in LAYERS:
        raise ConfigError(
            f"model: {path}: model_type {kind!r} is no assistant of a Gemma 4;"
            f" {' and '.join(LAYERS)} are"
        )
    of_layers = given.get("text_config", {})
    try:
        config = msgspec.convert(given, AssistantConfig)
        if not isinstance(of_layers, dict):
            raise ConfigError(f"model: {path}: text_config is no object")
        layers = msgspec.convert({"architectures": []} | _known(of_layers), LAYERS[kind])
    except msgspec.ValidationError as error:
        raise ConfigError(f"model: {path}: {error}") from None
    for problem in config.problems_with(layers, model):
        raise ConfigError(f"model: {path}: {problem}")
    return config, layers


def _known(given: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if value is not None}


def _differences(layers: LayersConfig, model: Gemma4Config) -> Iterator[str]:
    """Of keys that both must have alike."""
    if layers.vocab_size != model.vocab_size:
        yield f"vocab_size {layers.vocab_size} is another than the model's, {model.vocab_size}"
    for layer, kind in enumerate(layers.kinds):
        if kind not in model.kinds[: model.num_own]:
            yield f"layer_types: the model has no keys and values of the kind {kind}"
            continue
        source = source_of(kind, model)
        windows = layers.window(layer), model.window(source)
        if windows[0] != windows[1]:
            yield f"sliding_window {windows[0]} is another than the model's, {windows[1]}"
        own, other = layers.head_sizes(layer), model.head_sizes(source)
        for key, one, wanted in zip(("head_dim", "KV heads"), own, other, strict=True):
            if one != wanted:
                yield f"{key} {one} of {kind} is another than the model's, {wanted}"
