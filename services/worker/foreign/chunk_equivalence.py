"""The logits of texts by a model of transformers: in one piece by itself, and in chunks by ours."""

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kernels.kv_layout import KVLayout
from kernels.paged_attention import prepare_attention
from services.worker.foreign.model import TransformersLM
from services.worker.layers.context import AttentionInputs, ForwardContext, forward_context
from services.worker.machine.kv_cache import KVCache
from services.worker.machine.streams import upload

NUM_TOKENS = 48
BLOCK_SIZE = 16
SEED = 0


def random_texts(vocab_size: int, device: torch.device) -> list[Tensor]:
    """Returns two texts [NUM_TOKENS], the same on every device."""
    generator = torch.Generator().manual_seed(SEED)
    texts = torch.randint(vocab_size, (2, NUM_TOKENS), generator=generator)
    return list(texts.to(device))


@torch.inference_mode()
def whole_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """[T] → [T, vocab_size], with the attention that is set."""
    logits: Tensor = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
    return logits.float()


@torch.inference_mode()
def logits_in_chunks(
    model: TransformersLM, layouts: list[KVLayout], texts: list[Tensor]
) -> list[Tensor]:
    """Texts [T] → logits [T, vocab_size] of each, computed in the same steps; one step has a single
    token of the first text."""
    dtype, device = layouts[0].dtype, texts[0].device
    length = len(texts[0])
    num_blocks = -(-length // BLOCK_SIZE)
    cache = KVCache(layouts, len(texts) * num_blocks, BLOCK_SIZE, device)
    tables = np.arange(len(texts) * num_blocks).reshape(len(texts), num_blocks)
    bounds = [[0, length // 3, length // 3 + 1, length], [0, length // 4, length // 2, length]]
    logits: list[list[Tensor]] = [[] for _ in texts]
    for step in range(3):
        starts = np.array([each[step] for each in bounds])
        ends = np.array([each[step + 1] for each in bounds])
        positions = np.concatenate([np.arange(*pair) for pair in zip(starts, ends, strict=True)])
        rows = np.repeat(np.arange(len(texts)), ends - starts)
        slot_mapping = tables[rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        attention = prepare_attention(ends - starts, ends, tables, BLOCK_SIZE, dtype, device)
        inputs = AttentionInputs(upload(slot_mapping, device), attention)
        context = ForwardContext(cache.layers, [inputs])
        parts = zip(texts, starts, ends, strict=True)
        ids = torch.cat([text[start:end] for text, start, end in parts])
        with forward_context(context):
            hidden = model(ids, upload(positions, device))
        of_step = model.logits(hidden).split((ends - starts).tolist())
        for text_logits, part in zip(logits, of_step, strict=True):
            text_logits.append(part)
    return [torch.cat(parts) for parts in logits]
