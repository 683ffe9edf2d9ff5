"""What stands in place of a token where none can be sampled."""

NOT_FINITE = -1  # the logits have a NaN or an infinity
NOTHING_LEFT = -2  # what requests change has hidden all of them
NOT_COMPILED = -3  # a grammar says which may come, and it is not compiled yet
