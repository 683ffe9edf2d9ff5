"""The number of likeliest tokens a slot gets logprobs of."""

MAX_TOP = 20  # of ``logprobs_slots``
NO_LOGPROBS = -2  # none, not even for the sampled token
