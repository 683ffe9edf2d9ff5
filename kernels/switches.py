"""Choices of kernels that measurements on GPUs decide.

They are read at each launch, so that a graph has what they were when it was captured.
``make gpu-check`` measures each beside the others.
"""

# Keys that a split of attention takes in turn: of few, a row has more programs and more to add up.
SPLIT_KEYS = 128
# Norms, GEMMs, rotation and attention of few tokens are launched before the launch in front of them
# has ended, where a GPU can do that: 3 % of a step on an H200, up to 32 rows.
DEPENDENT_LAUNCHES = True
# Query heads of a KV head, at most, that a program takes of a prompt's tokens, a power of two: with
# more of them it has fewer tokens, so that short chunks leave less of it empty.
PROMPT_HEADS = 4
