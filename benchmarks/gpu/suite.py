"""Models and sizes of the measurements: on a GPU, and in a test on a CPU."""

from dataclasses import dataclass

import torch

from benchmarks.gpu.shapes import (
    LLAMA_1B,
    MIXTURES,
    QWEN3_8B,
    TINY,
    TINY_MIXTURES,
    Config,
    Mixture,
    with_mtp,
)

BLOCK_SIZE = 16  # tokens


@dataclass(frozen=True)
class Suite:
    """``model`` serves and drafts, in MiMo's layout; ``small`` shows costs that do not scale."""

    model: Config
    small: Config
    mixtures: dict[str, Mixture]  # for kernels
    device: torch.device
    dtype: torch.dtype
    prompt_len: int
    short_prompt_len: int  # prompts that join in a graph
    output_len: int
    prompts: tuple[int, ...]  # tokens of prompts measured alone
    batches: tuple[int, ...]
    mesh_batches: tuple[int, ...]
    contexts: tuple[int, ...]  # of decode rows, for kernels
    chunks: tuple[int, ...]  # tokens of a prefill chunk, for kernels
    nums_tokens: tuple[int, ...]  # of GEMMs, for kernels
    read_bytes: int  # for the bandwidth
    rotated_bytes: int  # a kernel reads this much before it reads the same again
    draft_vocab_size: int  # size of a restricted draft vocabulary
    product_size: int  # size of the square GEMM that is the ceiling

    @property
    def models(self) -> dict[str, Config]:
        return {"model": self.model, "mtp": with_mtp(self.model), "small": self.small}

    @property
    def max_model_len(self) -> int:
        return max(self._decoded_len, _in_blocks(max(self.prompts) + 1) * BLOCK_SIZE)

    @property
    def num_blocks(self) -> int:
        """Blocks for every sequence of the largest batch, and for the longest prompt."""
        num_tokens = max(max(self.batches) * self._decoded_len, self.max_model_len)
        return num_tokens // BLOCK_SIZE

    @property
    def _decoded_len(self) -> int:
        """Tokens of a sequence of a batch, with a spare block for drafts."""
        return (_in_blocks(self.prompt_len + self.output_len) + 1) * BLOCK_SIZE


def _in_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def of_card() -> Suite:
    return Suite(
        model=QWEN3_8B,
        small=LLAMA_1B,
        mixtures=MIXTURES,
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        prompt_len=512,
        short_prompt_len=100,
        output_len=256,
        prompts=(512, 2048, 8192),
        batches=(1, 8, 32, 128),
        mesh_batches=(1, 8, 32),
        contexts=(512, 4096, 32768),
        chunks=(512, 2048, 8192),
        nums_tokens=(1, 8, 32, 64),
        read_bytes=8 << 30,
        rotated_bytes=512 << 20,  # eight times the L2 of an H200
        draft_vocab_size=32768,
        product_size=8192,
    )


def of_test() -> Suite:
    """Takes seconds on a CPU; the figures mean nothing."""
    return Suite(
        model=TINY,
        small=TINY,
        mixtures=TINY_MIXTURES,
        device=torch.device("cpu"),
        dtype=torch.float32,
        prompt_len=20,
        short_prompt_len=6,
        output_len=12,
        prompts=(16, 48),
        batches=(1, 2),
        mesh_batches=(2,),
        contexts=(64,),
        chunks=(32,),
        nums_tokens=(1, 2),
        read_bytes=1 << 20,
        rotated_bytes=1 << 10,
        draft_vocab_size=128,
        product_size=64,
    )


def of_launches() -> Suite:
    """One layer of each model in its real sizes, on a CPU, to compile the kernels."""
    return Suite(
        model=QWEN3_8B | {"num_hidden_layers": 1},
        small=LLAMA_1B | {"num_hidden_layers": 1},
        mixtures={name: each._replace(num_experts=16) for name, each in MIXTURES.items()},
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        prompt_len=32,
        short_prompt_len=16,
        output_len=16,
        prompts=(128,),
        batches=(1, 32),
        mesh_batches=(1,),
        contexts=(512,),
        chunks=(256,),
        nums_tokens=(1, 8, 32, 64),
        read_bytes=1 << 20,
        rotated_bytes=1,
        draft_vocab_size=32768,
        product_size=64,
    )
