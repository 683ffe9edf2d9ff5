"""Token counts of prompts and answers: a constant, or a distribution."""

from dataclasses import dataclass
from math import log

import numpy as np

MAX_LENGTH = 1_000_000
MAX_SIGMA = 10.0
FORMS = {
    "uniform": "uniform:lowest,highest",
    "normal": "normal:mean,sd",
    "lognormal": "lognormal:median,sigma (sigma is the sd of the logarithm)",
}


@dataclass(frozen=True)
class Lengths:
    """``kind`` is a key of FORMS, or ``fixed``, which uses ``first`` only."""

    kind: str
    first: float
    second: float = 0.0

    @staticmethod
    def parse(text: str) -> "Lengths":
        """Raises ValueError with the text and the allowed forms."""
        kind, colon, rest = text.partition(":")
        words = rest.split(",") if colon else [text]
        try:
            if colon and (kind not in FORMS or len(words) != 2):
                raise ValueError
            lengths = Lengths(kind if colon else "fixed", *map(float, words))
        except ValueError:
            raise ValueError(f"'{text}' is neither a number nor one of {_forms()}") from None
        lengths._check(text)
        return lengths

    def _check(self, text: str) -> None:
        if not 1 <= self.first <= MAX_LENGTH:
            raise ValueError(f"'{text}': {self.first:.10g} is not from 1 to {MAX_LENGTH}")
        if self.kind in ("fixed", "uniform") and not (self.first % 1 == self.second % 1 == 0):
            raise ValueError(f"'{text}' is not in whole tokens")
        low, high = {
            "uniform": (self.first, MAX_LENGTH),
            "lognormal": (0, MAX_SIGMA),
        }.get(self.kind, (0, MAX_LENGTH))
        if not low <= self.second <= high:
            raise ValueError(f"'{text}': {self.second:g} is not from {low:.10g} to {high:.10g}")

    def draw(self, num: int, rng: np.random.Generator) -> list[int]:
        """``num`` lengths from 1 to MAX_LENGTH."""
        drawn = np.full(num, self.first)
        if self.kind == "uniform":
            drawn = rng.integers(int(self.first), int(self.second), size=num, endpoint=True) * 1.0
        elif self.kind == "normal":
            drawn = rng.normal(self.first, self.second, size=num)
        elif self.kind == "lognormal":
            drawn = rng.lognormal(log(self.first), self.second, size=num)
        return [int(each) for each in np.clip(np.rint(drawn), 1, MAX_LENGTH)]

    def __str__(self) -> str:
        if self.kind == "fixed":
            return f"{self.first:.10g}"
        return f"{self.kind}:{self.first:.10g},{self.second:.10g}"


def _forms() -> str:
    return ", ".join(FORMS.values())
