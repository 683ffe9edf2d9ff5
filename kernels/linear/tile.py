"""What products of few tokens are cut in."""

TILE = 64  # tokens of a program, at most
