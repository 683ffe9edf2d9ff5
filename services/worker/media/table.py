"""The items of a worker's sequences: their positions and embeddings in a forward pass."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from kernels.paged_attention import AttentionBatch
from services.worker.layers.context import ForwardContext
from services.worker.layers.parallel import ALONE, Parallel
from services.worker.media.device_tokens import DeviceTokens, MixedStep, Piece, by_embedding
from services.worker.media.encoder import Encoder, Job, RemoteEncoder
from services.worker.media.item_check import uncached_items
from services.worker.media.rotations import Rotations
from services.worker.startup.additions import PlanPart
from services.worker.step.batch import Batch
from services.worker.step.rows import Rows
from services.worker.step.step import Step
from shared.media.family import Family, placeholders_of
from shared.wire.codec import Array
from shared.wire.messages import Admit, Item, StepPlan


@dataclass(slots=True)
class _Prompt:
    """A prompt with items. Positions behind it are indices plus ``delta``."""

    positions: np.ndarray  # [axes, prompt_len] int64
    delta: int
    job: Job


class _Placed(NamedTuple):
    """T tokens, some of sequences with images."""

    positions: np.ndarray  # [T] int64, in the sequences
    rows: np.ndarray  # [T] int64, of the table of rotations
    ends: np.ndarray  # [T] int64: they see the keys before these
    pieces: list[Piece]


class _OnDevice(Protocol):
    step: MixedStep


class MediaTable(PlanPart):
    """``embed`` gives the embeddings [T, hidden] of ids [T], and ``tokens`` their place on a
    device with steps of its own. The first rank of ``parallel`` has the features."""

    def __init__(
        self,
        family: Family,
        rotations: Rotations,
        encoder: Encoder | RemoteEncoder,
        embed: Callable[[Tensor], Tensor],
        tokens: Callable[[], DeviceTokens],
        *,
        num_slots: int,
        parallel: Parallel = ALONE,
    ) -> None:
        self._family = family
        self._placeholders = [*placeholders_of(family).values()]
        self._rotations = rotations
        self._encoder = encoder
        self._embed = embed
        self._tokens = tokens
        self._parallel = parallel
        self._deltas = np.zeros(num_slots, np.int64)
        self._prompt_lens = np.zeros(num_slots, np.int64)
        self._prompts: dict[int, _Prompt] = {}  # by slot

    def apply(self, plan: StepPlan, pixels: Sequence[Array]) -> None:
        buffers = dict(zip(uncached_items(plan), pixels))  # noqa: B905, none on other ranks
        added = {row.slot: self._prompt(row, buffers) for row in plan.admit if row.items}
        for prompt in added.values():
            if prompt.job.items:
                self._encoder.add(prompt.job)
        for slot in (*plan.release, *(row.slot for row in plan.admit)):
            self._leave(slot)
        self._prompts |= added
        for slot, prompt in added.items():
            self._deltas[slot] = prompt.delta
        for row in plan.admit:
            self._prompt_lens[row.slot] = row.prompt_len

    def lay_out(self, batch: Batch) -> Batch:
        marks = self._marks(batch.rows, batch.input_ids.numpy())
        if not marks.any() and not self._have_items(batch.rows):
            return batch
        placed = self._place(batch.rows)
        embeddings = self._embeddings(batch, placed.pieces, marks)
        context = batch.context
        if self._family.are_whole and placed.pieces:
            context = _with_ends(context, placed.ends)
        positions = torch.from_numpy(placed.rows)
        return replace(batch, positions=positions, embeddings=embeddings, context=context)

    def before_forward(self, step: Step) -> None:
        rows, tokens = step.rows, self._tokens()
        tokens.put_deltas(rows.slots, self._deltas[rows.slots])
        if not rows.has_chunks:
            return
        launched, chunks = cast(_OnDevice, step.computation).step, rows.chunks
        if self._family.image_ids:
            tokens.note_prompts(launched, self._are_of_prompts(chunks))
        if not self._have_items(rows):
            tokens.clear()
            return
        placed = self._place(chunks)
        tokens.fill(launched, placed.rows - placed.positions, placed.ends, placed.pieces)

    def _marks(self, rows: Rows, ids: np.ndarray) -> np.ndarray:
        """ids [T] of ``rows`` → [T] bool: the ones that experts of images serve. Generated ones are
        texts."""
        is_found = np.isin(ids, self._family.image_ids)
        return is_found & self._are_of_prompts(rows) if is_found.any() else is_found

    def _are_of_prompts(self, rows: Rows) -> np.ndarray:
        """[T] bool"""
        ends: np.ndarray = np.repeat(self._prompt_lens[rows.slots], rows.num_tokens)
        return self._indices(rows) < ends

    def _indices(self, rows: Rows) -> np.ndarray:
        """[T] int64, of the tokens in their sequences"""
        shifts = np.repeat(rows.ends - rows.token_ends, rows.num_tokens)
        indices: np.ndarray = np.arange(len(shifts)) + shifts
        return indices

    def _have_items(self, rows: Rows) -> bool:
        return bool(self._prompts) and not self._prompts.keys().isdisjoint(rows.slots.tolist())

    def _place(self, rows: Rows) -> _Placed:
        firsts, starts, ends = rows.token_ends - rows.num_tokens, rows.starts, rows.ends
        indices = self._indices(rows)
        positions = np.tile(indices, (self._rotations.num_axes, 1))
        seen_ends = indices + 1
        pieces: list[Piece] = []
        for slot, *places in np.stack((rows.slots, firsts, starts, ends), 1).tolist():
            if (prompt := self._prompts.get(slot)) is not None:
                if self._family.are_whole:
                    _note_ends(prompt.job.items, seen_ends, *places)
                pieces += self._place_row(prompt, positions, *places)
        shared = self._shared(pieces)
        return _Placed(indices, self._rotations.rows(positions), seen_ends, shared)

    def _place_row(
        self, prompt: _Prompt, positions: np.ndarray, first: int, start: int, end: int
    ) -> list[Piece]:
        """Fills in the positions of a row of ids from ``start`` to ``end``, in a step from the
        token ``first`` on."""
        positions[:, first : first + end - start] += prompt.delta
        known = prompt.positions[:, start:end]
        positions[:, first : first + known.shape[1]] = known
        pieces = [
            (places + first - start, part) for places, part in self._pieces(prompt, start, end)
        ]
        self._encoder.note_computed(prompt.job, end)
        return pieces

    def _shared(self, pieces: list[Piece]) -> list[Piece]:
        """With the features of the first rank, bit by bit."""
        if self._parallel.size == 1 or not pieces:
            return pieces
        places, parts = zip(*pieces, strict=True)
        shared = self._parallel.first(torch.cat(parts).float())
        return list(zip(places, shared.split([*map(len, places)]), strict=True))

    def reset(self) -> None:
        for slot in list(self._prompts):
            self._leave(slot)

    def _leave(self, slot: int) -> None:
        self._deltas[slot] = 0
        prompt = self._prompts.pop(slot, None)
        if prompt is not None:
            self._encoder.drop(prompt.job)

    def _prompt(self, row: Admit, buffers: Mapping[bytes, Array]) -> _Prompt:
        num = row.prompt_len
        positions = self._family.positions(row.items, num)
        items = [item for item in row.items if item.end > row.num_cached]
        pixels = {each.digest: buffers[each.digest] for each in items if each.digest in buffers}
        job = Job(row.request, row.attempt, num, items, pixels)
        return _Prompt(positions, int(positions.max()) + 1 - num, job)

    def _pieces(self, prompt: _Prompt, start: int, end: int) -> list[Piece]:
        """The places and features of the prompt's ids from ``start`` to ``end``."""
        found = []
        for item in prompt.job.items:
            if item.start < end and start < item.end:
                is_feature = np.isin(self._family.ids(item.size), self._placeholders)
                places = np.flatnonzero(is_feature) + item.start
                low, high = np.searchsorted(places, (start, end))
                features = self._encoder.features(prompt.job, item)
                if features.is_cuda:  # made on the tower's stream
                    features.record_stream(torch.cuda.current_stream(features.device))
                found.append((places[low:high], features[low:high]))
        return found

    def _embeddings(self, batch: Batch, pieces: list[Piece], marks: np.ndarray) -> Tensor | None:
        num, num_marks = self._family.num_embeddings, bool(self._family.image_ids)
        if not self._parallel.stage.is_first:
            return torch.from_numpy(marks).float()[None, :, None] if marks.any() else None
        if not pieces and not marks.any():
            return None
        own = self._embed(self._filled(batch.input_ids, pieces))
        inputs = torch.cat((own[None], own.new_zeros(num - 1 + num_marks, *own.shape)))
        for places, part in pieces:
            found = by_embedding(part, num).to(inputs.dtype)
            inputs[:num, torch.from_numpy(places), : found.shape[2]] = found
        if num_marks:
            inputs[num] = torch.from_numpy(marks)[:, None]
        return inputs

    def _filled(self, ids: Tensor, pieces: list[Piece]) -> Tensor:
        """[T] → [T], with the family's filler in place of features"""
        if self._family.filler is None:
            return ids
        filled = ids.clone()
        for places, _ in pieces:
            filled[torch.from_numpy(places)] = self._family.filler
        return filled


def _note_ends(
    items: Sequence[Item], seen_ends: np.ndarray, first: int, start: int, end: int
) -> None:
    """Tokens of an item see all of it; a step's token ``first`` is at ``start``. Raises ValueError
    if the step does not compute an item to its end."""
    for item in items:
        if item.start < end and start < item.end:
            if end < item.end:
                raise ValueError(
                    f"a step ends at the id {end}, within an item from {item.start} to {item.end}"
                )
            seen_ends[first + max(0, item.start - start) : first + item.end - start] = item.end


def _with_ends(context: ForwardContext, ends: np.ndarray) -> ForwardContext:
    groups = [
        each._replace(attention=replace(cast(AttentionBatch, each.attention), ends=ends))
        for each in context.groups
    ]
    return replace(context, groups=groups)
