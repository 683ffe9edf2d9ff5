"""The seam for settings under the names of other servers."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Known(NamedTuple):
    """A foreign setting: ``name`` is our equivalent; without one there is a ``reason``. A flag
    without a value stands for ``value``."""

    takes_value: bool
    name: str = ""
    value: str = ""
    reason: str = ""


class NamesElsewhere:
    """Foreign settings, with underscores as in a file; the defaults know none.

    ``short`` are flags of a letter or two, by the names they stand for. ``variables`` have no
    effect, for a reason each. A server without a ``protecting`` setting would be open: the text is
    advice.
    """

    short: Mapping[str, str] = {}
    variables: Mapping[str, str] = {}
    protecting: Mapping[str, str] = {}
    protecting_variables: Mapping[str, str] = {}

    def find(self, name: str) -> Known | None:
        """The setting ``name``, with or without ``no_`` before a boolean flag."""
        return None

    def value(self, setting: str, value: Any) -> Any:
        """A ``value`` of our ``setting``, under our name."""
        return value

    def speculation(self, given: dict[str, Any]) -> dict[str, Any]:
        """The keys of ``speculative-config``, under our names."""
        return given
