"""A step from its logits to its drafts: recorded or as it comes, with prompt chunks or without."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.decode_inputs import DecodeInputs
from kernels.mtp_inputs import note_pairs, step_pairs
from kernels.paged_attention import DecodeRows
from services.worker.context import ForwardContext, forward_context
from services.worker.device.chunks import Chunks
from services.worker.device.segments import Forwarded, Judged, SampledRows, Segments

Run = Callable[[], None]
Record = Callable[[Run], Run]  # runs it; what is given back runs it again, on the same tensors


class Step(Protocol):
    """To be called in this order. ``slots`` [R] int32 are those of the rows that sample."""

    slots: Tensor

    def forward(self) -> Tensor:
        """logits [R * w, V] of R rows with up to w tokens each."""

    def judge(self, adjusted: Tensor | None) -> Judged:
        """``adjusted`` [R * w, V] are what is drawn from, if not the logits."""

    def draft(self, depth: int) -> None:
        """``depth`` drafts of each, which has an MTP head."""


class DecodeStep:
    """B rows of w tokens; ``slots`` and ``depths`` [B] int32 are read anew each time."""

    def __init__(
        self,
        segments: Segments,
        slots: Tensor,
        depths: Tensor,
        width: int,
        max_keys: int,
        logits: Tensor | None = None,
    ) -> None:
        """``logits`` [B * w, V] are where these come, if that matters."""
        self.slots = slots
        self.width = width
        self._segments = segments
        self._depths = depths
        self._max_keys = max_keys
        self._logits = logits
        self._forwarded: Forwarded
        self._judged: Judged
        self._out: Tensor  # [B, hidden]
        # By name. A part that is not there is run: if it were kept as it is, the step would know
        # itself, and its tensors would wait for the garbage collector.
        self._recorded: dict[str, Run] = {}

    def record(self, record: Record) -> None:
        """From now on its parts are replayed."""
        parts = [self._forward, self._judge]
        if self._segments.drafts:
            parts += [self._first_draft, self._next_draft]
        self._recorded = {part.__name__: record(part) for part in parts}

    def forward(self) -> Tensor:
        self._run(self._forward)
        return self._forwarded.logits

    def judge(self, adjusted: Tensor | None) -> Judged:
        if adjusted is None:
            self._run(self._judge)
            return self._judged
        judged = self._segments.judge(self._sampled(), self._forwarded.logits, adjusted)
        if self._recorded:  # what was recorded goes on with its own tensors
            for ours, theirs in zip(_tensors(self._judged), _tensors(judged), strict=True):
                ours.copy_(theirs)
        else:
            self._judged = judged
        return self._judged

    def draft(self, depth: int) -> None:
        self._run(self._first_draft)
        for _ in range(depth - 1):
            self._run(self._next_draft)

    def _run(self, part: Run) -> None:
        self._recorded.get(part.__name__, part)()

    def _forward(self) -> None:
        self._forwarded = self._segments.forward(
            self.slots, self._depths, self.width, self._max_keys, self._logits
        )

    def _judge(self) -> None:
        logits = self._forwarded.logits
        self._judged = self._segments.judge(self._sampled(), logits, logits)

    def _sampled(self) -> SampledRows:
        inputs = self._forwarded.inputs
        return SampledRows(self.slots, inputs.token_slots, inputs.next_positions, inputs.num_valid)

    def _first_draft(self) -> None:
        inputs, hidden = self._forwarded.inputs, self._forwarded.hidden
        self._out = self._segments.first_draft(
            self.slots, inputs, hidden, self._judged, self._max_keys
        )

    def _next_draft(self) -> None:
        self._segments.next_draft(self.slots, self._out, self._max_keys)


class MixedStep:
    """Rows that decode, B of w tokens, if any, and prompt chunks: as it comes, never recorded."""

    def __init__(
        self,
        segments: Segments,
        decoding: Tensor,
        depths: Tensor,
        width: int,
        max_keys: int,
        chunks: Chunks,
    ) -> None:
        """``decoding`` and ``depths`` [B] int32."""
        self.slots = torch.cat((decoding, chunks.sampling_slots))
        self.hidden: Tensor  # [B * w + T, hidden]
        self._segments = segments
        self._decoding = decoding
        self._depths = depths
        self._width = width
        self._max_keys = max_keys
        self._chunks = chunks
        self._inputs: DecodeInputs
        self._logits: Tensor
        self._judged: Judged

    @property
    def num_decoded(self) -> int:
        """Tokens of rows that decode."""
        return len(self._decoding) * self._width

    def forward(self) -> Tensor:
        segments, chunks = self._segments, self._chunks
        inputs = segments.inputs(self._decoding, self._depths, self._width)
        rows = segments.decode_rows(self._decoding, inputs.starts, self._width)
        attention = segments.attention(self._if_any(rows), self._max_keys, chunks.rows)
        places = torch.cat((inputs.places, chunks.places))
        with forward_context(ForwardContext(segments.kv_cache.layers, places, attention)):
            self.hidden = segments.model(
                torch.cat((inputs.input_ids, chunks.input_ids)),
                torch.cat((inputs.positions, chunks.positions)),
            )
        self._inputs = inputs
        ending = chunks.last_tokens[:, None].expand(-1, self._width).flatten()
        sampled = torch.cat((self._decoded(), self.num_decoded + ending))
        if len(sampled):
            self._logits = segments.model.logits(self.hidden[sampled])
        else:
            self._logits = self.hidden.new_zeros(0, 1)
        return self._logits

    def judge(self, adjusted: Tensor | None) -> Judged:
        inputs, chunks, width = self._inputs, self._chunks, self._width
        positions = chunks.positions[chunks.last_tokens] + 1
        sampled = SampledRows(
            self.slots,
            torch.cat((inputs.token_slots, chunks.sampling_slots.repeat_interleave(width))),
            torch.cat((inputs.next_positions, positions.repeat_interleave(width))),
            torch.cat((inputs.num_valid, torch.ones_like(chunks.sampling_slots))),
        )
        scores = self._logits if adjusted is None else adjusted
        self._judged = self._segments.judge(sampled, self._logits, scores)
        return self._judged

    def draft(self, depth: int) -> None:
        """Where no row samples, the pairs alone are computed."""
        out = self._pair()
        if not len(self.slots):
            return
        num_emitted = self._judged.accepted.num_emitted
        decoding = torch.arange(len(self._decoding), device=out.device) * self._width
        last = decoding + (num_emitted[: len(decoding)] - 1).clamp(min=0)
        last = out[torch.cat((last, self.num_decoded + self._chunks.last_tokens))]
        self._segments.draw(self.slots, last, num_emitted)
        for _ in range(depth - 1):
            self._segments.next_draft(self.slots, last, self._max_keys)

    def _pair(self) -> Tensor:
        """The pairs of all tokens of the step: [B * w + T, hidden]."""
        segments, chunks, state = self._segments, self._chunks, self._segments.state
        num_rows, size = len(self._decoding), segments.kv_cache.block_size
        tokens = self._sampled()
        pairs = step_pairs(
            *(state, self._decoding, self._inputs.starts, self._inputs.num_valid),
            *(tokens[:num_rows], size, segments.null_block),
        )
        note_pairs(state, chunks.slots, chunks.rows.starts + 1, chunks.nums)
        ending = tokens[num_rows:, 0].clamp(min=0).int()
        next_ids = chunks.next_ids.index_copy(0, chunks.last_tokens, ending)
        rows = segments.decode_rows(self._decoding, pairs.starts, self._width, pairs.first_keys)
        pair_rows = chunks.pair_rows(state)
        attention = segments.attention(self._if_any(rows), self._max_keys + 1, pair_rows)
        places = torch.cat((pairs.places, chunks.next_places))
        with forward_context(ForwardContext(segments.kv_cache.layers, places, attention)):
            return segments.model.mtp(
                self.hidden,
                torch.cat((pairs.input_ids, next_ids)),
                torch.cat((pairs.positions, chunks.positions)),
            )

    def _sampled(self) -> Tensor:
        """Tokens [R, w], of which there may be none."""
        if len(self.slots):
            return self._judged.tokens
        return self._chunks.last_tokens.new_zeros(0, self._width)

    def _decoded(self) -> Tensor:
        return torch.arange(self.num_decoded, device=self.slots.device)

    def _if_any(self, rows: DecodeRows) -> DecodeRows | None:
        return rows if len(rows.slots) else None


def _tensors(values: tuple[Any, ...]) -> Iterator[Tensor]:
    """Of nested tuples, in order."""
    for value in values:
        if isinstance(value, tuple):
            yield from _tensors(value)
        else:
            yield value
