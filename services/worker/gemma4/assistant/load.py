"""Gives a Gemma 4 the assistant model of a folder, in place of an MTP head."""

import logging

import torch
from torch import Tensor, nn

from services.worker.config.model_config import ModelConfig
from services.worker.gemma4.assistant.config import read_assistant_config, source_of
from services.worker.gemma4.assistant.head import AssistantHead, AssistantModule
from services.worker.gemma4.config import Gemma4Config
from services.worker.gemma4.model import Gemma4ForCausalLM
from services.worker.models.decoder import DecoderLM
from services.worker.speculation.choose import check_one_rank, naming_the_setting
from services.worker.weights.checkpoint import Checkpoint, open_checkpoint
from services.worker.weights.load import fill, laid_out
from services.worker.weights.online import Forms
from services.worker.weights.progress import Progress
from services.worker.weights.weight_placement import WeightPlacement
from shared.errors import ConfigError
from shared.model_folder import weight_files
from shared.model_location import locate_model
from shared.settings.worker import WorkerConfig

log = logging.getLogger(__name__)

ORDERING = "masked_embedding.token_ordering"


class AssistantDrafts:
    """An assistant that was opened and fits ``model``; its tensors are not read yet."""

    def __init__(self, settings: WorkerConfig, model: Gemma4Config) -> None:
        wanted = settings.speculative_config
        folder = locate_model(str(wanted.model)).folder
        self._config, self._layers = read_assistant_config(folder, model)
        if self._config.clusters is not None and wanted.limits_vocab:
            raise ConfigError(
                "draft_vocab_…: not for an assistant with use_ordered_embeddings; it drafts the"
                " tokens of likely clusters alone"
            )
        stored = open_checkpoint(weight_files(folder))
        self._ids = _cluster_ids(stored, self._layers.vocab_size) if self._config.clusters else None
        left = {} if self._ids is None else {ORDERING}
        names = stored.tensors.keys() - left
        self._stored = Checkpoint(folder, {name: stored.tensors[name] for name in names})
        head = "none" if self._config.clusters else settings.lm_head_quantization
        self._forms = Forms(settings.quantization, head, "none")

    def add_to(
        self, model: DecoderLM, dtype: torch.dtype, device: torch.device, progress: Progress
    ) -> None:
        """On the device ``meta`` nothing is read. Raises ConfigError."""
        assert isinstance(model, Gemma4ForCausalLM)
        with naming_the_setting():
            with laid_out(dtype, device):
                module = AssistantModule(self._config, self._layers, self._ids, model)
            if device.type != "meta":
                fill(module, self._stored, progress, WeightPlacement(module, device), self._forms)
        model.model.mtp_layers = nn.ModuleList([module])
        model.mtp_head = AssistantHead(module, model)
        sources = sorted({source_of(kind, model.config) for kind in self._layers.kinds})
        log.info("assistant: %s, on the KV cache of layers %s", self._stored.folder, sources)


def open_drafts(
    settings: WorkerConfig, model: ModelConfig | None, device: torch.device
) -> AssistantDrafts | None:
    """None if ``model`` is no Gemma 4: its MTP head is its own. Raises ConfigError."""
    if not isinstance(model, Gemma4Config):
        log.warning("speculative-config: model has no effect: only a Gemma 4 has an assistant")
        return None
    with naming_the_setting():
        if device.type == "cuda":
            raise ConfigError("method mtp: an assistant is not supported on GPUs")
        check_one_rank(settings)
        return AssistantDrafts(settings, model)


def _cluster_ids(stored: Checkpoint, vocab_size: int) -> Tensor:
    """All tokens [vocab_size] int64, cluster by cluster. Raises ConfigError."""
    ordering = stored.tensors.get(ORDERING)
    if ordering is None:
        raise ConfigError(f"model: {stored.folder} lacks tensors {ORDERING}")
    if ordering.shape != [vocab_size]:
        raise ConfigError(
            f"model: {ordering.file}: {ordering.label} {ordering.shape}; vocab_size is {vocab_size}"
        )
    ids: Tensor = ordering.read_all().long()
    if not torch.equal(ids.sort().values, torch.arange(vocab_size)):
        raise ConfigError(
            f"model: {ordering.file}: tensor {ORDERING} does not have each id between 0 and"
            f" {vocab_size - 1} once"
        )
    return ids
