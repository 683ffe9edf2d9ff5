"""A decode step, recorded or eager."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from services.worker.engine.device.segments import (
    ForwardOutput,
    SampledRows,
    SamplerOutput,
    Segments,
)
from services.worker.step.sampler import Adjusted

Run = Callable[[], None]
Record = Callable[[Run], Run]  # runs it; returns a call that repeats it on the same tensors


@dataclass(eq=False)
class DecodeStep:
    """B decode rows of ``width`` tokens. Each run reads ``slots`` and ``depths`` [B] int32 again.
    ``logits`` [B * width, V] and ``out`` [B, hidden], the MTP head's output for the last pair of
    each row, are optional buffers for these results."""

    segments: Segments
    slots: Tensor
    depths: Tensor
    width: int
    max_keys: int
    logits: Tensor | None = None
    out: Tensor | None = None
    _forwarded: ForwardOutput = field(init=False)
    _sampler_output: SamplerOutput = field(init=False)
    # By name; a part not recorded runs eagerly. Bound methods are not kept here: the step would
    # refer to itself, and only the garbage collector would free its tensors.
    _recorded: dict[str, Run] = field(default_factory=dict)

    def record(self, record: Record, next_draft: Run | None = None) -> None:
        """Records the step's parts; later runs replay them. ``next_draft``, if given, was recorded
        by a step with the same ``slots`` and ``out``: it does not depend on ``width``."""
        parts = [self._forward, self._sample_and_accept]
        if self.segments.drafts:
            parts.append(self._first_draft)
        self._recorded = {part.__name__: record(part) for part in parts}
        if self.segments.drafts and self.segments.state.max_drafts > 1:
            name = self._next_draft.__name__
            self._recorded[name] = next_draft or record(self._next_draft)

    @property
    def next_draft(self) -> Run | None:
        """The recorded part, if any."""
        return self._recorded.get(self._next_draft.__name__)

    def forward(self) -> Tensor:
        """Returns logits [B * width, V]."""
        self._run(self._forward)
        return self._forwarded.logits

    def sample_and_accept(self, adjusted: Adjusted | None) -> SamplerOutput:
        """Samples from ``adjusted``, or from the logits."""
        if adjusted is None:
            self._run(self._sample_and_accept)
            return self._sampler_output
        sampler_output = self.segments.sample_and_accept(
            self._sampled(), self._forwarded.logits, *adjusted
        )
        if self._recorded:  # recorded parts read their own tensors
            for ours, theirs in zip(
                _tensors(self._sampler_output), _tensors(sampler_output), strict=True
            ):
                ours.copy_(theirs)
        else:
            self._sampler_output = sampler_output
        return self._sampler_output

    def draft(self, depth: int) -> None:
        """Makes ``depth`` drafts for each row with the MTP head."""
        self._run(self._first_draft)
        for _ in range(depth - 1):
            self._run(self._next_draft)

    def _run(self, part: Run) -> None:
        self._recorded.get(part.__name__, part)()

    def _forward(self) -> None:
        self._forwarded = self.segments.forward(
            self.slots, self.depths, self.width, self.max_keys, self.logits
        )

    def _sample_and_accept(self) -> None:
        logits = self._forwarded.logits
        self._sampler_output = self.segments.sample_and_accept(self._sampled(), logits, logits)

    def _sampled(self) -> SampledRows:
        inputs = self._forwarded.inputs
        return SampledRows(self.slots, inputs.token_slots, inputs.next_positions, inputs.num_valid)

    def _first_draft(self) -> None:
        inputs, hidden = self._forwarded.inputs, self._forwarded.hidden
        self.out = self.segments.first_draft(
            self.slots, inputs, hidden, self._sampler_output, self.max_keys, self.out
        )

    def _next_draft(self) -> None:
        assert self.out is not None
        self.segments.next_draft(self.slots, self.out, self.max_keys)


def _tensors(values: tuple[Any, ...]) -> Iterator[Tensor]:
    """Yields the tensors of nested tuples, in order."""
    for value in values:
        if isinstance(value, tuple):
            yield from _tensors(value)
        else:
            yield value
