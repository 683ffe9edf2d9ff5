"""Writes docs/exactness.md from the columns and the rules (``make docs``)."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from tests.exactness.cells import DIMENSIONS, Cell, covering_cells, every_cell
from tests.exactness.columns import EVERY, TABLES, Column
from tests.exactness.rules import RULES, Promise, Rule, rule_of

PAGE = Path(__file__).parents[2] / "docs" / "exactness.md"
OPENING = """\
# Exactness

The same seed gives the same output: alone or in a crowd, with drafts, after preemption, a kill or a
move. This page says how exactly; a test computes each entry.

<!-- Written by `make docs` from tests/exactness; tests compare. -->

| | the output, compared with the same request computed from the start, alone, without drafts |
|---|---|
| ● | the same bits: token ids, text, finish reason and all logprobs |
| ≈ | the same to rounding: logprobs within a limit, and another token only for so close a score |
| ✗ | refused when the worker starts |

A score is a logprob plus temperature times the noise of seed and position. After one other token an
output goes its own way. Outputs are compared within a column; with logprobs, ids are also compared
with those of the request without logprobs.
"""
EVERY_OPENING = """\
## Every combination

The embedded model in bfloat16 by native code, as `make serve` runs it. *Scored*: with logprobs.
"""
PAIRS_OPENING = """\
## Every pair of circumstances

Other models, weights and backends: fifteen combinations have every pair of circumstances.

* *dense* is the embedded model, also in columns without a model; *wint8*, *wint4* and *int8 KV*
  are its forms ([quantization](quantization.md)).
* *experts* (GLM-4.5), *latent* (DeepSeek-V3), *windows* (gpt-oss), *convolutions* (LFM2),
  *states* (Qwen3.5; with *experts*: Qwen3-Next), *Mamba-2* (Granite 4), *decay per channel* (Kimi
  Linear), *indexed* (DeepSeek-V3.2), *shared keys* (Gemma 4), *images* (Qwen2.5-VL, cut by chunks
  and hits; with *DeepStack* Qwen3-VL, with *experts* ERNIE-4.5-VL) and *transformers'* (Phi-3) are
  tiny random checkpoints.
* Native code computes in bfloat16, others in float32, unless a column has another form.
* *The engine for GPUs* is computed by torch's operators here; its kernels: [gpu](gpu.md).
* *two ranks* and *two stages* are processes that share a model ([parallel](parallel.md)).
"""


def main() -> None:
    PAGE.write_text(page())


def page() -> str:
    """The text of docs/exactness.md."""
    tables = [f"### {title}\n\n{_pairs(columns)}" for title, columns in TABLES.items()]
    parts = [OPENING, _reasons(), _circumstances(), f"{EVERY_OPENING}\n{_every()}"]
    return "\n".join([*parts, PAIRS_OPENING, *tables])


def _reasons() -> str:
    rows = [[rule.promise.value, rule.title, _limit(rule), rule.reason] for rule in RULES]
    return "## Reasons\n\n" + table(["", "for", "limit or error", "reason"], rows)


def _limit(rule: Rule) -> str:
    if rule.promise is Promise.TO_ROUNDING:
        return f"logprobs within {rule.tolerance:g}"
    return f"`{rule.words}`" if rule.words else ""


def _circumstances() -> str:
    rows = [
        [name if number == 0 else "", value, meaning]
        for name, values in DIMENSIONS.items()
        for number, (value, meaning) in enumerate(values.items())
    ]
    return "## Circumstances\n\n" + table(["", "value", "meaning"], rows)


def _every() -> str:
    """A row for each speculation and history."""
    rows = [
        [*place, *(symbol(EVERY, cell) for cell in cells)]
        for place, cells in groupby(every_cell(), key=lambda cell: cell[:2])
    ]
    first = [cell for cell in every_cell() if cell[:2] == every_cell()[0][:2]]
    heads = [f"{cell.grammar}, {_is_scored(cell)}{cell.company}" for cell in first]
    return table(["speculation", "history", *heads], rows)


def _is_scored(cell: Cell) -> str:
    return "scored, " if cell.logprobs == "scored" else ""


def _pairs(columns: Sequence[Column]) -> str:
    rows = [[*cell, *(symbol(column, cell) for column in columns)] for cell in covering_cells()]
    return table([*Cell._fields, *(column.title for column in columns)], rows)


def symbol(column: Column, cell: Cell) -> str:
    return rule_of(column, cell).promise.value


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main()
