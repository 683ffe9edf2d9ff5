"""Kernel variants chosen by measurements on GPUs.

Kernels read them at each launch, so a captured graph keeps the values of its capture. ``make
gpu-check`` compares the variants.
"""

# Keys of an attention split per turn: with fewer, a row has more programs and more parts to
# combine.
SPLIT_KEYS = 128
# Norms, GEMMs, rotation and attention of few tokens start before the previous launch has ended,
# where a GPU supports it: 3 % of a step on an H200, up to 32 rows.
DEPENDENT_LAUNCHES = True
# The most query heads of a KV head per prefill program, a power of two: with more heads it has
# fewer tokens, so that short chunks leave less of it empty.
PROMPT_HEADS = 4
