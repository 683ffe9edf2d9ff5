from pathlib import Path
from typing import Literal

from pydantic import Field

from shared.config.base import Settings
from shared.config.fields import Addresses, KVCacheDtype, Model, Sizes, WeightForm
from shared.config.pooler import POOLER_CONFIG, RUNNER, Pooler
from shared.config.shared_fields import MAX_MODEL_LEN, MODEL, SCHEDULER_ADDRESS
from shared.config.speculative import Speculative, SpeculativeConfig
from shared.messages import MAX_BATCHED_TOKENS, MAX_BLOCK_SIZE, MAX_BLOCKS, MAX_SEQS, MAX_STALL_S


class WorkerConfig(Settings):
    scheduler_address: Addresses = SCHEDULER_ADDRESS
    model: Model = MODEL
    max_model_len: int | None = MAX_MODEL_LEN
    runner: Literal["auto", "generate", "pooling"] = RUNNER
    pooler_config: Pooler = POOLER_CONFIG
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="auto: bfloat16 where the machine computes it, else float32"
    )
    model_impl: Literal["auto", "shoal", "transformers"] = Field(
        "auto",
        description="shoal: our own architectures; transformers: any decoder that transformers"
        " knows, computed by it; auto: our own where we have the architecture",
    )
    load_format: Literal["auto", "safetensors", "dummy"] = Field(
        "auto",
        description="auto, safetensors: the weights in the folder; dummy: random ones, for"
        " measurements",
    )
    quantization: WeightForm = Field(
        "none",
        description="quantise the weights of linear layers as they are loaded; wint8, fp8: 8 bits"
        " with a scale for each output; fp8_block: for each 128 inputs of 128 outputs; wint4, nf4:"
        " 4 bits with a scale for each 32, 64 inputs of an output; for our own architectures;"
        " a model that is quantised already needs no setting",
    )
    quantization_cache: Path | None = Field(
        None,
        description="folder that keeps weights as quantization made them, so that later starts with"
        " the same files read them (default: made at every start)",
    )
    activation_dtype: Literal["auto", "int8"] = Field(
        "auto",
        description="on a CPU with AVX512-VNNI: what quantised weights are multiplied with; auto:"
        " numbers of the model's dtype; int8: these rounded to whole numbers of 8 bits with a scale"
        " for each 128 of them or less: faster for many tokens at once, and a little less exact",
    )
    kv_cache_dtype: KVCacheDtype = Field(
        "auto",
        description="the KV cache; auto: numbers of the model's dtype; int8, fp8: codes of 8 bits"
        " (whole numbers, or float8_e4m3fn), with a scale for each head's key and value of a token;"
        " vLLM's int8_per_token_head, fp8_e4m3 and fp8_per_token_head are these too",
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpu_claims: Path | None = Field(
        None,
        description="folder in which the workers of a machine take a GPU each (default: torch's"
        " current GPU; under serve: a folder of its own)",
    )
    cpu_offload_gb: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="on a GPU: GiB of a worker's weights that are in the host's memory; they are"
        " whole layers, each copied to the GPU in every step, while those before it are computed;"
        " for our own architectures without experts",
    )
    native_kernels: bool = Field(
        True, description="on a CPU: compute with our native code where it can run the model"
    )
    attention_backend: Literal["triton", "sdpa"] = Field(
        "triton",
        description="on a GPU: our kernels, or torch's scaled_dot_product_attention over a copy of"
        " keys and values, to compare with (slow, and without CUDA graphs)",
    )
    enforce_eager: bool = Field(False, description="on a GPU: no CUDA graphs")
    cudagraph_capture_sizes: Sizes = Field(
        [1, 4, 16, 32, 64, 96, 128, 256],
        description="on a GPU: numbers of sequences whose steps are captured as CUDA graphs, with"
        " commas between, up to max-num-seqs; a step that only decodes takes the next larger one",
    )
    draft_acceptance: float | None = Field(
        None,
        ge=0,
        le=1,
        description="for measurements on a GPU: how likely a draft counts as right if those before"
        " it did, whatever it is; the output is not meaningful",
    )
    block_size: int = Field(16, gt=0, le=MAX_BLOCK_SIZE, description="tokens in one KV block")
    max_num_seqs: int = Field(128, gt=0, le=MAX_SEQS, description="sequences that run at once")
    max_num_batched_tokens: int | None = Field(
        None,
        gt=0,
        le=MAX_BATCHED_TOKENS,
        description="tokens a step computes (default: 512 on a CPU, 8192 on a GPU)",
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of the device's memory for weights, KV cache and peak"
    )
    speculative_config: Speculative = Field(
        SpeculativeConfig(),
        description='JSON object: "method" mtp (the model\'s own head; the default where it has'
        ' one), ngram (prompt lookup) or none; "num_speculative_tokens" (3); "adaptive" (true: as'
        ' many of these as pay); "prompt_lookup_min" (2) and "prompt_lookup_max" (4)',
    )
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = Field(
        "raw_logprobs",
        description="raw: as the model computes them; processed: after penalties, temperature and"
        " truncation, of the scores that are sampled from",
    )
    num_gpu_blocks_override: int | None = Field(
        None, gt=0, le=MAX_BLOCKS, description="KV blocks, instead of profiling"
    )
    kv_cache_memory_bytes: int | None = Field(
        None, gt=0, description="memory of the KV cache, instead of profiling (CPU: at most 4 GiB)"
    )
    num_threads: int | None = Field(
        None,
        gt=0,
        description="CPU threads (default: the cores we may use; but one for torch's operators)",
    )
    numa_node: int | None = Field(
        None,
        ge=0,
        description="on a CPU: the NUMA node on whose cores and in whose memory this worker runs"
        " (default: all; under serve, several workers take the nodes in turn)",
    )
    stall_s: float = Field(
        60.0,
        gt=0,
        le=MAX_STALL_S,
        description="work pending and no step for so long: not ready; twice: exit",
    )
