"""The heads of models that classify."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from services.worker.weights.checkpoint import (
    SCORE,
    TRUNK,
    Checkpoint,
    StoredTensor,
    open_checkpoint,
)
from shared.errors import ConfigError
from shared.model_folder import TOKENIZER_FILE, find_file, weight_files
from shared.wire.messages import PoolingInfo

SEED, STD = 0, 0.02  # of a head that is made up


def read_score_head(
    folder: Path, pooling: PoolingInfo, tokens: list[str] | None, hidden_size: int
) -> Tensor:
    """[size, hidden_size] float32, the matrix from a state to the logits of classes: the
    checkpoint's ``score``; or, with the two ``tokens`` of a model that writes texts, the difference
    of their output rows: its logit's sigmoid is the second token's probability among the two.
    Raises ConfigError."""
    checkpoint = open_checkpoint(weight_files(folder))
    if tokens is None:
        head = _find(checkpoint, SCORE).read_all().float()
    else:
        names = "lm_head.weight", f"{TRUNK}embed_tokens.weight", "embed_tokens.weight"
        source = _find(checkpoint, *names)
        if not source.is_dense:
            raise ConfigError(
                f"pooler-config: classifier_from_token: {source.label}; rows are read of floats"
            )
        against, towards = (source.read(0, _token_id(folder, token), 1) for token in tokens)
        head = towards.float() - against.float()
    if list(head.shape) != [pooling.size, hidden_size]:
        raise ConfigError(
            f"model: {checkpoint.folder}: the head is {list(head.shape)}; expected"
            f" {[pooling.size, hidden_size]}"
        )
    return head


def make_up_score_head(size: int, hidden_size: int) -> Tensor:
    """Weights of the right shape and no meaning."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn(size, hidden_size, generator=generator) * STD


def _find(checkpoint: Checkpoint, *names: str) -> StoredTensor:
    for name in names:
        if (found := checkpoint.find(name)) is not None:
            return found
    raise ConfigError(f"model: {checkpoint.folder} lacks the tensor {names[0]}")


def _token_id(folder: Path, token: str) -> int:
    tokenizer = Tokenizer.from_file(str(find_file(folder, TOKENIZER_FILE)))
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise ConfigError(f"pooler-config: classifier_from_token: the model has no token {token!r}")
    return int(token_id)
