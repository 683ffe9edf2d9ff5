"""The items of a worker's sequences: their positions and embeddings in a forward pass."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from services.worker.media.encoder import Encoder, Job
from services.worker.media.item_check import uncached_items
from services.worker.media.rotations import Rotations
from services.worker.step.batch import Batch
from shared.media.family import Family
from shared.wire.codec import Array
from shared.wire.messages import Admit, StepPlan


@dataclass(slots=True)
class _Prompt:
    """A prompt with items. Positions behind it are indices plus ``delta``."""

    positions: np.ndarray  # [axes, prompt_len] int64
    delta: int
    job: Job


class MediaTable:
    """A plan part. ``embed`` gives the embeddings [T, hidden] of ids [T]."""

    def __init__(
        self,
        family: Family,
        rotations: Rotations,
        encoder: Encoder,
        embed: Callable[[Tensor], Tensor],
    ) -> None:
        self._family = family
        self._rotations = rotations
        self._encoder = encoder
        self._embed = embed
        self._prompts: dict[int, _Prompt] = {}  # by slot

    def apply(self, plan: StepPlan, pixels: Sequence[Array]) -> None:
        buffers = dict(zip(uncached_items(plan), pixels, strict=True))
        added = {row.slot: self._prompt(row, buffers) for row in plan.admit if row.items}
        for prompt in added.values():
            if prompt.job.items:
                self._encoder.add(prompt.job)
        for slot in (*plan.release, *(row.slot for row in plan.admit)):
            self._leave(slot)
        self._prompts |= added

    def lay_out(self, batch: Batch) -> Batch:
        if not self._prompts:
            return batch
        found = [
            (row, prompt)
            for row, slot in enumerate(batch.rows.slots.tolist())
            if (prompt := self._prompts.get(slot)) is not None
        ]
        if not found:
            return batch
        positions = np.tile(batch.host_positions, (3, 1))
        pieces: list[tuple[int, Tensor]] = []  # the first token and features
        firsts = batch.rows.token_ends - batch.rows.num_tokens
        columns = firsts, batch.rows.starts, batch.rows.ends
        for row, prompt in found:
            first, start, end = (int(each[row]) for each in columns)
            positions[:, first : first + end - start] += prompt.delta
            known = prompt.positions[:, start:end]
            positions[:, first : first + known.shape[1]] = known
            pieces += [
                (first + place - start, part) for place, part in self._pieces(prompt, start, end)
            ]
        rows = torch.from_numpy(self._rotations.rows(positions))
        embeddings = self._embeddings(batch, pieces)
        for row, prompt in found:
            self._encoder.note_computed(prompt.job, int(batch.rows.ends[row]))
        return replace(batch, positions=rows, embeddings=embeddings)

    def reset(self) -> None:
        for slot in list(self._prompts):
            self._leave(slot)

    def _leave(self, slot: int) -> None:
        prompt = self._prompts.pop(slot, None)
        if prompt is not None:
            self._encoder.drop(prompt.job)

    def _prompt(self, row: Admit, buffers: Mapping[bytes, Array]) -> _Prompt:
        num = row.prompt_len
        positions = self._family.positions(row.items, num + 1)
        items = [item for item in row.items if item.end > row.num_cached]
        pixels = {item.digest: buffers[item.digest] for item in items}
        job = Job(row.request, row.attempt, num, items, pixels)
        return _Prompt(positions[:, :num], int(positions[0, num]) - num, job)

    def _pieces(self, prompt: _Prompt, start: int, end: int) -> list[tuple[int, Tensor]]:
        """The places and features of the prompt's ids from ``start`` to ``end``."""
        found = []
        for item in prompt.job.items:
            low, high = max(start, item.start), min(end, item.end)
            if low < high:
                features = self._encoder.features(prompt.job, item)
                found.append((low, features[low - item.start : high - item.start]))
        return found

    def _embeddings(self, batch: Batch, pieces: list[tuple[int, Tensor]]) -> Tensor | None:
        if not pieces:
            return None
        embeddings = self._embed(batch.input_ids)
        for first, part in pieces:
            embeddings[first : first + len(part)] = part
        return embeddings
