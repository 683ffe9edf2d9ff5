"""Images in a step on a device. Operators read them from tensors that CUDA graphs hold too."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.paged_attention import AttentionBatch, DeviceAttention
from services.worker.backends.torch_lm import TorchOps
from services.worker.layers.context import current_context
from services.worker.layers.embedding import Embedding
from services.worker.layers.heads import Heads
from services.worker.machine.streams import upload


class MixedStep(Protocol):
    """A device's step with chunks, after decode rows of ``width`` tokens each."""

    decoding: Tensor  # [B] int32, slots
    width: int

    @property
    def num_decoded(self) -> int: ...


Piece = tuple[np.ndarray, Tensor]  # the indices [n] of tokens in a step, and their features


class DeviceTokens:
    """A step with chunks has at most ``num_tokens``; each has a shift, the difference between its
    row in the table of rotations and its position, and perhaps features. Other steps take the
    deltas of their slots as shifts. In prompts, ``image_ids`` are for experts of images. Tokens of
    items that ``are_whole`` see the keys before their ``ends``. The id ``filler`` is in place of
    features in tables other than of embeddings."""

    def __init__(
        self,
        num_slots: int,
        num_tokens: int,
        num_embeddings: int,
        hidden_size: int,
        image_ids: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        are_whole: bool,
        filler: int | None,
    ) -> None:
        self._device = device
        self._filler = filler
        self._ends = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        self._are_whole = are_whole
        self._image_ids = torch.tensor(image_ids, dtype=torch.int64, device=device)
        self._is_of_prompt = torch.zeros(num_tokens, dtype=torch.bool, device=device)
        self._known = np.zeros(num_slots, np.int64)  # the deltas on the device
        self._deltas = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)  # with the null
        self._shifts = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self._is_feature = torch.zeros(num_tokens, 1, dtype=torch.bool, device=device)
        shape = num_embeddings, num_tokens, hidden_size
        self._features = torch.zeros(shape, dtype=dtype, device=device)
        self._is_clear = True

    def put_deltas(self, slots: np.ndarray, deltas: np.ndarray) -> None:
        """slots and deltas [R] int64"""
        is_new = self._known[slots] != deltas
        if is_new.any():
            self._known[slots] = deltas
            places, values = upload(np.stack((slots[is_new], deltas[is_new])), self._device)
            self._deltas[places] = values

    def clear(self) -> None:
        """The next step has no image."""
        if not self._is_clear:
            self._shifts.zero_()
            self._is_feature.zero_()
            self._ends.zero_()
            self._is_clear = True

    def note_prompts(self, step: MixedStep, is_of_prompt: np.ndarray) -> None:
        """is_of_prompt [T] bool of the tokens of chunks, for experts of images"""
        start = step.num_decoded
        of_all = np.zeros(len(self._is_of_prompt), bool)
        of_all[start : start + len(is_of_prompt)] = is_of_prompt
        self._is_of_prompt.copy_(upload(of_all, self._device))

    def fill(
        self, step: MixedStep, shifts: np.ndarray, ends: np.ndarray, pieces: Sequence[Piece]
    ) -> None:
        """shifts and ends [T] int64 of the tokens of chunks; ``pieces`` count from the first of
        these."""
        self._is_clear = False
        start, end = step.num_decoded, step.num_decoded + len(shifts)
        of_all = np.zeros(len(self._shifts), np.int64)
        is_feature = np.zeros(len(self._shifts), bool)
        of_all[start:end] = shifts
        self._shifts.copy_(upload(of_all, self._device))
        if self._are_whole:
            all_ends = np.zeros(len(self._ends), np.int32)
            all_ends[start:end] = ends
            self._ends.copy_(upload(all_ends, self._device))
        of_rows = self._deltas.index_select(0, step.decoding)
        self._shifts[:start] = of_rows.repeat_interleave(step.width)
        for places, part in pieces:
            is_feature[places + start] = True
            found = by_embedding(part, len(self._features)).to(self._features.dtype)
            self._features[:, upload(places + start, self._device)] = found
        self._is_feature.copy_(upload(is_feature[:, None], self._device))

    def with_ends(self, attention: DeviceAttention) -> DeviceAttention:
        chunks = attention.chunks
        if not self._are_whole or chunks is None:
            return attention
        return replace(attention, chunks=replace(chunks, ends=self._ends))

    def rows(self, positions: Tensor, attention: DeviceAttention) -> Tensor:
        """positions [T] int64 → rows [T] of the table of rotations."""
        decode = attention.decode
        if attention.chunks is not None or decode is None:
            return positions + self._shifts[: len(positions)]
        deltas = self._deltas.index_select(0, decode.slots)
        return (positions.view(-1, decode.width) + deltas[:, None]).flatten()

    def with_features(self, embeddings: Tensor) -> Tensor:
        """[T, hidden] of a step with chunks"""
        num = len(embeddings)
        return torch.where(self._is_feature[:num], self._features[0, :num], embeddings)

    def filled(self, ids: Tensor) -> Tensor:
        """ids [T] of a step with chunks → [T]"""
        assert self._filler is not None
        return ids.masked_fill(self._is_feature[: len(ids), 0], self._filler)

    def marks(self, ids: Tensor) -> Tensor:
        """ids [T] of a step with chunks → [T] bool: the ones for experts of images."""
        is_found = (ids[:, None] == self._image_ids).any(1)
        return is_found & self._is_of_prompt[: len(ids)]

    def plus_features(self, states: Tensor, number: int) -> Tensor:
        """[T, hidden] of a step with chunks"""
        num = len(states)
        return torch.where(self._is_feature[:num], states + self._features[number, :num], states)


