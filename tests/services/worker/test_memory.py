"""The number of KV blocks, and the error if they are too few."""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY
from torch.profiler import ProfilerActivity, profile
from transformers import (
    DeepseekV3ForCausalLM,
    Ernie4_5ForCausalLM,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)

from benchmarks.harness.engines import make_engine
from kernels.logprobs import logprobs
from kernels.paged_attention import AttentionOptions, grouped
from kernels.paged_attention.grouped import MAX_SCORES, softmax_attention
from services.worker.layers.context import forward_context
from services.worker.machine import hardware
from services.worker.machine.hardware import Memory, choose_device, choose_dtype, read_memory
from services.worker.models.registry import read_model_config
from services.worker.startup import plan_memory as plan_memory_module
from services.worker.startup.model_shape import count_parameters, shape_of
from services.worker.startup.plan_memory import (
    CPU_MAX_KV_BYTES,
    LOGPROB_BYTES,
    SCORE_BYTES,
    MemoryRequirements,
    plan_memory,
    prompt_logprob_bytes,
)
from services.worker.step.logprobs import MAX_LOGITS_AT_ONCE
from services.worker.weights.load import build_model, load_model
from services.worker.weights.online import Quantization
from shared.errors import ConfigError
from shared.process import cores
from shared.settings.worker import WorkerConfig
from shared.wire.messages import WINDOW_BYTES, Capacity, Group
from tests.services.worker.checkpoints import oracle_of, save_model
from tests.services.worker.foreign_checkpoints import FAMILIES
from tests.services.worker.forward import prepare
from tests.services.worker.hybrids import HYBRIDS
from tests.services.worker.test_families import CASES

GIB = 1 << 30
GRANITE = HYBRIDS["granite 4, experts, biases of other GEMMs"]
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 4, "moe_intermediate_size": 64}
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NEEDS = MemoryRequirements(
    weights=2 * GIB,
    peak=GIB,
    block=1 << 20,
    capacity=Capacity(0, 16, 256, 512, 4096),
)
MACHINE = Memory(total=20 * GIB, free=15 * GIB)


@pytest.mark.parametrize(
    ("family", "changes", "text"),
    [
        (Qwen2ForCausalLM, {"tie_word_embeddings": True}, "0.1M parameters"),
        (
            Qwen3MoeForCausalLM,
            {"head_dim": 16, "num_experts": 32, **EXPERTS},
            "1.2M parameters, 0.2M active",
        ),
    ],
)
@pytest.mark.parametrize("quantization", ["none", "wint4"])
def test_parameters_are_counted_in_all_and_per_token(
    tmp_path: Path,
    family: type[PreTrainedModel],
    changes: dict[str, Any],
    text: str,
    quantization: Quantization,
) -> None:
    save_model(tmp_path, family, **changes)
    oracle = oracle_of(tmp_path)
    config = read_model_config(tmp_path)
    model = load_model(tmp_path, config, torch.float32, CPU, ignore, quantization=quantization)
    count = count_parameters(model)
    assert count.total == sum(parameter.numel() for parameter in oracle.parameters())
    assert str(count) == text
    chosen, size = 4 * 3 * 64 * 64, 32 * 3 * 64 * 64
    assert count.total - count.active == (3 * (size - chosen) if "num_experts" in changes else 0)


def ignore(text: str, fraction: float) -> None:
    pass


def settings(**values: Any) -> WorkerConfig:
    return WorkerConfig(**values)


def test_blocks_take_the_rest_of_the_share() -> None:
    report = plan_memory(settings(gpu_memory_utilization=0.5), NEEDS, MACHINE, CUDA)
    assert report.num_blocks == (10 - 5 - 2 - 1) * GIB // NEEDS.block
    assert report.lines() == [
        "memory: 10240.0 MiB may be used, 5120.0 MiB are used by others",
        "weights: 2048.0 MiB in memory",
        "peak of a step: 1024.0 MiB (estimated)",
        "KV cache: 2048 blocks of 16 tokens = 32768 tokens (2048.0 MiB)",
        "maximum concurrency for 4096 tokens per request: 8.00×",
    ]


