"""MTP heads of several layouts against what the code of their own families computes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from services.worker.config.model_config import ModelConfig
from services.worker.models.mimo import MiMoForCausalLM
from services.worker.weights.checkpoint import fill
from services.worker.weights.mtp_layouts import MtpLayout, mtp_layout
from shared.errors import ConfigError
from tests.services.worker.mtp_checkpoints import (
    CHECKPOINTS,
    EPS,
    ERNIE,
    HIDDEN,
    MTP_LAYERS,
    TRUNK_LAYERS,
    VOCAB,
    Checkpoint,
    Weights,
)


class StandIn(nn.Module):
    """A layer of our naming and order; its attention and its MLP are one product each."""

    def __init__(self, final_layernorm: nn.Module) -> None:
        super().__init__()
        self.token_layernorm = nn.RMSNorm(HIDDEN, EPS)
        self.hidden_layernorm = nn.RMSNorm(HIDDEN, EPS)
        self.input_proj = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.input_layernorm = nn.RMSNorm(HIDDEN, EPS)
        self.self_attn = nn.ModuleDict({"o_proj": nn.Linear(HIDDEN, HIDDEN, bias=False)})
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, EPS)
        self.mlp = nn.ModuleDict({"down_proj": nn.Linear(HIDDEN, HIDDEN, bias=False)})
        self.final_layernorm = final_layernorm

    def forward(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        both = self.hidden_layernorm(hidden), self.token_layernorm(embedding)
        x = self.input_proj(torch.cat(both, -1))
        x = x + self.self_attn["o_proj"](self.input_layernorm(x))
        x = x + self.mlp["down_proj"](self.post_attention_layernorm(x))
        out: Tensor = self.final_layernorm(x)
        return out


def make_model(checkpoint: Checkpoint) -> nn.Module:
    """What lies around the layers of a trunk, and the head."""
    root, trunk = nn.Module(), nn.Module()
    trunk.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
    trunk.norm = nn.RMSNorm(HIDDEN, EPS)
    is_norm_shared = checkpoint.final_norm == "model.norm"
    trunk.mtp_layers = nn.ModuleList(
        StandIn(trunk.norm if is_norm_shared else nn.RMSNorm(HIDDEN, EPS))
        for _ in range(MTP_LAYERS)
    )
    root.model, root.lm_head = trunk, nn.Linear(HIDDEN, VOCAB, bias=False)
    return root.requires_grad_(False)


def layout_of(architecture: str) -> MtpLayout:
    layout = mtp_layout(make_config(architecture))
    assert layout is not None
    return layout


def make_config(architecture: str) -> ModelConfig:
    return MiMoForCausalLM.Config(
        architectures=[architecture],
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=TRUNK_LAYERS,
        num_attention_heads=1,
        max_position_embeddings=16,
        rms_norm_eps=EPS,
        num_nextn_predict_layers=MTP_LAYERS,
    )


def assert_loads(folder: Path, checkpoint: Checkpoint, stored: Weights, true: Weights) -> None:
    """A model filled with ``stored`` has the logits that the layout's own code has of ``true``."""
    save_file(stored, folder / "model.safetensors")
    model = make_model(checkpoint)
    layout = layout_of(checkpoint.architecture)
    fill(model, [folder / "model.safetensors"], layout, lambda text, fraction: None)
    ids, hidden = torch.randint(VOCAB, (5,)), torch.randn(5, HIDDEN)
    for layer in range(layout.num_layers):
        head = model.get_submodule(f"model.mtp_layers.{layer}")
        embedding = model.get_submodule("model.embed_tokens")(ids)
        ours = model.get_submodule("lm_head")(head(embedding, hidden))
        torch.testing.assert_close(ours, checkpoint.logits(true, layer, ids, hidden))


@pytest.mark.parametrize("checkpoint", CHECKPOINTS.values(), ids=CHECKPOINTS.keys())
def test_a_head_computes_what_its_own_layout_does(tmp_path: Path, checkpoint: Checkpoint) -> None:
    """Copies have other values here, so that one which replaces the trunk's is seen."""
    weights = checkpoint.random_weights()
    assert_loads(tmp_path, checkpoint, weights, weights)


def test_a_projection_that_a_conversion_left_transposed_is_turned(tmp_path: Path) -> None:
    weights = ERNIE.random_weights()
    name = "model.mtp_linear_proj.1.weight"
    stored = weights | {name: weights[name].T.contiguous()}
    assert_loads(tmp_path, ERNIE, stored, weights)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS.values(), ids=CHECKPOINTS.keys())
def test_a_tensor_that_a_head_lacks_is_named(tmp_path: Path, checkpoint: Checkpoint) -> None:
    weights = checkpoint.random_weights()
    del weights[checkpoint.name(checkpoint.hidden_norm, 1) + ".weight"]
    with pytest.raises(ConfigError, match=r"lacks tensors model.mtp_layers.1.hidden_layernorm"):
        assert_loads(tmp_path, checkpoint, weights, weights)


@pytest.mark.parametrize(
    ("architecture", "prefix"),
    [
        ("DeepseekV3ForCausalLM", "model.layers.4."),
        ("Glm4MoeForCausalLM", "model.layers.4."),
        ("Ernie4_5_MoeForCausalLM", "model.mtp_block.1."),
    ],
)
@pytest.mark.parametrize(
    "inner",
    [
        "mlp.experts.255.down_proj.weight",
        "mlp.shared_experts.up_proj.weight",
        "mlp.gate.e_score_correction_bias",
        "self_attn.kv_a_proj_with_mqa.weight",
    ],
)
def test_what_attention_and_experts_are_made_of_keeps_its_name(
    architecture: str, prefix: str, inner: str
) -> None:
    mapped = layout_of(architecture).renamed(prefix + inner)
    assert mapped is not None
    assert mapped.name == f"model.mtp_layers.1.{inner}"


@pytest.mark.parametrize("checkpoint", CHECKPOINTS.values(), ids=CHECKPOINTS.keys())
def test_tensors_of_the_trunk_are_not_of_the_head(checkpoint: Checkpoint) -> None:
    layout = layout_of(checkpoint.architecture)
    inner = "self_attn.o_proj.weight"
    names = [f"model.layers.{layer}.{inner}" for layer in (0, 2, 5, 30, 41)]
    for name in [*names, "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]:
        assert layout.renamed(name) is None, name


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("DeepseekV3ForCausalLM", "model.layers.3.surprise.weight"),
        ("DeepseekV3ForCausalLM", "model.layers.4.enormous.weight"),
        ("Glm4MoeForCausalLM", "model.layers.3.eh_proj.bias"),
        ("Ernie4_5_MoeForCausalLM", "model.mtp_emb_norm.2.weight"),
        ("MiMoForCausalLM", "model.mtp_layers.0.enorm.weight"),
    ],
)
def test_an_unknown_tensor_of_a_head_is_named(architecture: str, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"MTP head .* {name}$"):
        layout_of(architecture).renamed(name)


def test_an_architecture_without_a_head_has_no_layout() -> None:
    assert mtp_layout(make_config("Qwen2ForCausalLM")) is None
