"""Negative codes in place of a token that could not be sampled."""

NOT_FINITE = -1  # the logits have a NaN or an infinity
NOTHING_LEFT = -2  # the request's rules hide every token
NOT_COMPILED = -3  # the mask of a grammar that is not compiled yet