@pytest.mark.parametrize(
    ("max_len", "tokens"),
    [
        (4096, "33587 tokens in requests of 4096"),
        (40_960, "40960 tokens in requests of 40960, 33587 tokens in requests of 4096"),
    ],
)
def test_more_tokens_fit_in_long_requests_if_layers_have_windows(max_len: int, tokens: str) -> None:
    """A layer with a window holds it, 64 more, a step's tokens and three blocks: 64."""
    capacity = Capacity(0, 16, 256, 168, max_len, groups=(Group(), Group(744)))
    needs = replace(NEEDS, capacity=capacity, block=NEEDS.block // 2)
    report = plan_memory(settings(num_gpu_blocks_override=2624), needs, MACHINE, CUDA)
    *_, cache, concurrency = report.lines()
    assert cache == f"KV cache: 2624 blocks of 16 tokens = {tokens} (1312.0 MiB)"
    wanted = 2624 / (max_len // 16 + 64)
    assert concurrency == f"maximum concurrency for {max_len} tokens per request: {wanted:.2f}×"
    with pytest.raises(ConfigError, match=f"tokens takes {max_len // 16 + 64}: raise"):
        plan_memory(settings(num_gpu_blocks_override=max_len // 16 + 63), needs, MACHINE, CUDA)


@pytest.mark.parametrize(
    ("room", "num_seqs", "num_states", "num_blocks"),
    [(8 * GIB, 256, 1024, 6848), (2 * GIB, 256, 704, 1024), (GIB // 2, 113, 114, 256)],
)
def test_states_take_half_of_the_cache_at_most(
    room: int, num_seqs: int, num_states: int, num_blocks: int
) -> None:
    needs = replace(NEEDS, state=1 << 20, drafts=1 << 18)
    report = plan_memory(settings(kv_cache_memory_bytes=room), needs, MACHINE, CPU)
    capacity = report.capacity
    assert (capacity.max_num_seqs, capacity.num_states) == (num_seqs, num_states)
    assert capacity.num_blocks == num_blocks
    lines = report.lines()
    of_states = num_seqs * 1.25 + num_states
    assert (
        f"states: {num_seqs} of sequences, {num_states} copies of 1.0 MiB ({of_states:.1f} MiB)"
        in lines
    )
    is_lowered = any(line.startswith(f"max-num-seqs: {num_seqs} instead of 256") for line in lines)
    assert is_lowered == (num_seqs < 256)


def test_slack_is_kept_from_the_cache_and_reported() -> None:
    requirements = replace(NEEDS, graphs=GIB // 4, slack=GIB // 4)
    report = plan_memory(settings(gpu_memory_utilization=0.5), requirements, MACHINE, CUDA)
    assert report.num_blocks == (10 - 5 - 2 - 1) * GIB // NEEDS.block - GIB // 2 // NEEDS.block
    assert "slack: 256.0 MiB, for libraries and fragments that come later" in report.lines()


def test_a_cpu_gives_four_gibibytes_at_most_by_default() -> None:
    roomy = Memory(total=100 * GIB, free=90 * GIB)
    assert plan_memory(settings(), NEEDS, roomy, CPU).num_blocks == CPU_MAX_KV_BYTES >> 20
    logprobs = settings(kv_cache_memory_bytes=6 * GIB)
    assert plan_memory(logprobs, NEEDS, roomy, CPU).num_blocks == 6 * 1024


def test_no_more_blocks_than_all_slots_can_use() -> None:
    requirements = replace(NEEDS, capacity=Capacity(0, 16, 2, 512, 100))
    assert plan_memory(settings(), requirements, MACHINE, CPU).num_blocks == 2 * 7


def test_an_override_needs_no_memory_to_be_left() -> None:
    full = Memory(total=20 * GIB, free=0)
    report = plan_memory(settings(num_gpu_blocks_override=300), NEEDS, full, CPU)
    assert report.num_blocks == 300
    with pytest.raises(ConfigError, match="4096 tokens"):
        plan_memory(settings(num_gpu_blocks_override=255), NEEDS, full, CPU)


def test_too_little_memory_is_an_error_with_the_figures_and_the_settings() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_memory(settings(gpu_memory_utilization=0.3), NEEDS, MACHINE, CPU)
    text = str(caught.value)
    for part in ("4096 tokens takes 256.0 MiB", "0.0 MiB are left", "gpu-memory-utilization (0.3)"):
        assert part in text
    with pytest.raises(ConfigError, match="raise kv-cache-memory-bytes"):
        plan_memory(settings(kv_cache_memory_bytes=GIB // 8), NEEDS, MACHINE, CPU)


def planned_bytes(kind: str) -> float | None:
    return REGISTRY.get_sample_value("shoal_memory_bytes", {"kind": kind})


def test_an_engine_has_the_capacity_that_was_asked_for_and_reports_its_memory(
    checkpoint: Path,
) -> None:
    engine = make_engine(
        checkpoint, num_gpu_blocks_override=13, max_num_batched_tokens=77, max_model_len=50
    )
    capacity = engine.capacity
    assert (capacity.num_blocks, capacity.block_size, capacity.max_num_seqs) == (13, 4, 24)
    assert (capacity.max_num_batched_tokens, capacity.max_model_len) == (77, 50)
    model = engine.model_info
    assert (model.max_model_len, model.dtype, model.load_format) == (50, "float32", "safetensors")
    assert model.logprobs_mode == "raw_logprobs"
    place = 2 * sum(int(layer.entries[0, 0, 0].nbytes) for layer in engine._kv_cache.layers)
    assert planned_bytes("kv_cache") == 13 * 4 * place
    parts = (*engine._model.parameters(), *engine._model.buffers())
    assert planned_bytes("weights") == sum(tensor.nbytes for tensor in parts)
    assert planned_bytes("peak") > 0
    assert make_engine(checkpoint).capacity.max_num_batched_tokens == 512
    assert make_engine(checkpoint, max_num_batched_tokens=5).capacity.max_num_seqs == 5
    many = make_engine(checkpoint, max_num_seqs=700).capacity
    assert (many.max_num_seqs, many.max_num_batched_tokens) == (700, 700)


@torch.inference_mode()
def measured_peak(folder: Path, num_tokens: int) -> int:
    """Peak bytes of a forward pass, in float32."""
    model, batch = prepare(folder, [[9] * (num_tokens // 4)] * 4, torch.float32)
    watch = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with watch, forward_context(batch.context):
        model(batch.input_ids, batch.positions)
    return allocated_peak(watch)


def allocated_peak(watch: profile) -> int:
    events: list[Any] = watch.profiler.kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in changes))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        (Qwen2ForCausalLM, {}),
        (LlamaForCausalLM, {"num_key_value_heads": 4}),
        (LlamaForCausalLM, {"intermediate_size": 256}),
        (Qwen3ForCausalLM, {"head_dim": 64}),
        (Ernie4_5ForCausalLM, {"head_dim": 32}),
        (Gemma3ForCausalLM, {"head_dim": 16, "sliding_window": 20}),
        (Qwen3MoeForCausalLM, {"head_dim": 16, "num_experts": 4, **EXPERTS}),
        (Qwen3MoeForCausalLM, {"head_dim": 16, "num_experts": 32, **EXPERTS}),
        (DeepseekV3ForCausalLM, FAMILIES["DeepseekV3ForCausalLM"]),
        (DeepseekV3ForCausalLM, FAMILIES["DeepseekV3ForCausalLM"] | {"kv_lora_rank": 96}),
        CASES["glm 5, shared choices, biases"],
        HYBRIDS["qwen3.5"],
        HYBRIDS["qwen3-next"],
        HYBRIDS["granite 4, tied"],
        (GRANITE[0], GRANITE[1] | {"shared_intermediate_size": 512}),
        HYBRIDS["nemotron-h, biases"],
        HYBRIDS["nemotron 3, latents"],
        HYBRIDS["kimi"],
        HYBRIDS["ling 2.5"],
    ],
)
def test_a_step_fits_its_reserve_and_takes_at_least_half(
    tmp_path: Path, family: type[PreTrainedModel], changes: dict[str, Any]
) -> None:
    save_model(tmp_path, family, **changes)
    model = build_model(read_model_config(tmp_path), torch.float32, CPU)
    reserved = 240 * shape_of(model, torch.float32, drafts=False).numbers_per_token * 4
    assert reserved / 2 < measured_peak(tmp_path, 240) <= reserved


@pytest.mark.parametrize("has_sinks", [False, True])
def test_scores_of_torchs_operators_fit_their_reserve(
    has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scores of twenty rows of three hundred tokens."""
    pieces = 2 * 20 * 300
    monkeypatch.setattr(grouped, "MAX_SCORES", pieces)
    query, key, value = (torch.randn(1, 2, 300, 16) for _ in range(3))
    sinks = torch.randn(1, 2, 1, 1) if has_sinks else None
    options, mask = AttentionOptions(softcap=2.0, sinks=sinks), torch.zeros(300, 300)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watch:
        out = softmax_attention(query, key, value, 1.0, options, mask)
    assert pieces * SCORE_BYTES / 2 < allocated_peak(watch) - out.nbytes <= pieces * SCORE_BYTES


@pytest.mark.parametrize(
    ("kernels", "model_impl", "share"),
    [("torch", "shoal", 1), ("torch", "transformers", 1), ("native", "shoal", 0)],
)
def test_memory_for_scores_is_planned_where_they_are_made(
    tmp_path: Path, kernels: str, model_impl: str, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path, Gemma2ForCausalLM, head_dim=16)
    peaks = []
    for num_scores in (MAX_SCORES, 2 * MAX_SCORES):
        monkeypatch.setattr(plan_memory_module, "MAX_SCORES", num_scores)
        make_engine(tmp_path, kernels, model_impl=model_impl)
        peaks.append(planned_bytes("peak") or 0)
    assert peaks[1] - peaks[0] == share * MAX_SCORES * SCORE_BYTES


@pytest.mark.parametrize("num_top", [0, 20, None])
@pytest.mark.parametrize("values", [1, 1000])
def test_a_piece_of_logits_fits_its_reserve(num_top: int | None, values: int) -> None:
    """Also with ties, for which all logits are sorted."""
    logits = torch.randint(values, (40, 3000)).float()
    given = logits.nbytes
    watch = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with watch:
        logprobs(logits, torch.zeros(40, dtype=torch.int64), num_top).values.clamp(min=-1)
    assert allocated_peak(watch) + given <= logits.numel() * LOGPROB_BYTES


def test_prompts_take_a_piece_and_their_credit() -> None:
    vocab_size, piece = 1000, MAX_LOGITS_AT_ONCE * LOGPROB_BYTES
    drawn, logprobs = 2 * 8 * vocab_size * 4, 2 * min(512 * vocab_size * 4, 8 * WINDOW_BYTES)
    assert prompt_logprob_bytes(8, 10_000, vocab_size) == piece + drawn + 2 * 8 * WINDOW_BYTES
    few = 512 * vocab_size * LOGPROB_BYTES
    assert prompt_logprob_bytes(8, 512, vocab_size) == few + drawn + logprobs


def fake_machine(
    monkeypatch: pytest.MonkeyPatch, folder: Path, cgroup: str, files: dict[str, str]
) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "cgroup").write_text(cgroup)
    (folder / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 800 kB\n")
    monkeypatch.setattr(cores, "CGROUPS", folder / "fs")
    monkeypatch.setattr(cores, "CGROUP_NAMES", folder / "cgroup")
    monkeypatch.setattr(hardware, "MEMINFO", folder / "meminfo")


def test_memory_without_cgroups_is_the_machines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_machine(monkeypatch, tmp_path, "0::/\n", {})
    assert read_memory(CPU) == Memory(1000 << 10, 800 << 10)


def test_the_tightest_cgroup_around_us_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = {
        "fs/a/memory.max": "500000\n",
        "fs/a/memory.current": "230000\n",
        "fs/a/memory.stat": "anon 200000\ninactive_file 30000\n",
        "fs/a/b/memory.max": "max\n",
        "fs/a/b/memory.current": "100\n",
        "fs/a/cpu.max": "150000 100000\n",
    }
    fake_machine(monkeypatch, tmp_path, "0::/a/b\n", files)
    assert read_memory(CPU) == Memory(500000, 300000)


def test_a_worker_that_is_bound_to_a_numa_node_has_the_memory_of_that(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_machine(monkeypatch, tmp_path, "0::/\n", {})
    monkeypatch.setattr(hardware, "NODES", tmp_path)
    (tmp_path / "node1").mkdir()
    lines = ["MemTotal: 600 kB", "MemFree: 200 kB", "Inactive(file): 100 kB", "HugePages_Total: 0"]
    (tmp_path / "node1" / "meminfo").write_text("".join(f"Node 1 {each}\n" for each in lines))
    assert read_memory(CPU, numa_node=1) == Memory(600 << 10, 300 << 10)


def test_version_1_cgroups_count_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = {
        "fs/memory/x/memory.limit_in_bytes": "400000",
        "fs/memory/x/memory.usage_in_bytes": "500000",
        "fs/memory/x/memory.stat": "inactive_file 1\ntotal_inactive_file 70000\n",
    }
    fake_machine(monkeypatch, tmp_path, "3:cpu,cpuacct:/\n2:memory:/x\n0::/\n", files)
    assert read_memory(CPU) == Memory(400000, 0)


@pytest.mark.parametrize(("quota", "expected"), [("100000 100000", 1), ("50000 100000", 1)])
def test_threads_follow_the_cpu_quota(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str, expected: int
) -> None:
    fake_machine(monkeypatch, tmp_path, "0::/a\n", {"fs/a/cpu.max": quota})
    assert cores.num_cores() == expected


def test_steps_of_every_size_leave_little_machine_code_behind() -> None:
    script = """
import os
import torch
from benchmarks.processes import own_bytes
from services.worker.machine.hardware import bound_kernel_caches

bound_kernel_caches()
torch.set_num_threads(1)
tokens = torch.ones(512, 256, dtype=torch.bfloat16)
weights = [torch.ones(size, 256, dtype=torch.bfloat16) for size in (256, 512)]
before = own_bytes(os.getpid())
for num_tokens in range(1, 513, 4):
    for weight in weights:
        torch.nn.functional.linear(tokens[:num_tokens], weight)
print(own_bytes(os.getpid()) - before)
"""
    environment = {k: v for k, v in os.environ.items() if k not in hardware.KERNEL_CACHES}
    command = [sys.executable, "-c", script]
    growth_bytes = int(subprocess.check_output(command, env=environment))
    assert growth_bytes < 160 << 20, "each of them takes some 0.9 MB"


def test_a_device_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", None) == CPU
    with pytest.raises(ConfigError, match="device: cuda"):
        choose_device("cuda", None)


@pytest.mark.parametrize(("flag", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_bfloat16_where_the_cpu_computes_it(
    monkeypatch: pytest.MonkeyPatch, flag: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": flag})
    assert choose_dtype("auto", CPU) == expected
    assert choose_dtype("float16", CPU) == torch.float16
