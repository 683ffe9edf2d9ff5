"""An encoder that transformers computes, and the pooling of its states."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from kernels.cpu.packing import NativeLibrary
from services.worker.encoders.native import NativeTrunk
from services.worker.models import TorchCausalLM
from services.worker.pooling.prompts import StatePooler
from services.worker.slots.table import SlotTable
from services.worker.step.rows import Rows
from shared.errors import ConfigError
from shared.model_folder import PADDED
from shared.wire.messages import Pooling, PoolingInfo


class EncoderLM(TorchCausalLM):
    """Its steps compute nothing: its pooler computes a prompt whole once its last token is
    planned."""

    clears_blocks = False
    state_size = 0

    def __init__(
        self, model: PreTrainedModel, max_tokens: int, *, classifies: bool, dense: nn.Module | None
    ) -> None:
        """``dense`` follows the pooling of embeddings."""
        nn.Module.__init__(self)
        trunk: Any = model.base_model
        self.head = _ClassHead(model) if classifies else dense
        trunk.pooler = None  # the head has it
        self.trunk = trunk
        self.hidden_size, self.vocab_size = model.config.hidden_size, model.config.vocab_size
        self._max_tokens = max_tokens
        self._native: NativeTrunk | None = None

    def pack(self, library: NativeLibrary) -> None:
        """Raises NotSupported."""
        self._native = NativeTrunk(self.trunk, library, self._max_tokens)

    def make_pooler(self, pooling: PoolingInfo) -> StatePooler:
        """Raises ConfigError."""
        config = self.trunk.config
        classifies = isinstance(self.head, _ClassHead)
        if pooling.size != (config.num_labels if classifies else config.hidden_size):
            raise ConfigError("pooler-config: classifier_from_token is for models that write texts")
        if pooling.pooling_type == "last":
            raise ConfigError("pooler-config: an encoder pools by CLS or MEAN, not by LAST")
        return EncoderPooler(self.trunk, self._native, self.head, self._max_tokens)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return torch.empty(len(input_ids), 0, device=input_ids.device)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Nothing is sampled from them."""
        return hidden.new_zeros(len(hidden), self.vocab_size) if out is None else out.zero_()


class EncoderPooler(StatePooler):
    """Computes prompts side by side, up to ``max_tokens`` at once, and pools their states in
    float32. ``head`` maps pooled states to embeddings or the logits of classes."""

    def __init__(
        self, trunk: Any, native: NativeTrunk | None, head: nn.Module | None, max_tokens: int
    ) -> None:
        super().__init__(_unchanged, None)
        self._trunk, self._native, self._last_head = trunk, native, head
        self._max_tokens = max_tokens
        config = trunk.config
        is_padded = config.model_type in PADDED
        self._first_position = config.pad_token_id + 1 if is_padded else 0
        self._has_types = getattr(config, "type_vocab_size", 0) > 1

    def pool(self, table: SlotTable, rows: Rows, hidden: Tensor) -> list[tuple[Tensor, list[int]]]:
        lengths = table.prompt_lens[rows.slots]
        is_end = rows.ends == lengths
        slots = rows.slots[is_end][np.argsort(lengths[is_end], kind="stable")].tolist()
        found: dict[Pooling, dict[int, Tensor]] = {}
        for packed in self._packed(slots, table):
            for slot, state in zip(packed, self._pooled_states(table, packed), strict=True):
                by_slot = found.setdefault(_without_types(table, slot), {})
                by_slot[slot] = state
        return [
            (self._answers(torch.stack(list(by_slot.values())), pooling), list(by_slot))
            for pooling, by_slot in found.items()
        ]

    def _packed(self, slots: list[int], table: SlotTable) -> Iterator[list[int]]:
        packed: list[int] = []
        num_tokens = 0
        for slot in slots:
            length = int(table.prompt_lens[slot])
            if packed and num_tokens + length > self._max_tokens:
                yield packed
                packed, num_tokens = [], 0
            packed.append(slot)
            num_tokens += length
        if packed:
            yield packed

    def _pooled_states(self, table: SlotTable, slots: list[int]) -> Tensor:
        """[n, num_values] float32"""
        lengths = table.prompt_lens[slots].tolist()
        states = self._states(table, slots, lengths)
        kinds = [pooling_of(table, slot).pooling_type for slot in slots]
        pooled = torch.stack(
            [
                each.mean(0) if kind == "mean" else each[0]
                for each, kind in zip(states.float().split(lengths), kinds, strict=True)
            ]
        )
        if self._last_head is None:
            return pooled
        # Torch rounds products of several rows otherwise than products of one.
        return torch.cat([self._last_head(row) for row in pooled.split(1)])

    def _states(self, table: SlotTable, slots: list[int], lengths: Sequence[int]) -> Tensor:
        """[sum of lengths, hidden_size]"""
        pairs = list(zip(slots, lengths, strict=True))
        ids = np.concatenate([table.ids[slot, :length] for slot, length in pairs])
        places = np.concatenate([np.arange(length) for length in lengths])
        positions = places + self._first_position
        seconds = [pooling_of(table, slot).num_second * self._has_types for slot in slots]
        types = places >= np.repeat(np.subtract(lengths, seconds), lengths)
        if self._native is not None:
            return self._native.run(ids, positions, types, lengths)
        inputs = {"input_ids": ids, "position_ids": positions}
        if self._has_types:
            inputs["token_type_ids"] = types
        device = self._trunk.device
        tensors = {
            name: torch.from_numpy(each.astype(np.int64)).to(device).unsqueeze(0)
            for name, each in inputs.items()
        }
        states: Tensor = self._trunk(**tensors, lengths=lengths).last_hidden_state[0]
        return states


def pooling_of(table: SlotTable, slot: int) -> Pooling:
    pooling = table.params[slot].pooling
    assert pooling is not None  # plans are checked
    return pooling


def _without_types(table: SlotTable, slot: int) -> Pooling:
    return replace(pooling_of(table, slot), num_second=0)


def _unchanged(states: Tensor) -> Tensor:
    return states


class _ClassHead(nn.Module):
    """``model`` without its trunk, in float32, since states are pooled in it."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        pooler = getattr(model.base_model, "pooler", None)  # BERT's: a layer of its head
        setattr(model, model.base_model_prefix, _GivenStates(pooler))
        self.model = model.float()

    def forward(self, states: Tensor) -> Tensor:
        """[n, hidden_size] → [n, num_labels]"""
        logits: Tensor = self.model(inputs_embeds=states.unsqueeze(1)).logits
        return logits


class _GivenStates(nn.Module):
    """Replaces the trunk below a head, and returns the head's input states."""

    def __init__(self, pooler: nn.Module | None) -> None:
        super().__init__()
        self.pooler = pooler

    def forward(
        self, *args: Any, inputs_embeds: Tensor, **others: Any
    ) -> BaseModelOutputWithPooling:
        pooled = None if self.pooler is None else self.pooler(inputs_embeds)
        return BaseModelOutputWithPooling(last_hidden_state=inputs_embeds, pooler_output=pooled)
