"""One choice of one prompt, from admission to its end."""

from dataclasses import dataclass, field

import numpy as np

from shared.messages import FinishReason, SamplingParams


@dataclass(slots=True, eq=False)
class Sequence:
    """What the scheduler knows of a sequence.

    ``order`` is its place in the line, kept when it has to wait again; ``route`` the peer it
    belongs to; ``num_computed`` of its known ids have their KV in ``blocks`` once the plan in
    flight has run.
    """

    request: str
    attempt: int
    choice: int
    route: int
    order: int
    prompt: np.ndarray  # [prompt_len] int32
    params: SamplingParams
    emitted: list[int] = field(default_factory=list)
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    slot: int | None = None
    is_cancelled: bool = False
    num_worker_deaths: int = 0

    @property
    def key(self) -> tuple[str, int]:
        return self.request, self.attempt

    @property
    def num_known(self) -> int:
        return len(self.prompt) + len(self.emitted)

    @property
    def num_to_compute(self) -> int:
        return self.num_known - self.num_computed

    def known_ids(self) -> np.ndarray:
        """The prompt, then what was emitted: [num_known] int32."""
        return np.concatenate([self.prompt, np.array(self.emitted, np.int32)])

    def leave_worker(self) -> None:
        """Forgets slot, blocks and KV: all known ids are computed anew elsewhere."""
        self.slot = None
        self.blocks = []
        self.num_computed = 0


@dataclass(frozen=True, slots=True)
class Emission:
    """What a step brought for one sequence: ids ``start : start + num_tokens`` of the result.

    ``position`` counts the tokens before them. ``finish`` and ``error`` end the sequence.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    position: int
    finish: FinishReason | None
    error: str | None

    @property
    def ends(self) -> bool:
        return self.finish is not None or self.error is not None