def by_embedding(features: Tensor, num: int) -> Tensor:
    """[n, num · hidden] → [num, n, hidden]"""
    return torch.stack(features.chunk(num, 1))


class MediaOps(TorchOps):
    """In steps prepared by the host, rows and embeddings are given instead. Features are not scaled
    as embeddings are, in a model that ``scales`` these."""

    def __init__(
        self,
        tokens: Callable[[], DeviceTokens],
        scales: bool,
        positions: Tensor,
        **options: Any,
    ) -> None:
        attention = current_context().groups[0].attention
        self._tokens: DeviceTokens | None = None
        self._marks: Tensor | None = None
        self._scales = scales
        self._unscaled: Tensor | None = None  # embeddings
        self._with_ends: dict[int, DeviceAttention] = {}  # by group
        if isinstance(attention, DeviceAttention):
            found = tokens()
            positions = found.rows(positions, attention)
            self._tokens = None if attention.chunks is None else found
        super().__init__(positions, **options)

    def attention(self, heads: Heads) -> AttentionBatch | DeviceAttention:
        found = super().attention(heads)
        if self._tokens is None or heads.spec.is_causal or not isinstance(found, DeviceAttention):
            return found
        if heads.group not in self._with_ends:
            self._with_ends[heads.group] = self._tokens.with_ends(found)
        return self._with_ends[heads.group]

    def embed(self, ids: Tensor, embedding: Embedding) -> Tensor:
        """The first call is for embeddings."""
        if self._tokens is not None and self._marks is not None:
            return super().embed(self._tokens.filled(ids), embedding)
        embeddings = super().embed(ids, embedding)
        if self._tokens is None:
            return embeddings
        self._marks = self._tokens.marks(ids)
        if not self._scales:
            return self._tokens.with_features(embeddings)
        self._unscaled = embeddings
        return embeddings

    def scale(self, x: Tensor, factor: float | Tensor) -> Tensor:
        scaled = super().scale(x, factor)
        if self._tokens is None or x is not self._unscaled:
            return scaled
        return self._tokens.with_features(scaled)

    def marks(self) -> Tensor | None:
        return super().marks() if self._tokens is None else self._marks

    def add_input(self, x: Tensor, number: int) -> Tensor:
        if self._tokens is None:
            return super().add_input(x, number)
        return self._tokens.plus_features(x, number)
