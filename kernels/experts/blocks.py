"""The pairs of a token and an expert that a GPU's program multiplies with some rows of a weight."""

# Not measured yet. With 128 experts, 8 of them chosen, an expert has 64 pairs at MANY_TOKENS, 256
# at VERY_MANY_TOKENS.
MAX_FEW_TOKENS, MANY_TOKENS, VERY_MANY_TOKENS = 64, 1024, 4096


def block_of(num_tokens: int, itemsize: int) -> int:
    """The pairs of a block, for a dense weight."""
    if num_tokens <= MAX_FEW_TOKENS:
        return 16
    if itemsize == 4 or num_tokens < MANY_TOKENS:
        return 64
    return 128 if num_tokens < VERY_MANY_TOKENS else 256
