"""Ranks that have shards of a model, and together the logits of the whole."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    GraniteForCausalLM,
    LlamaForCausalLM,
    Olmo2ForCausalLM,
    Qwen2MoeForCausalLM,
)

from services.worker.backends.torch_lm import TorchOps
from services.worker.layers.attention import Attention
from services.worker.layers.context import ForwardContext, forward_context
from services.worker.layers.embedding import Embedding, LMHead
from services.worker.layers.experts import Experts, Scores
from services.worker.layers.heads import Heads
from services.worker.layers.linear import Linear
from services.worker.layers.mlp import GatedMLP
from services.worker.layers.norm import RMSNorm
from services.worker.layers.ops import Ops
from services.worker.layers.parallel import ALONE, Parallel
from services.worker.machine.kv_cache import KVCache
from services.worker.models.decoder import DecoderLayer, DecoderLM
from services.worker.models.registry import read_model_config
from services.worker.startup.choose_backend import choose_device_kernels, choose_kernels
from services.worker.step.batch import Batch
from services.worker.weights.load import build_model, load_model
from shared.config.worker import WorkerConfig
from shared.errors import ConfigError
from shared.model_folder import weight_files
from tests.services.worker.checkpoints import (
    random_prompts,
    save_mimo,
    save_model,
    save_qwen2,
)
from tests.services.worker.forward import CAPACITY, prepare

CPU = torch.device("cpu")
Ranked = list[Tensor]  # the tensor of each rank


def save_mild_mimo(folder: Path) -> None:
    """Its MTP layer's matrices are as those of the others: wider ones would make attention so sharp
    that rounding shows."""
    mtp = save_mimo(folder)
    (file,) = weight_files(folder)
    mild = {name: tensor * 0.2 for name, tensor in mtp.items() if tensor.ndim == 2}
    save_file(load_file(file) | mild, file)


def save_llama(folder: Path) -> None:
    save_model(folder, LlamaForCausalLM, attention_bias=True, mlp_bias=True)


def save_granite(folder: Path) -> None:
    save_model(
        folder,
        GraniteForCausalLM,
        num_key_value_heads=1,
        residual_multiplier=0.3,
        attention_multiplier=0.25,
    )


def save_qwen2_moe(folder: Path) -> None:
    save_model(
        folder,
        Qwen2MoeForCausalLM,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
    )


class RankOps(Ops[Ranked]):
    """Runs ranks side by side. A module of rank 0 stands for all that have its place."""

    def __init__(
        self, models: list[DecoderLM], positions: Tensor, contexts: list[ForwardContext]
    ) -> None:
        self._ops = [TorchOps(positions) for _ in models]
        self._contexts = contexts
        self._modules: dict[nn.Module | None, list[Any]] = {None: [None] * len(models)}
        self._heads: dict[Heads, list[Heads]] = {}
        for first, *others in zip(*(model.modules() for model in models), strict=True):
            self._modules[first] = [first, *others]
            if isinstance(first, Attention):
                self._heads[first.heads] = [each.heads for each in (first, *others)]

    def embed(self, ids: Ranked, embedding: Embedding) -> Ranked:
        return self._each("embed", ids, self._modules[embedding])

    def scale(self, x: Ranked, factor: float) -> Ranked:
        return [each * factor for each in x]

    def norm(self, x: Ranked, norm: RMSNorm, *, residual: Ranked | None = None) -> Ranked:
        return self._each("norm", x, self._modules[norm], residual=residual)

    def linear(
        self,
        x: Ranked,
        linear: Linear,
        *,
        norm: RMSNorm | None = None,
        residual: Ranked | None = None,
        scale: float = 1.0,
    ) -> Ranked:
        linears = self._modules[linear]
        if not linear.is_partial:
            norms = self._modules[norm]
            return self._each("linear", x, linears, norm=norms, residual=residual, scale=scale)
        assert norm is None
        products = [each @ part.weight.values.T for each, part in zip(x, linears, strict=True)]
        total = torch.stack(products).sum(0)
        biased = [total if part.bias is None else total + part.bias for part in linears]
        scaled = [scale * own for own in biased]
        return scaled if residual is None else list(map(torch.add, scaled, residual))

    def gated(self, x: Ranked, gate_up: Linear, *, norm: RMSNorm | None = None) -> Ranked:
        return self._each("gated", x, self._modules[gate_up], norm=self._modules[norm])

    def experts(
        self, x: Ranked, experts: Experts, *, residual: Ranked, scale: float = 1.0
    ) -> Ranked:
        nothing = [torch.zeros_like(each) for each in residual]
        parts = self._each("experts", x, self._modules[experts], residual=nothing)
        total = torch.stack(parts).sum(0)
        return [scale * total + other for other in residual]

    def open(self, x: Ranked, gate: Scores, *, y: Ranked, residual: Ranked) -> Ranked:
        return self._each("open", x, self._modules[gate], y=y, residual=residual)

    def attend(self, x: Ranked, heads: Heads) -> Ranked:
        attended = []
        for ops, context, own, part in zip(
            self._ops, self._contexts, x, self._heads[heads], strict=True
        ):
            with forward_context(context):
                attended.append(ops.attend(own, part))
        return attended

    def logits(
        self, x: Ranked, head: LMHead, *, norm: RMSNorm | None = None, scale: float = 1.0
    ) -> Ranked:
        norms = self._modules[norm]
        return self._each("logits", x, self._modules[head], norm=norms, scale=scale)

    def _each(self, operator: str, x: Ranked, modules: list[Any], **options: Any) -> Ranked:
        """Options that are lists have one for each rank."""
        return [
            getattr(ops, operator)(
                x[rank],
                modules[rank],
                **{
                    name: option[rank] if isinstance(option, list) else option
                    for name, option in options.items()
                },
            )
            for rank, ops in enumerate(self._ops)
        ]


@torch.inference_mode()
def ranks_logits(folder: Path, batch: Batch, size: int) -> list[Ranked]:
    """The logits of the model and, if it has one, of its MTP head: each rank's."""
    config = read_model_config(folder)
    models = [
        load_model(folder, config, torch.float32, CPU, ignore, Parallel(rank, size))
        for rank in range(size)
    ]
    contexts = [local_context(batch.context, model) for model in models]
    ops = RankOps(models, batch.positions, contexts)
    ids = [batch.input_ids] * size
    model = models[0]
    hidden = model.forward(ops, ids)
    found = [model.logits(ops, hidden)]
    if head := model.mtp_head:
        found.append(head.logits(ops, head.forward(ops, head.first_state(ops, hidden), ids)))
    return found


