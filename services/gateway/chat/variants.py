"""The seam between requests and variants of the model, which have names of their own."""

from collections.abc import Sequence
from typing import Protocol

from shared.wire.envelope import RequestOptions
from shared.wire.messages import ModelInfo


class Variants(Protocol):
    """Variants of one kind."""

    def names(self, model: ModelInfo) -> Sequence[str]:
        """Their names, in addition to those of ``model``."""

    def with_variant(self, options: RequestOptions, name: str) -> RequestOptions:
        """The options of a request for ``name``, which may be the model itself. Raises NotFound for
        a variant that is gone."""
