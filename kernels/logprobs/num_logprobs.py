"""How many of the likeliest tokens a slot gets the logprobs of."""

MAX_TOP = 20  # of ``logprobs_slots``
NO_LOGPROBS = -2  # not even that of the sampled token
