"""The promise for each cell: the first rule that fits it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from tests.exactness.cells import Cell
from tests.exactness.columns import Column


class Promise(Enum):
    SAME_BITS = "●"
    TO_ROUNDING = "≈"
    REFUSED = "✗"


@dataclass(frozen=True)
class Rule:
    """A promise for all cells with one of the values in each of ``where``.

    ``title`` and ``reason`` are for the page. Logprobs differ by ``tolerance`` at most. A refusal
    begins with ``words``.
    """

    promise: Promise
    where: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    title: str = ""
    reason: str = ""
    tolerance: float = 0.0
    words: str = ""

    def fits(self, column: Column, cell: Cell) -> bool:
        facts = column.facts(cell)
        return all(facts[name] in values for name, values in self.where.items())


HEADLESS = (
    *("windows", "convolutions", "Mamba-2", "decay per channel", "indexed", "shared keys"),
    *("images", "images, DeepStack", "images, experts", "transformers'"),
)

RULES = [
    Rule(
        Promise.REFUSED,
        {"column": ("convolutions, int8 KV",)},
        title="an 8-bit KV cache for short convolutions",
        reason="Codes exist for keys, values and latents alone.",
        words="kv-cache-dtype: int8 and fp8 are for keys, values and latents",
    ),
    Rule(
        Promise.REFUSED,
        {"column": ("transformers', wint8",)},
        title="quantized weights for transformers' models",
        reason="transformers computes with the weights as they are stored.",
        words="quantization: wint8 is for our own architectures",
    ),
    Rule(
        Promise.REFUSED,
        {"column": ("transformers', two ranks",)},
        title="ranks for transformers' models",
        reason="Only our own layers can be divided.",
        words="tensor-parallel-size: 2 is for our own architectures",
    ),
    Rule(
        Promise.REFUSED,
        {"column": ("transformers', two stages",)},
        title="stages for transformers' models",
        reason="Only our own layers can be divided.",
        words="pipeline-parallel-size: 2 is for our own architectures",
    ),
    Rule(
        Promise.REFUSED,
        {"model": HEADLESS, "speculation": ("MTP",)},
        title="MTP drafts for a model without an MTP head",
        reason="The head is a part of the checkpoint.",
        words="speculative-config: method mtp: the model has no MTP head",
    ),
    Rule(
        Promise.SAME_BITS,
        {"speculation": ("plain",), "history": ("cold",), "company": ("alone",)},
        title="the same request again",
        reason="All steps are the same.",
    ),
    Rule(
        Promise.SAME_BITS,
        {"kernels": ("native",)},
        title="native code",
        reason="The order of each sum depends on the sequence alone, not on the rest of the step.",
    ),
    Rule(
        Promise.TO_ROUNDING,
        {"column": ("int8 KV", "latent, int8 KV")},
        title="an 8-bit KV cache by torch's operators",
        reason="A key or value between two codes may round to the other one.",
        tolerance=0.05,
    ),
    Rule(
        Promise.TO_ROUNDING,
        {"dtype": ("float32",)},
        title="torch's operators in float32",
        reason="The order of a GEMM's sums depends on the number of tokens in the step.",
        tolerance=1e-4,
    ),
    Rule(
        Promise.TO_ROUNDING,
        {"dtype": ("bfloat16",), "model": ("experts", "latent attention", "windows")},
        title="mixtures of experts by torch's operators in bfloat16",
        reason="A rounded score of the router may choose another expert.",
        tolerance=1.5,
    ),
    Rule(
        Promise.TO_ROUNDING,
        {"dtype": ("bfloat16",)},
        title="torch's operators in bfloat16",
        reason="Each operator rounds to eight significant bits, too.",
        tolerance=0.2,
    ),
]


def rule_of(column: Column, cell: Cell) -> Rule:
    return next(rule for rule in RULES if rule.fits(column, cell))
