"""Every way to choose experts: as in transformers, and in native code as in torch's operators."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    Qwen2MoeConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter

from kernels.cpu.library import load_library
from kernels.cpu.operators import DTYPES
from kernels.cpu.packing import NativeLibrary
from kernels.experts import Clamp
from kernels.route import Routing, route
from services.worker.backends.compiler import Compiler
from services.worker.backends.recorder import record
from services.worker.backends.torch_lm import TorchOps
from services.worker.layers.experts import Experts, Router
from services.worker.layers.gated import UNGATED_NAMES, GatedProducts
from services.worker.layers.mlp import Mixture
from services.worker.layers.norm import RMSNorm
from services.worker.weights.load import build_model
from tests.services.worker.builds import each_variant
from tests.services.worker.checkpoints import allocate
from tests.services.worker.test_native import make_config

HIDDEN, INNER, NUM_EXPERTS, CHOSEN = 64, 48, 24, 5
SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "num_experts_per_tok": CHOSEN}
GROUPS: dict[str, Any] = {"n_group": 6, "topk_group": 2, "routed_scaling_factor": 2.5}
OF_GROUPS: dict[str, Any] = {"num_groups": 6, "num_kept_groups": 2, "factor": 2.5}
# transformers' router and its config, and our equivalent.
ROUTERS: dict[str, tuple[type[nn.Module], Any, Routing]] = {
    "Mixtral": (
        MixtralTopKRouter,
        MixtralConfig(**SIZES, num_local_experts=NUM_EXPERTS),
        Routing(CHOSEN, min_sum=0.0),
    ),
    "Qwen2-MoE": (
        Qwen2MoeTopKRouter,
        Qwen2MoeConfig(**SIZES, num_experts=NUM_EXPERTS, norm_topk_prob=False),
        Routing(CHOSEN),
    ),
    "ERNIE": (
        Ernie4_5_MoeTopKRouter,
        Ernie4_5_MoeConfig(
            hidden_size=HIDDEN, moe_num_experts=NUM_EXPERTS, moe_k=CHOSEN, moe_norm_min=0.3
        ),
        Routing(CHOSEN, min_sum=0.3),
    ),
    "GLM-4.5": (
        Glm4MoeTopkRouter,
        Glm4MoeConfig(**SIZES, n_routed_experts=NUM_EXPERTS, norm_topk_prob=True),
        Routing(CHOSEN, "sigmoid", group_best=2, min_sum=1e-20),
    ),
    "DeepSeek-V3": (
        DeepseekV3TopkRouter,
        DeepseekV3Config(**SIZES, n_routed_experts=NUM_EXPERTS, norm_topk_prob=True, **GROUPS),
        Routing(CHOSEN, "sigmoid", group_best=2, min_sum=1e-20, **OF_GROUPS),
    ),
    "DeepSeek-V2, greedy": (
        DeepseekV2TopkRouter,
        DeepseekV2Config(**SIZES, n_routed_experts=NUM_EXPERTS, routed_scaling_factor=16.0),
        Routing(CHOSEN, factor=16.0),
    ),
    "DeepSeek-V2, groups": (
        DeepseekV2TopkRouter,
        DeepseekV2Config(
            **SIZES, n_routed_experts=NUM_EXPERTS, topk_method="group_limited_greedy", **GROUPS
        ),
        Routing(CHOSEN, **OF_GROUPS),
    ),
    "gpt-oss": (
        GptOssTopKRouter,
        GptOssConfig(**SIZES, num_local_experts=NUM_EXPERTS),
        Routing(CHOSEN, "softmax_of_chosen"),
    ),
}


def draw(module: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if "norm" in name:
            tensor.data.fill_(1.0)
        else:
            tensor.data.normal_(0, 0.2, generator=generator)


def tokens(num: int) -> Tensor:
    return torch.randn(num, HIDDEN, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ROUTERS)
@torch.inference_mode()
def test_experts_and_weights_match_transformers(name: str) -> None:
    kind, config, routing = ROUTERS[name]
    theirs: Any = kind(config)
    draw(theirs)
    x = tokens(200)
    _, weights, chosen = theirs(x)
    numbers = dict((*theirs.named_parameters(), *theirs.named_buffers()))
    correction = [each for key, each in numbers.items() if "e_score_correction_bias" in key]
    logits = torch.nn.functional.linear(x, theirs.weight, numbers.get("bias"))
    ours = route(logits, routing, correction[0].flatten() if correction else None)
    zeros = torch.zeros(len(x), NUM_EXPERTS)
    expected = zeros.scatter(1, chosen, weights)
    torch.testing.assert_close(zeros.scatter(1, ours.chosen.long(), ours.weights), expected)


def make_mixture(
    routing: Routing, dtype: torch.dtype, *, has_correction: bool, is_gpt_oss: bool, ties: int
) -> Mixture:
    """gpt-oss has biases and a clamp; this one is low enough to matter."""
    options = {"has_bias": is_gpt_oss, "has_correction": has_correction}
    router = Router(HIDDEN, NUM_EXPERTS, routing, **options)
    experts = [GatedProducts(HIDDEN, INNER, is_gpt_oss) for _ in range(NUM_EXPERTS)]
    mixture = Mixture(router, experts, act=Clamp(1.702, 1.5) if is_gpt_oss else "silu")
    allocate(mixture, torch.device("cpu"))
    draw(mixture)
    numbers = [each for each in router.parameters() if ties]
    for tensor in numbers:
        for start in range(0, NUM_EXPERTS, ties):
            tensor[start : start + ties] = tensor[start].clone()
    for expert in experts:
        expert.to(dtype)
    return mixture


@pytest.mark.parametrize("ties", [0, 2, NUM_EXPERTS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_variant
@pytest.mark.parametrize("name", ROUTERS)
@torch.inference_mode()
def test_native_code_matches_torch(name: str, variant: str, dtype: torch.dtype, ties: int) -> None:
    """Also with many equal neighbouring scores: ties go to the first."""
    options: dict[str, Any] = {
        "has_correction": name in ("ERNIE", "GLM-4.5", "DeepSeek-V3"),
        "is_gpt_oss": name == "gpt-oss",
        "ties": ties,
    }
    norm = RMSNorm(HIDDEN, 1e-6)
    norm.weight.fill_(1.0)

    def run(mixture: Mixture, ops: Any, x: Any) -> Any:
        return mixture.forward(ops, x, norm=norm, residual=ops.norm(x, norm), scale=0.7)

    mixture = make_mixture(ROUTERS[name][2], dtype, **options)
    x = tokens(45).to(dtype)
    expected = run(make_mixture(ROUTERS[name][2], torch.float32, **options), TorchOps(), x.float())
    names = {module: path for path, module in mixture.named_modules()} | {norm: "norm"}
    mixture.counts = torch.zeros(NUM_EXPERTS, dtype=torch.int64)
    recording = record(names, [HIDDEN], lambda ops, x: run(mixture, ops, x))
    model = build_model(make_config("Qwen2, biases"), dtype, torch.device("cpu"))
    library = NativeLibrary(load_library(variant), dtype, 2)
    found = Compiler(model, library).compile(recording).run([x.float()])
    distance = (found - expected).norm() / expected.norm()
    assert distance < (1e-5 if dtype == torch.float32 else 0.02)
    assert int(mixture.counts.sum()) == len(x) * CHOSEN


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_variant
@torch.inference_mode()
def test_experts_without_gates_may_read_other_numbers_than_the_router(
    variant: str, dtype: torch.dtype
) -> None:
    """As Nemotron 3 has them: fewer ones."""
    routing = ROUTERS["DeepSeek-V3"][2]

    def make(dtype: torch.dtype) -> Experts:
        router = Router(HIDDEN, NUM_EXPERTS, routing, has_correction=True)
        networks = [GatedProducts(32, INNER, names=UNGATED_NAMES) for _ in range(NUM_EXPERTS)]
        experts = Experts(router, networks, "relu2")
        allocate(experts, torch.device("cpu"))
        draw(experts)
        for network in networks:
            network.to(dtype)
        return experts

    experts, x, narrow = make(dtype), tokens(45), tokens(45)[:, :32].to(dtype).float().contiguous()
    expected = TorchOps().experts(x, make(torch.float32), given=narrow, scale=0.7)
    names = {module: path for path, module in experts.named_modules()}
    recording = record(
        names,
        [HIDDEN, 32],
        lambda ops, x, given: ops.experts(x, experts, given=given, scale=0.7),
    )
    model = build_model(make_config("Qwen2, biases"), dtype, torch.device("cpu"))
    library = NativeLibrary(load_library(variant), dtype, 2)
    found = Compiler(model, library).compile(recording).run([x, narrow])
    distance = (found - expected).norm() / expected.norm()
    assert distance < (1e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_variant
@torch.inference_mode()
def test_tokens_of_images_take_experts_of_their_own(variant: str, dtype: torch.dtype) -> None:
    """Each token has the bits that it has among tokens of its kind alone."""
    options: dict[str, Any] = {"has_correction": True, "is_gpt_oss": False, "ties": 0}
    routing = ROUTERS["ERNIE"][2]
    norm = RMSNorm(HIDDEN, 1e-6)
    norm.weight.fill_(1.0)
    model = build_model(make_config("Qwen2, biases"), dtype, torch.device("cpu"))
    library = NativeLibrary(load_library(variant), dtype, 2)

    def make(kind: torch.dtype) -> tuple[Mixture, Mixture]:
        texts, images = (make_mixture(routing, kind, **options) for _ in range(2))
        for tensor in images.parameters():
            tensor.copy_(tensor.roll(1))
        return texts, images

    def joined(kind: torch.dtype) -> Mixture:
        texts, images = make(kind)
        return Mixture(texts.gate, texts.products, images=images)

    def run(mixture: Mixture, ops: Any, x: Any) -> Any:
        return mixture.forward(ops, x, norm=norm, residual=ops.norm(x, norm), scale=0.7)

    def native(mixture: Mixture, *inputs: Tensor) -> Tensor:
        names = {module: path for path, module in mixture.named_modules()} | {norm: "norm"}
        sizes = [HIDDEN for _ in inputs]
        recording = record(names, sizes, lambda ops, x, *_: run(mixture, ops, x))
        return Compiler(model, library).compile(recording).run([*inputs])

    x, is_image = tokens(45).to(dtype).float(), torch.arange(45) % 3 == 1
    marks = is_image[:, None].expand_as(x).float().contiguous()
    found = native(joined(dtype), x, marks)
    for each, places in zip(make(dtype), (~is_image, is_image), strict=True):
        assert torch.equal(found[places], native(each, x[places]))
    assert torch.equal(native(joined(dtype), x), native(make(dtype)[0], x))
    expected = run(joined(torch.float32), TorchOps(inputs=(x, marks)), x)
    distance = (found - expected).norm() / expected.norm()
    assert distance < (1e-5 if dtype == torch.float32 else 0.02)
