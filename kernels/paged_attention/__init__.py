"""Attention of the tokens of one step over keys and values in a paged cache.

Decode rows and prefill chunks share a call. ``AttentionBatch`` is prepared once a step, on the
host; every layer then calls ``paged_attention`` with it. torch's fused attention serves every
device.
"""

from kernels.paged_attention.batch import AttentionBatch, prepare_attention
from kernels.paged_attention.grouped import paged_attention

__all__ = ["AttentionBatch", "paged_attention", "prepare_attention"]
