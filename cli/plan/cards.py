"""GPUs for plans, with their makers' figures; none was measured."""

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Card:
    """``memory_gib`` of memory with ``gb_per_s`` of bandwidth; ``tflops`` of dense bfloat16
    GEMMs."""

    name: str
    memory_gib: float
    gb_per_s: float
    tflops: float

    @property
    def memory(self) -> int:
        return int(self.memory_gib * GIB)


# NVIDIA's data sheets; part of the nominal memory is not usable.
CARDS = {
    card.name: card
    for card in (
        Card("a10", 22.5, 600, 125),
        Card("a100-40", 39.4, 1_555, 312),
        Card("a100-80", 79.2, 2_039, 312),
        Card("b200", 178, 7_700, 2_250),
        Card("h20", 95.1, 4_000, 148),
        Card("h100", 79.1, 3_350, 989),
        Card("h200", 139.8, 4_800, 989),
        Card("l4", 22.2, 300, 121),
        Card("l40s", 44.4, 864, 362),
        Card("rtx-4090", 23.5, 1_008, 165),
    )
}
