"""Settings of CUDA graphs."""

from typing import Literal

from pydantic import Field

from shared.settings.base import Settings
from shared.settings.fields import Sizes


class GraphSettings(Settings):
    """Of a worker."""

    enforce_eager: bool = Field(False, description="on a GPU: no CUDA graphs")
    cudagraph_mode: Literal["full", "full_decode_only"] = Field(
        "full",
        description="on a GPU: steps captured as CUDA graphs; full_decode_only: decode steps;"
        " full: also forward passes with prompts",
    )
    cudagraph_capture_sizes: Sizes = Field(
        [1, 4, 16, 32, 64, 96, 128, 256],
        description="on a GPU: numbers of sequences captured as CUDA graphs, up to max-num-seqs;"
        " with cudagraph-mode full also numbers of tokens of steps with prompts",
    )
