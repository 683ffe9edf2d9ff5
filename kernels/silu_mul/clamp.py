"""gpt-oss's way to multiply gates and ups."""

from typing import NamedTuple


class Clamp(NamedTuple):
    """(up + 1) · gate · σ(``alpha`` · gate), of gates of ``limit`` at most and ups within
    ± ``limit``."""

    alpha: float
    limit: float
