"""A step from its logits to its drafts, and one that only decodes: recorded or as it comes."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor

from services.worker.engine.device.segments import (
    ForwardOutput,
    SampledRows,
    SamplerOutput,
    Segments,
)
from services.worker.step.sampler import Adjusted

Run = Callable[[], None]
Record = Callable[[Run], Run]  # runs it; what is given back runs it again, on the same tensors


class Step(Protocol):
    """To be called in this order. ``slots`` [R] int32 are those of the rows that sample, of
    ``width`` tokens each."""

    slots: Tensor
    width: int

    def forward(self) -> Tensor:
        """logits [R * w, V] of R rows with up to w tokens each."""

    def sample_and_accept(self, adjusted: Adjusted | None) -> SamplerOutput:
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
        out: Tensor | None = None,
    ) -> None:
        """``logits`` [B * w, V] and ``out`` [B, hidden], what the MTP head makes of the last pair
        of each row, are where these come, if that matters."""
        self.slots = slots
        self.width = width
        self._segments = segments
        self._depths = depths
        self._max_keys = max_keys
        self._logits = logits
        self._out = out
        self._forwarded: ForwardOutput
        self._sampler_output: SamplerOutput
        # By name. A part that is not there is run: if it were kept as it is, the step would know
        # itself, and its tensors would wait for the garbage collector.
        self._recorded: dict[str, Run] = {}

    def record(self, record: Record, next_draft: Run | None = None) -> None:
        """From now on its parts are replayed. ``next_draft``, if there is such, was recorded by a
        step with the same ``slots`` and ``out``: it does not depend on the tokens of a row."""
        parts = [self._forward, self._sample_and_accept]
        if self._segments.drafts:
            parts.append(self._first_draft)
        self._recorded = {part.__name__: record(part) for part in parts}
        if self._segments.drafts and self._segments.state.max_drafts > 1:
            name = self._next_draft.__name__
            self._recorded[name] = next_draft or record(self._next_draft)

    @property
    def next_draft(self) -> Run | None:
        """If it was recorded."""
        return self._recorded.get(self._next_draft.__name__)

    def forward(self) -> Tensor:
        self._run(self._forward)
        return self._forwarded.logits

    def sample_and_accept(self, adjusted: Adjusted | None) -> SamplerOutput:
        if adjusted is None:
            self._run(self._sample_and_accept)
            return self._sampler_output
        sampler_output = self._segments.sample_and_accept(
            self._sampled(), self._forwarded.logits, *adjusted
        )
        if self._recorded:  # what was recorded goes on with its own tensors
            for ours, theirs in zip(
                _tensors(self._sampler_output), _tensors(sampler_output), strict=True
            ):
                ours.copy_(theirs)
        else:
            self._sampler_output = sampler_output
        return self._sampler_output

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

    def _sample_and_accept(self) -> None:
        logits = self._forwarded.logits
        self._sampler_output = self._segments.sample_and_accept(self._sampled(), logits, logits)

    def _sampled(self) -> SampledRows:
        inputs = self._forwarded.inputs
        return SampledRows(self.slots, inputs.token_slots, inputs.next_positions, inputs.num_valid)

    def _first_draft(self) -> None:
        inputs, hidden = self._forwarded.inputs, self._forwarded.hidden
        self._out = self._segments.first_draft(
            self.slots, inputs, hidden, self._sampler_output, self._max_keys, self._out
        )

    def _next_draft(self) -> None:
        assert self._out is not None
        self._segments.next_draft(self.slots, self._out, self._max_keys)


def _tensors(values: tuple[Any, ...]) -> Iterator[Tensor]:
    """Yields the tensors of nested tuples, in order."""
    for value in values:
        if isinstance(value, tuple):
            yield from _tensors(value)
        else:
            yield value
