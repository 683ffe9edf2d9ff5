"""Limits the drafts of an MTP head to the most likely tokens of the vocabulary.

Drafting is dominated by the GEMM with the output head, and most tokens of a large vocabulary are
rare (FR-Spec, arXiv 2502.14856). The head gets a copy of the likely tokens' rows and never drafts
the others. The output does not change, since each draft is verified.
"""

import json
import logging
from pathlib import Path

import torch
from torch import Tensor

from services.worker.layers.embedding import DraftLMHead, LMHead
from services.worker.layers.parallel import Parallel
from services.worker.layers.weights import Dense, Weight
from services.worker.models import CausalLM
from services.worker.models.decoder import DecoderLM
from shared.errors import ConfigError
from shared.settings.speculative import SpeculativeConfig

log = logging.getLogger(__name__)


def limit_drafts(wanted: SpeculativeConfig, model: DecoderLM | CausalLM) -> None:
    """Gives the MTP head of ``model`` the rows of the ``wanted`` tokens, unless all are wanted. In
    a pipeline the last stage has the head. Raises ConfigError."""
    is_elsewhere = isinstance(model, DecoderLM) and model.has_head_elsewhere
    if not wanted.limits_vocab or is_elsewhere:
        return
    if not isinstance(model, DecoderLM) or model.mtp_head is None:
        raise ConfigError("speculative-config: draft_vocab_…: the model has no MTP head")
    vocab_size, head = model.config.vocab_size, model.mtp_head.lm_head
    ids = _likeliest(wanted, vocab_size).to(_device_of(head))
    vocab = model.parallel.vocabulary(len(ids))
    weight = _rows(head, ids, model.parallel)
    if vocab.num < vocab.total:
        weight = weight.rows(torch.arange(vocab.start, vocab.start + vocab.num, device=ids.device))
    model.limit_drafts(DraftLMHead(vocab, head.inputs, ids, vocab_size, weight))
    source = wanted.draft_vocab_file or "the lowest ids"
    log.info("drafts: %d of %d tokens (%s)", len(ids), vocab_size, source)


def _likeliest(wanted: SpeculativeConfig, vocab_size: int) -> Tensor:
    """Ids [N] int64 of the drafted tokens, ascending. Raises ConfigError."""
    num, file = wanted.draft_vocab_size, wanted.draft_vocab_file
    ranked = list(range(vocab_size)) if file is None else _read(Path(file), vocab_size)
    if num is not None and num > len(ranked):
        limit = f"vocab_size {vocab_size}" if file is None else f"the {len(ranked)} ids of {file}"
        raise ConfigError(f"speculative-config: draft_vocab_size: {num} is above {limit}")
    return torch.tensor(sorted(ranked[:num]))


def _read(file: Path, vocab_size: int) -> list[int]:
    """Ids, most likely first. Raises ConfigError."""
    name = f"speculative-config: draft_vocab_file: {file}"
    try:
        ids = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{name}: is no JSON; an array of ids is wanted") from None
    if not isinstance(ids, list) or not ids:
        raise ConfigError(f"{name}: holds no array of ids")
    seen: set[int] = set()
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise ConfigError(f"{name}: {token_id!r} is no id between 0 and {vocab_size - 1}")
        if token_id in seen:
            raise ConfigError(f"{name}: {token_id} is there twice")
        seen.add(token_id)
    return ids


def _rows(head: LMHead, ids: Tensor, parallel: Parallel) -> Weight:
    """The rows of ``ids`` [N], gathered from the ranks. Raises ConfigError."""
    if parallel.size == 1:
        return head.weight.rows(ids)
    if not isinstance(head.weight, Dense):
        raise ConfigError(
            "speculative-config: draft_vocab_…: with several ranks (tensor-parallel-size"
            f" {parallel.size}) the output head must be dense; here it is in codes"
        )
    places = ids - head.vocab.start
    is_own = (places >= 0) & (places < head.vocab.num)
    own = head.weight.rows(places.clamp(0, head.vocab.num - 1))
    own.values.mul_(is_own[:, None])
    own.values.copy_(parallel.sum(own.values.data))
    return own


def _device_of(head: LMHead) -> torch.device:
    return next(head.weight.parameters()).device