def ignore(text: str, fraction: float) -> None:
    pass


def local_context(context: ForwardContext, model: DecoderLM) -> ForwardContext:
    """With a KV cache of the heads that ``model`` has."""
    layouts = model.kv_layouts(torch.float32, drafts=model.mtp_head is not None)
    cache = KVCache(layouts, CAPACITY.num_blocks, CAPACITY.block_size, CPU)
    return replace(context, kv_caches=cache.layers)


@pytest.mark.parametrize(
    ("save", "sizes"),
    [(save_mild_mimo, (2, 4)), (save_llama, (2,)), (save_granite, (2,)), (save_qwen2_moe, (2,))],
    ids=[
        "MiMo, also more ranks than KV heads",
        "Llama, biases everywhere",
        "Granite, scaled",
        "Qwen2-MoE, experts",
    ],
)
def test_ranks_have_the_logits_of_the_whole_model(
    tmp_path: Path, save: Callable[[Path], None], sizes: tuple[int, ...]
) -> None:
    save(tmp_path)
    whole, batch = prepare(tmp_path, random_prompts(3), torch.float32)
    with torch.inference_mode(), forward_context(batch.context):
        expected = whole.logits(whole(batch.input_ids, batch.positions))
    first, *drafts = ranks_logits(tmp_path, batch, 1)
    torch.testing.assert_close(first, [expected], atol=1e-5, rtol=1e-5)
    for size in sizes:
        found, *drafted = ranks_logits(tmp_path, batch, size)
        torch.testing.assert_close(found, [expected] * size, atol=1e-5, rtol=1e-5)
        for ours, alone in zip(drafted, drafts, strict=True):
            torch.testing.assert_close(ours, alone * size, atol=1e-5, rtol=1e-5)


def test_a_rank_has_its_heads_and_its_part_of_the_mlp(tmp_path: Path) -> None:
    save_qwen2(tmp_path)
    config = read_model_config(tmp_path)
    for size, num_heads, num_kv_heads in ((1, 4, 2), (2, 2, 1), (4, 1, 1)):
        model = build_model(config, torch.float32, CPU, Parallel(size - 1, size))
        layer = model.model.layers[0]
        assert isinstance(layer, DecoderLayer)
        assert isinstance(layer.mlp, GatedMLP)
        spec = layer.self_attn.heads.spec
        assert (spec.num_heads, spec.num_kv_heads) == (num_heads, num_kv_heads)
        assert layer.self_attn.o_proj.weight.values.shape == (64, num_heads * 16)
        assert layer.mlp.gate_up_proj.weight.values.shape == (2 * 96 // size, 64)
        assert layer.mlp.down_proj.weight.values.shape == (64, 96 // size)
        assert layer.mlp.down_proj.is_partial == (size > 1)
        assert not layer.mlp.gate_up_proj.is_partial


def test_a_size_that_does_not_divide_is_named_with_those_that_do(tmp_path: Path) -> None:
    save_qwen2(tmp_path)
    config = read_model_config(tmp_path)
    for parallel, problem in (
        (Parallel(1, 3), "num_attention_heads 4 with .* 2 cannot .* 3 ranks; 1, 2, 4 would work"),
        (Parallel(7, 8), "num_attention_heads 4 with num_key_value_heads 2 .* over 8 ranks"),
    ):
        with pytest.raises(ConfigError, match=problem):
            build_model(config, torch.float32, CPU, parallel)
    with pytest.raises(ConfigError, match=r"value_heads 4 .* over 6 ranks; 1, 2, 4, 12 would work"):
        Parallel(0, 6).heads(12, 4)
    with pytest.raises(ConfigError, match=r"intermediate_size 50 .* 4 ranks; 1, 2, 5, 10, 25, 50 "):
        Parallel(0, 4).inner(50)


def test_norms_over_all_heads_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path, Olmo2ForCausalLM)
    with pytest.raises(ConfigError, match=r"norms over all heads .* cannot be split over 2 ranks"):
        build_model(read_model_config(tmp_path), torch.float32, CPU, Parallel(0, 2))


@pytest.mark.parametrize("native", [False, True])
def test_no_backend_runs_a_shard_yet(tmp_path: Path, native: bool) -> None:
    save_qwen2(tmp_path)
    settings = WorkerConfig(native_kernels=native, num_threads=1)
    config = read_model_config(tmp_path)
    model = build_model(config, torch.float32, CPU, Parallel(1, 2))
    for choose in (choose_kernels, choose_device_kernels):
        with pytest.raises(ConfigError, match=r"o_proj: a part of a sum over ranks"):
            choose(model, settings, torch.float32)
    whole = load_model(tmp_path, config, torch.float32, CPU, ignore, ALONE)
    choose_kernels(whole, settings, torch.float32)
