from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import CliSuppress

from shared.adapters.settings import AdapterSettings
from shared.device.settings import GraphSettings
from shared.link.endpoint import FIRST_PORTS, MAX_PORT
from shared.settings.base import KEYS_OR_NOT, Settings
from shared.settings.fields import (
    MAX_MODEL_LEN,
    MODEL,
    SCHEDULER_ADDRESS,
    Addresses,
    Dtype,
    HostName,
    KVCacheDtype,
    ListenAddress,
    LoadFormat,
    Model,
    NumTokens,
    Role,
    WeightForm,
)
from shared.settings.pooler import POOLER_CONFIG, RUNNER, Pooler, RunnerSetting
from shared.settings.speculative import Speculative, SpeculativeConfig
from shared.stores.settings import StoreSettings
from shared.wire.messages import (
    MAX_BATCHED_TOKENS,
    MAX_BLOCK_SIZE,
    MAX_BLOCKS,
    MAX_SEQS,
    MAX_STAGES,
    MAX_STALL_S,
)

MAX_RANKS = 64
RANK_SETTINGS = {"rank", "leader"}  # passed from the first rank to the others


class PlainWorker(Settings):
    """Without the settings of optional parts."""

    scheduler_address: Addresses = SCHEDULER_ADDRESS
    model: Model = MODEL
    max_model_len: NumTokens = MAX_MODEL_LEN
    runner: RunnerSetting = RUNNER
    pooler_config: Pooler = POOLER_CONFIG
    dtype: Dtype = Field(
        "auto", description="auto: bfloat16 if the machine computes it, else float32"
    )
    model_impl: Literal["auto", "shoal", "transformers"] = Field(
        "auto",
        description="shoal: our own architectures; transformers: any decoder that transformers"
        " supports; auto: our own if there is one",
    )
    load_format: LoadFormat = Field(
        "auto",
        description="auto, safetensors: the weights in the folder; dummy: random weights, for"
        " benchmarks",
    )
    quantization: WeightForm = Field(
        "none",
        description="weights of linear layers, quantized as they are loaded, to 8 bits (wint8,"
        " fp8, fp8_block) or 4 (wint4, nf4); quantized checkpoints need no setting",
    )
    lm_head_quantization: WeightForm = Field(
        "none",
        description="the same for the output head; tied embeddings keep their own copy",
    )
    embedding_quantization: WeightForm = Field(
        "none",
        description="the same for the embeddings; a tied output head is quantized with them",
    )
    quantization_cache: Path | None = Field(
        None,
        description="folder for quantized weights, read by later starts with the same files"
        " (default: quantized at every start)",
    )
    activation_dtype: Literal["auto", "int8"] = Field(
        "auto",
        description="on a CPU: inputs of GEMMs with weights in 4 bits, or in 8 with AVX512-VNNI;"
        " auto: the model's dtype; int8: faster, slightly less exact",
    )
    kv_cache_dtype: KVCacheDtype = Field(
        "auto",
        description="the KV cache; none: the model's dtype; int8, fp8: 8 bits; auto: the"
        " kv_cache_scheme of a compressed-tensors checkpoint, else none; vLLM's"
        " int8_per_token_head, fp8_e4m3, fp8_ds_mla and fp8_per_token_head are synonyms",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: a GPU if there is one, else the CPU"
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=MAX_RANKS,
        description="processes (ranks) of one worker, each with a share of every layer, on this"
        " machine or on nnodes hosts; not tried on GPUs",
    )
    pipeline_parallel_size: int = Field(
        1,
        ge=1,
        le=MAX_STAGES,
        description="processes (stages) of one worker, each with some of the layers, on this"
        " machine or on nnodes hosts; on CPUs only",
    )
    nnodes: int = Field(
        1,
        ge=1,
        le=MAX_RANKS,
        description="hosts of the ranks of tensor-parallel-size or pipeline-parallel-size, with"
        " equal numbers each; a worker is started on each host; on CPUs only",
    )
    node_rank: int = Field(
        0,
        ge=0,
        lt=MAX_RANKS,
        description="the number of this host among the nnodes hosts; 0 has the first rank and"
        " its scheduler",
    )
    master_addr: HostName | None = Field(
        None, description="with nnodes: the name or address of the host with node-rank 0"
    )
    master_port: int = Field(
        FIRST_PORTS["worker"],
        gt=0,
        le=MAX_PORT,
        description="with nnodes: its port for the other ranks; the next one is taken too",
    )
    enable_expert_parallel: bool = Field(
        False,
        description="with tensor-parallel-size: whole experts on each rank, instead of a part"
        " of each expert",
    )
    enable_expert_distribution_metrics: bool = Field(
        False,
        description="count the tokens of each expert for the metric shoal_expert_load",
    )
    rank: CliSuppress[int] = Field(
        0,
        ge=0,
        lt=MAX_RANKS,
        description="the number of this rank; the first one starts the others",
    )
    leader: CliSuppress[str] = Field("", description="the instance of the first rank")
    gpu_claims: Path | None = Field(
        None,
        description="folder in which the workers of a machine claim one GPU each (default:"
        " torch's current GPU; under serve: its own folder)",
    )
    cpu_offload_gb: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="on a GPU: GiB of weights in host memory, as whole layers that each step"
        " copies to the GPU",
    )
    kv_transfer: bool = Field(
        True,
        description="on a CPU: sequences of a leaving worker move to another with their KV blocks",
    )
    kv_transfer_address: ListenAddress | None = Field(
        None,
        description="tcp address for KV blocks, or of an encoder for images, from workers of other"
        " machines; port 0: any",
    )
    worker_role: Role = Field(
        "both",
        description="prefill: computes long prompts for others; decode: goes on with their"
        " sequences; each does both if no other can; encoder: reads images for others",
    )
    encoder_address: Addresses = Field(
        [],
        description="workers of the role encoder on other machines, tcp://HOST or tcp://HOST:PORT,"
        " at their kv-transfer-address (default port: 29501)",
    )
    language_model_only: bool = Field(
        False,
        description="compute texts only, without the part of the model that reads images",
    )
    native_kernels: bool = Field(
        True, description="on a CPU: use native code if it supports the model"
    )
    draft_acceptance: float | None = Field(
        None,
        ge=0,
        le=1,
        description="benchmarks on a GPU only: accept each draft with this probability,"
        " unverified; the output is meaningless",
    )
    block_size: int = Field(16, gt=0, le=MAX_BLOCK_SIZE, description="tokens in one KV block")
    max_num_seqs: int = Field(128, gt=0, le=MAX_SEQS, description="sequences that run at once")
    max_num_batched_tokens: NumTokens = Field(
        None,
        gt=0,
        le=MAX_BATCHED_TOKENS,
        description="tokens a step computes (512 on a CPU, 8192 on a GPU, or max-num-seqs)",
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of the device's memory for weights, KV cache and peak"
    )
    speculative_config: Speculative = Field(
        SpeculativeConfig(),
        description="\"method\": mtp (the model's own head, the default if it has one, or Gemma 4's"
        ' assistant, "model": its folder), ngram (prompt lookup), eagle3 ("model": its folder) or'
        ' none; "num_speculative_tokens" (3); other keys',
    )
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = Field(
        "raw_logprobs",
        description="raw: of the model's logits; processed: of the scores, after penalties,"
        " temperature and truncation",
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
        description="CPU threads (default: all usable cores, one less for torch's operators)",
    )
    numa_node: int | None = Field(
        None,
        ge=0,
        description="on a CPU: the NUMA node for this worker's threads and memory (default:"
        " all; under serve, several workers take the nodes in turn)",
    )
    stall_s: float = Field(
        60.0,
        gt=0,
        le=MAX_STALL_S,
        description="seconds without a step while work is pending: then not ready; after twice"
        " that: exit",
    )

    @property
    def reads_media(self) -> bool:
        return not self.language_model_only

    @property
    def num_ranks(self) -> int:
        """The number of processes of one worker."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_setting(self) -> str:
        """The name of the setting that creates the ranks."""
        is_pipeline = self.pipeline_parallel_size > 1
        return "pipeline-parallel-size" if is_pipeline else "tensor-parallel-size"

    @property
    def ranks_of_host(self) -> range:
        num = self.num_ranks // self.nnodes
        return range(self.node_rank * num, (self.node_rank + 1) * num)

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        stages, size = self.pipeline_parallel_size, self.tensor_parallel_size
        if stages > 1 and size > 1:
            raise ValueError(
                f"pipeline-parallel-size: {stages} with tensor-parallel-size {size}: ranks have"
                " either layers of their own or parts of all layers; set one of them to 1"
            )
        if stages > 1 and self.device == "cuda":
            raise ValueError(
                "pipeline-parallel-size: stages are supported on CPUs only; set device to cpu"
            )
        return self

    @model_validator(mode="after")
    def _check_hosts(self) -> Self:
        size, num = self.num_ranks, self.nnodes
        if self.node_rank >= num:
            raise ValueError(
                f"node-rank: {self.node_rank}: nnodes is {num}, so the last is {num - 1}"
            )
        if num == 1:
            return self
        if size % num:
            sizes = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
            raise ValueError(
                f"nnodes: {num} hosts cannot have the same number of {size} ranks"
                f" ({self.ranks_setting}); {sizes} would work"
            )
        if self.master_addr is None:
            raise ValueError("nnodes needs master-addr, the host with node-rank 0")
        if self.device == "cuda":
            raise ValueError("nnodes: several hosts are supported on CPUs only; set device to cpu")
        if self.keys is None and not self.insecure_tcp:
            raise ValueError(f"nnodes needs {KEYS_OR_NOT}")
        return self


class WorkerConfig(
    AdapterSettings,
    GraphSettings,
    StoreSettings,
    PlainWorker,
):
    """The settings of a worker."""
