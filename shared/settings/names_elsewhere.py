"""The seam for settings under the names of other servers."""

import re
from collections.abc import Mapping, Set
from typing import Any, NamedTuple

from shared.errors import ConfigError

LISTS = {
    *("allowed_hosts", "allowed_origins", "api_key", "cudagraph_capture_sizes", "lora_modules"),
    "served_model_name",
}
"""Settings whose values vLLM and SGLang take as separate words."""
VALUE = re.compile(r"[^-].*|-\d.*|", re.DOTALL)  # a word that is no flag
TRUTHS = ("true", "false")


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

    def flags(self, arguments: list[str], known: Set[str]) -> list[str]:
        """``arguments`` with our names for settings. Other words are kept."""
        return arguments

    def name_of(self, flag: str) -> str:
        """The name in ``flag``, empty for any other word."""
        return flag[2:].replace("-", "_") if flag.startswith("--") else ""

    def find_harmless(self, given: str, name: str) -> Known | None:
        """As ``find``. Raises ConfigError for a setting whose absence would leave a server open."""
        if name in self.protecting:
            raise ConfigError(f"{given}: {self.protecting[name]}")
        return self.find(name)

    def find(self, name: str) -> Known | None:
        """The setting ``name``, with or without ``no_`` before a boolean flag."""
        return None

    def value(self, setting: str, value: Any) -> Any:
        """A ``value`` of our ``setting``, under our name."""
        return value

    def speculation(self, given: dict[str, Any]) -> dict[str, Any]:
        """The keys of ``speculative-config``, under our names."""
        return given
