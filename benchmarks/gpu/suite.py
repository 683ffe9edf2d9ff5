"""What is measured, and how much of it: on a card, and in a test on a CPU."""

from dataclasses import dataclass

import torch

from benchmarks.gpu.shapes import LLAMA_1B, QWEN3_8B, TINY, Config, with_mtp


@dataclass(frozen=True)
class Suite:
    """``model`` serves and drafts, in MiMo's layout; ``small`` shows what does not scale."""

    model: Config
    small: Config
    device: torch.device
    dtype: torch.dtype
    prompt_len: int
    output_len: int
    batches: tuple[int, ...]
    mesh_batches: tuple[int, ...]
    contexts: tuple[int, ...]  # of rows that decode, for the kernels
    chunks: tuple[int, ...]  # tokens of a prompt, for the kernels
    nums_tokens: tuple[int, ...]  # of products, for the kernels
    read_bytes: int  # for the bandwidth
    rotated_bytes: int  # what a kernel reads before it reads the same once more

    @property
    def models(self) -> dict[str, Config]:
        return {"model": self.model, "mtp": with_mtp(self.model), "small": self.small}

    @property
    def max_model_len(self) -> int:
        """A block more than needed, and drafts."""
        return -(-(self.prompt_len + self.output_len + 16) // 16) * 16

    @property
    def num_blocks(self) -> int:
        """Of 16 tokens: room for every sequence of the largest batch."""
        return max(self.batches) * self.max_model_len // 16


def of_card() -> Suite:
    return Suite(
        model=QWEN3_8B,
        small=LLAMA_1B,
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        prompt_len=512,
        output_len=256,
        batches=(1, 8, 32, 128),
        mesh_batches=(1, 8, 32),
        contexts=(512, 4096, 32768),
        chunks=(512, 2048, 8192),
        nums_tokens=(1, 8, 32, 64),
        read_bytes=8 << 30,
        rotated_bytes=512 << 20,  # eight times the L2 of an H200
    )


def of_test() -> Suite:
    """Seconds on a CPU: the figures mean nothing."""
    return Suite(
        model=TINY,
        small=TINY,
        device=torch.device("cpu"),
        dtype=torch.float32,
        prompt_len=20,
        output_len=12,
        batches=(1, 2),
        mesh_batches=(2,),
        contexts=(64,),
        chunks=(32,),
        nums_tokens=(1, 2),
        read_bytes=1 << 20,
        rotated_bytes=1 << 10,
    )
