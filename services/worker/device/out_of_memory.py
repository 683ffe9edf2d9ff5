"""What is said where a GPU's memory is short."""

import torch

from shared.errors import ConfigError

REMEDIES = "lower gpu-memory-utilization, max-num-batched-tokens or max-num-seqs"


def told(error: torch.OutOfMemoryError) -> str:
    """What was asked for, and what was free."""
    first, _, _ = str(error).partition(" Process")  # whose, and how the allocator may be set
    return first.strip()


def too_little(what: str, error: torch.OutOfMemoryError) -> ConfigError:
    """At the start; ``what`` begins with the setting that it is about."""
    return ConfigError(f"{what}: {told(error)}")
