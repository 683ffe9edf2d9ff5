"""gpt-oss's product of gates and ups."""

from typing import NamedTuple


class Clamp(NamedTuple):
    """(up + 1) · gate · σ(``alpha`` · gate), with gates ≤ ``limit`` and ups within ± ``limit``."""

    alpha: float
    limit: float
