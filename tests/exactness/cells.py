"""The dimensions of a cell, their values, and the cells of the page.

A new value is a line in ``DIMENSIONS`` and one in ``scenario.py``.
"""

from collections.abc import Mapping
from functools import cache
from itertools import product
from typing import NamedTuple

from tests.selection import cover


class Cell(NamedTuple):
    """A combination of circumstances under which a prompt is computed."""

    speculation: str
    history: str
    grammar: str
    logprobs: str
    company: str

    def __str__(self) -> str:
        return ", ".join(self)

    @property
    def baseline(self) -> "Cell":
        """The cell of the same request without drafts, with a new prompt, alone."""
        return self._replace(speculation="plain", history="cold", company="alone")


DIMENSIONS: Mapping[str, Mapping[str, str]] = {
    "speculation": {
        "plain": "no drafts",
        "MTP": "up to three drafts a step by the model's MTP head",
        "n-gram": "up to three drafts a step by prompt lookup",
    },
    "history": {
        "cold": "a new prompt",
        "prefix hit": "the prompt is in the prefix cache; not used with `prompt_logprobs`",
        "preempted": "sequences of an earlier priority take its slot; its KV is computed again",
        "killed": "the worker dies with a step in flight; another starts and replays",
        "moved": "the worker leaves and hands over to a second, which computes the known ids",
    },
    "grammar": {
        "free": "no grammar",
        "JSON": "the output follows a JSON schema",
    },
    "logprobs": {
        "none": "no logprobs",
        "scored": "`logprobs` 5 and `prompt_logprobs` 5",
    },
    "company": {
        "alone": "no other sequence, or only the ones of its history",
        "crowd": "five others of other seeds, lengths and options, from the start",
        "joined": "it joins two others that are decoding, and three more join later",
    },
}


def every_cell() -> list[Cell]:
    return [Cell(*values) for values in product(*DIMENSIONS.values())]


def one_cell() -> list[Cell]:
    """The baseline of all others."""
    return every_cell()[:1]


@cache
def covering_cells() -> list[Cell]:
    """Few cells with every pair of values of two dimensions."""
    return cover(every_cell())
