"""The model card: the model, its making, and the figures of evaluate.py."""

from pathlib import Path
from typing import Any

from models.training.checkpoint import Progress

CARD = """\
---
license: apache-2.0
language: [en]
pipeline_tag: text-generation
tags: [mimo, mtp, speculative-decoding, tiny]
---

# shoal-tiny

The model embedded in Shoal, so that the server, its streaming and its speculative decoding can be
tried without a download. **A demonstration, not a useful assistant**: it knows the kinds of
question listed below, says that it does not know in some other cases, and is wrong in the rest.

| | |
|---|---|
| parameters | {num_parameters:,}, of which {num_mtp_parameters:,} in the MTP layer |
| trunk | Qwen2 shape: 6 layers of width 256, 4 heads of 64 (2 key-value), MLP 768 |
| output head | the embedding |
| drafting | one MTP layer in MiMo layout (`model.mtp_layers.0`) |
| tokenizer | byte-level BPE, 8192 tokens, ChatML template |
| context | 2048 positions |
| weights | bfloat16 |

It loads as `Qwen2ForCausalLM` (leaving out `model.mtp_layers.*`) and needs no remote code. The MTP
layer reads `input_proj(cat[hidden_layernorm(h), token_layernorm(embed(t_next))])`, where h is the
trunk's output before `model.norm`; the embedding at position 0 is not zeroed.

## Data and licence

The text is CPython's standard library without its tests, and the language reference that comes
with it (`pydoc_data.topics`), both under the Python Software Foundation licence. Up to two thirds
of the tokens are dialogues from a seeded generator in `models/training`. Nothing else was read.
The weights are under the Apache License 2.0.

## Training

| run | phase | minutes | steps | tokens |
|---|---|---|---|---|
| first | trunk | 109 | 2,262 | 18,530,304 |
| first | MTP layer | 19 | 319 | 2,613,248 |
| second | trunk | {trunk_minutes:.0f} | {trunk.num_steps:,} | {trunk.num_tokens:,} |
| second | MTP layer | {mtp_minutes:.0f} | {mtp.num_steps:,} | {mtp.num_tokens:,} |

The trunk learns the next token, in dialogues only that of the answers. Then it is frozen and the
MTP layer learns to meet the trunk's own distribution, on three recursion steps that feed its own
output (weights 1, 0.7, 0.5). The second run begins with the weights of the first and brings the
tools.

Two CPU cores, bfloat16 autocast, 8192 tokens a step. Muon (steps scaled as AdamW's) for the
matrices between hidden states, AdamW (0.9, 0.95) for the rest; rate 2e-3, in the second run 1e-3,
with 200 warm-up steps (20 for the MTP layer), then a cosine down to a tenth; decay 0.1 on matrices;
gradients clipped at 1. In the second run rows have 1024 tokens, in the last fifth of the trunk's
phase 2048; 65 % of the tokens are dialogues, a quarter of which have tools.

In the first run rows had 512 tokens, in the last tenth 2048. Its trunk was continued twice and its
MTP layer once, each time with fresh optimizer moments and with the cosine taken up again at about
half its height; dialogues were 28 % of the tokens for the first 24 minutes, with 1,500 words to
spell and sort, then 38 % with 600, and in the last half hour half, with 150. The schedule followed
the clock then and follows the tokens now, so running both again gives other figures:

```
export OMP_WAIT_POLICY=passive
python -m models.training.train --out FIRST --muon --tokens 18530304 --mtp-tokens 2613248
python -m models.training.export --run FIRST --out first
python -m models.training.train --out RUN --start first --muon --rate 1e-3 \\
    --tokens {trunk.num_tokens} --mtp-tokens {mtp.num_tokens}
python -m models.training.export --run RUN --out models/shoal-tiny
python -m models.training.evaluate models/shoal-tiny > figures.json
python -m models.training.export --run RUN --out models/shoal-tiny --figures figures.json
```

## Figures

With the published bfloat16 weights, computed in float32.

**Text.** {bits_per_byte:.3f} bits per byte over {num_files} whole files that were held out
({num_bytes:,} bytes).

**Drafts.** Share of drafts accepted at each position, given that the drafts before it were. Text
continues held-out files, chat answers held-out questions. At temperature 1 draft and target share
their Gumbel noise.

| | 1st | 2nd | 3rd |
|---|---|---|---|
{acceptance}

**Answers.** Share of greedy answers that equal the expected one to the letter, over up to
{num_items} questions each. Held-out items (one sum, word, list or wording in twenty) were never
seen in training; taught ones come from the rest. With tools, of which one to three are offered, a
call is right if its name and all its arguments are, and the answer is what the model says when it
has read what the tool returned.

| template | held out | taught |
|---|---|---|
{exact_match}
"""


def table_row(*cells: object) -> str:
    """Return one row of a Markdown table."""
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def write_card(path: Path, figures: dict[str, Any], trunk: Progress, mtp: Progress) -> None:
    """Write the card with the figures that evaluate.py printed."""
    acceptance = [
        table_row(name, *(f"{share:.2f}" for share in shares))
        for name, shares in figures["acceptance"].items()
    ]
    exact_match = [
        table_row(name.replace("_", " "), f"{shares['held_out']:.0%}", f"{shares['taught']:.0%}")
        for name, shares in figures["exact_match"].items()
    ]
    card = CARD.format(
        **{name: value for name, value in figures.items() if not isinstance(value, dict)},
        trunk=trunk,
        mtp=mtp,
        trunk_minutes=trunk.elapsed_s / 60,
        mtp_minutes=mtp.elapsed_s / 60,
        acceptance="\n".join(acceptance),
        exact_match="\n".join(exact_match),
    )
    path.write_text(card)
