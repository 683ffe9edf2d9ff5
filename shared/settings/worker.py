import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_settings import CliSuppress, NoDecode

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
    Sizes,
    WeightForm,
)
from shared.settings.pooler import POOLER_CONFIG, RUNNER, Pooler
from shared.settings.speculative import Speculative, SpeculativeConfig
from shared.wire.messages import (
    MAX_ADAPTERS,
    MAX_BATCHED_TOKENS,
    MAX_BLOCK_SIZE,
    MAX_BLOCKS,
    MAX_SEQS,
    MAX_STAGES,
    MAX_STALL_S,
)

EXAMPLE = 'name=folder, or {"name": "sql", "path": "/adapters/sql"}'
MAX_NAME_CHARS = 256


class LoraModule(BaseModel):
    """An adapter (LoRA) that is loaded at the start; names are vLLM's, ``lora-dir`` is ours."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    path: Path
    base_model_name: str | None = None  # vLLM's; there is one base


def _read_modules(value: Any) -> Any:
    """Reads name=folder, JSON objects, or several of either: a list, or separated by commas."""
    if isinstance(value, str):
        value = _split(value)
    values = value if isinstance(value, list) else [value]
    modules = [_read_module(each) for each in values]
    names = [each["name"] if isinstance(each, dict) else each.name for each in modules]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{twice} is the name of two adapters")
    return modules


def _split(text: str) -> Any:
    if not text.startswith(("[", "{")):
        return text.split(",") if text else []
    try:
        return json.loads(text if text.startswith("[") else f"[{text}]")
    except ValueError:
        raise ValueError(f"expected {EXAMPLE}") from None


def _read_module(value: Any) -> Any:
    if isinstance(value, LoraModule):
        return value
    if isinstance(value, str) and value.startswith("{"):
        value = _split(value)[0]
    if isinstance(value, str):
        name, separator, path = value.partition("=")
        value = {"name": name, "path": path} if separator and path else None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError(f"expected {EXAMPLE}")
    return value


LoraModules = Annotated[list[LoraModule], NoDecode, BeforeValidator(_read_modules)]


MAX_RANKS = 64
RANK_SETTINGS = {"rank", "leader"}  # passed from the first rank to the others


class WorkerConfig(Settings):
    scheduler_address: Addresses = SCHEDULER_ADDRESS
    model: Model = MODEL
    max_model_len: NumTokens = MAX_MODEL_LEN
    runner: Literal["auto", "generate", "pooling"] = RUNNER
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
    enable_lora: bool = Field(
        False,
        description="serve adapters (LoRA); lora-modules and lora-dir imply it",
    )
    lora_modules: LoraModules = Field(
        [],
        description="adapters loaded at the start, as name=folder or JSON"
        ' {"name", "path"}; the folders are PEFT\'s, with safetensors',
    )
    lora_dir: Path | None = Field(
        None,
        description="folder of adapters: each folder in it is loaded at the start under its name;"
        " /v1/load_lora_adapter reads nothing outside it",
    )
    max_loras: int = Field(
        8, ge=1, le=64, description="adapters that running sequences of a worker use at once"
    )
    max_lora_rank: int = Field(64, ge=1, le=512, description="largest rank of an adapter")
    max_cpu_loras: int | None = Field(
        None,
        ge=1,
        le=MAX_ADAPTERS,
        description="memory of a worker for this number of adapters of max-lora-rank that change"
        " linear layers (default: max-loras, or as many as lora-modules)",
    )
    kv_offloading_size: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="on a CPU: GiB of a store for blocks of the KV cache that outlives the worker;"
        " 0: none",
    )
    kv_offloading_dir: Path | None = Field(
        None,
        description="folder of the stores of kv-offloading-size, of this user alone; memory if it"
        " is on tmpfs (default: /dev/shm/shoal-UID)",
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
    def has_adapters(self) -> bool:
        return self.enable_lora or bool(self.lora_modules) or self.lora_dir is not None

    @property
    def reads_media(self) -> bool:
        return not self.language_model_only

    @property
    def num_adapters(self) -> int:
        """The most adapters in memory."""
        return self.max_cpu_loras or max(self.max_loras, len(self.lora_modules))

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
    def _check_adapters(self) -> Self:
        if (num := len(self.lora_modules)) > self.num_adapters:
            raise ValueError(f"lora-modules: {num} adapters; max-cpu-loras is {self.num_adapters}")
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
