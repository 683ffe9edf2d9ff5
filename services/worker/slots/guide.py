"""Hook for constraints on the output of a slot."""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from shared.wire.messages import SamplingParams


class NotCompiled(Exception):
    """The grammar has no matcher yet."""


class SlotGuide(Protocol):
    """Constrains an output. Its state is a function of the request's Guide and the emitted ids,
    however they arrived."""

    @property
    def error(self) -> str | None:
        """The reason why the output cannot go on; its masks then hide every id."""

    @property
    def is_too_complex(self) -> bool:
        """True if the grammar's complexity is the error."""

    @property
    def awaited(self) -> Future[Any] | None:
        """The compilation the next token waits for."""

    def note(self, token_ids: Iterable[int]) -> None:
        """``token_ids`` were emitted."""

    def mask(self, drafts: Sequence[int]) -> np.ndarray | None:
        """The ids allowed after the output and ``drafts``: [⌈V / 32⌉] int32, id i as bit i % 32 of
        word i // 32; None: all. Undefined after drafts that are not allowed. Raises NotCompiled."""

    def forced(self) -> list[int]:
        """The next ids without an alternative: good drafts. Other ids may spell the same text."""

    def leaves_ends_only(self, mask: np.ndarray) -> bool: ...


class Guides(Protocol):
    def begin(self, params: SamplingParams, emitted: np.ndarray) -> SlotGuide | None:
        """The guide of a sequence with ``params`` that has ``emitted`` [n] ids, if it wants one.
        There are no masks until its grammar is compiled."""
