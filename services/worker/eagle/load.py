"""Gives a model the head of a folder with EAGLE-3's draft model, in place of its MTP head."""

import logging

import torch
from torch import Tensor, nn

from services.worker.config.model_config import ModelConfig
from services.worker.eagle.config import EagleConfig, read_eagle_config
from services.worker.eagle.head import EagleHead, EagleModule
from services.worker.layers.embedding import DraftLMHead, Embedding, LMHead
from services.worker.layers.parallel import as_shard
from services.worker.layers.weights import Dense
from services.worker.models.decoder import DecoderLM
from services.worker.speculation.choose import check_one_rank, naming_the_setting
from services.worker.weights.checkpoint import (
    Checkpoint,
    StoredTensor,
    TensorSource,
    open_checkpoint,
)
from services.worker.weights.load import build_model, fill, laid_out
from services.worker.weights.online import Forms
from services.worker.weights.progress import Progress
from services.worker.weights.weight_placement import WeightPlacement
from shared.errors import ConfigError
from shared.model_folder import weight_files
from shared.model_location import locate_model
from shared.settings.worker import WorkerConfig

log = logging.getLogger(__name__)

OURS, THEIRS = "layers.0.", "midlayer."  # of speculators, of the authors
HEAD, TABLE, OFFSETS, IS_DRAFTED = "lm_head.weight", "embed_tokens.weight", "d2t", "t2d"


class EagleCheckpoint(Checkpoint):
    """The tensors of a head by the names of ``EagleModule``."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        tensors = checkpoint.tensors
        names = tensors.keys() - {OFFSETS, IS_DRAFTED}
        super().__init__(checkpoint.folder, {name: tensors[name] for name in names})
        self.offsets: StoredTensor | None = checkpoint.tensors.get(OFFSETS)
        self._has_midlayer = any(name.startswith(THEIRS) for name in self.tensors)

    def source(self, name: str) -> TensorSource:
        if self._has_midlayer and name.startswith(OURS):
            name = THEIRS + name.removeprefix(OURS)
        return TensorSource(name)


class EagleDrafts:
    """A head that was opened and fits ``model``; its tensors are not read yet."""

    def __init__(self, settings: WorkerConfig, model: ModelConfig) -> None:
        with naming_the_setting():
            self._forms = Forms(settings.quantization, settings.lm_head_quantization, "none")
            folder = locate_model(str(settings.speculative_config.model)).folder
            self._config = read_eagle_config(folder, model)
            self._stored = EagleCheckpoint(open_checkpoint(weight_files(folder)))
            self._ids = _drafted_ids(self._config, self._stored)
        self._tapped = self._config.tapped(model.num_hidden_layers)
        self._folder = folder

    def add_to(
        self, model: DecoderLM, dtype: torch.dtype, device: torch.device, progress: Progress
    ) -> None:
        """On the device ``meta`` nothing is read. Raises ConfigError."""
        module = self._lay_out(model, dtype, device)
        if device.type != "meta":
            with naming_the_setting():
                placement = WeightPlacement(module, device)
                fill(module, self._stored, progress, placement, self._forms)
        trunk = model.model
        if module.embed_tokens is not None and _are_same(module.embed_tokens, trunk.embed_tokens):
            module.embed_tokens = None
        if module.lm_head is not None and self._ids is not None:
            module.lm_head = _of_some(module.lm_head, self._ids.to(device), model.config.vocab_size)
        head = module.lm_head or model.lm_head
        assert head is not None
        trunk.mtp_layers = nn.ModuleList([module])
        trunk.tapped = self._tapped
        model.mtp_head = EagleHead(module, module.embed_tokens or trunk.embed_tokens, head)
        model.place_layers()
        log.info("EAGLE-3 head: %s, on the inputs of layers %s", self._folder, self._tapped)

    def _lay_out(self, model: DecoderLM, dtype: torch.dtype, device: torch.device) -> EagleModule:
        config, has_table = self._config, self._stored.find(TABLE) is not None
        num_layers = model.config.num_hidden_layers
        with laid_out(dtype, device):
            module = EagleModule(
                config,
                layer=num_layers,
                num_tapped=len(self._tapped),
                length=model.config.max_position_embeddings,
                has_embeddings=has_table,
            )
        if self._stored.find(HEAD) is None and self._ids is None:
            module.lm_head = None
        return module


def open_drafts(settings: WorkerConfig, model: ModelConfig | None, _: torch.device) -> EagleDrafts:
    """``model`` is None if transformers computes it. Raises ConfigError."""
    method = "speculative-config: method eagle3"
    if model is None:
        raise ConfigError(f"{method}: transformers computes the model; it must be one of our own")
    with naming_the_setting():
        check_one_rank(settings)
    planned = build_model(model, torch.float32, torch.device("meta"))
    family = type(planned)
    if family.forward is not DecoderLM.forward or planned.embedding_scale != 1.0:
        raise ConfigError(f"{method}: architecture {family.__name__} is not supported")
    return EagleDrafts(settings, model)


def _drafted_ids(config: EagleConfig, stored: EagleCheckpoint) -> Tensor | None:
    """The model's ids [draft_vocab_size] int64 of the drafted tokens; None: all, in order. Raises
    ConfigError."""
    num, vocab_size, offsets = config.num_drafted, config.vocab_size, stored.offsets
    if offsets is None:
        if num == vocab_size:
            return None
        raise ConfigError(f"model: {stored.folder} lacks tensors {OFFSETS}")
    if offsets.shape != [num]:
        raise ConfigError(
            f"model: {offsets.file}: {offsets.label} {offsets.shape}; the draft_vocab_size is {num}"
        )
    ids: Tensor = torch.arange(num) + offsets.read_all().long()
    if not ((ids >= 0) & (ids < vocab_size)).all() or len(ids.unique()) < num:
        raise ConfigError(
            f"model: {offsets.file}: tensor {OFFSETS} does not lead to {num} different ids between"
            f" 0 and {vocab_size - 1}"
        )
    return ids


def _of_some(head: LMHead, ids: Tensor, vocab_size: int) -> DraftLMHead:
    return DraftLMHead(as_shard(len(ids)), head.inputs, ids, vocab_size, head.weight)


def _are_same(own: Embedding, other: Embedding) -> bool:
    """Most folders have a copy of the model's embeddings."""
    weights = own.weight, other.weight
    tensors = [each.values for each in weights if isinstance(each, Dense)]
    return len(tensors) == 2 and not own.weight.values.is_meta and torch.equal(*tensors)
