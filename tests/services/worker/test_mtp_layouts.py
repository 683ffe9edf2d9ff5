"""MTP heads of several layouts against their families' own code."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from services.worker.config.model_config import ModelConfig
from services.worker.models.mimo import MiMoForCausalLM
from services.worker.weights.checkpoint import Checkpoint, open_checkpoint
from services.worker.weights.load import fill
from services.worker.weights.mtp_layouts import with_mtp_head
from services.worker.weights.weight_placement import WeightPlacement
from shared.errors import ConfigError
from tests.services.worker.mtp_checkpoints import (
    CHECKPOINTS,
    EPS,
    ERNIE,
    HIDDEN,
    MTP_LAYERS,
    TRUNK_LAYERS,
    VOCAB,
    HeadFormat,
    Weights,
)


class StandIn(nn.Module):
    """A layer with our names and order; its attention and its MLP are one GEMM each."""

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


def make_model(checkpoint: HeadFormat) -> nn.Module:
    """The parts around a trunk's layers, and the head."""
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


def open_view(folder: Path, architecture: str, stored: Weights) -> Checkpoint:
    file = folder / "model.safetensors"
    save_file(stored, file)
    return with_mtp_head(open_checkpoint([file]), make_config(architecture))


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


def assert_loads(folder: Path, checkpoint: HeadFormat, stored: Weights, true: Weights) -> None:
    """A model filled with ``stored`` has the layout's logits for ``true``."""
    model = make_model(checkpoint)
    view = open_view(folder, checkpoint.architecture, stored)
    fill(model, view, lambda text, fraction: None, WeightPlacement(model, torch.device("cpu")))
    ids, hidden = torch.randint(VOCAB, (5,)), torch.randn(5, HIDDEN)
    for layer in range(MTP_LAYERS):
        head = model.get_submodule(f"model.mtp_layers.{layer}")
        embedding = model.get_submodule("model.embed_tokens")(ids)
        ours = model.get_submodule("lm_head")(head(embedding, hidden))
        torch.testing.assert_close(ours, checkpoint.logits(true, layer, ids, hidden))


@pytest.mark.parametrize("checkpoint", CHECKPOINTS.values(), ids=CHECKPOINTS.keys())
def test_a_head_computes_like_its_own_layout(tmp_path: Path, checkpoint: HeadFormat) -> None:
    """Copies have other values here, so that one replacing the trunk's weight is noticed."""
    weights = checkpoint.random_weights()
    assert_loads(tmp_path, checkpoint, weights, weights)


def test_a_projection_that_a_conversion_left_transposed_is_turned(tmp_path: Path) -> None:
    weights = ERNIE.random_weights()
    name = "model.mtp_linear_proj.1.weight"
    stored = weights | {name: weights[name].T.contiguous()}
    assert_loads(tmp_path, ERNIE, stored, weights)


@pytest.mark.parametrize("part", ["", ".T"])
def test_a_projection_is_turned_and_joined_before_a_part_is_taken(
    tmp_path: Path, part: str
) -> None:
    """Ours is read in halves of its columns, and a rank's in some of its rows."""
    name = "model.mtp_linear_proj.1.weight"
    stored = torch.randn(HIDDEN, 2 * HIDDEN)
    weight = {name: stored.T.contiguous() if part else stored}
    view = open_view(tmp_path, ERNIE.architecture, weight)
    tensor = view.find("model.mtp_layers.1.input_proj.weight")
    assert tensor is not None
    assert tensor.shape == [HIDDEN, 2 * HIDDEN]
    embedding, hidden = stored.split(HIDDEN, dim=1)
    assert torch.equal(tensor.read(1, 0, HIDDEN), hidden)
    assert torch.equal(tensor.read(1, HIDDEN, HIDDEN), embedding)
    assert torch.equal(tensor.read(0, 2, 3), torch.cat((hidden, embedding), 1)[2:5])


@pytest.mark.parametrize("checkpoint", CHECKPOINTS.values(), ids=CHECKPOINTS.keys())
def test_a_tensor_that_a_head_lacks_is_named_as_in_its_layout(
    tmp_path: Path, checkpoint: HeadFormat
) -> None:
    weights = checkpoint.random_weights()
    name = checkpoint.name(checkpoint.hidden_norm, 1) + ".weight"
    del weights[name]
    with pytest.raises(ConfigError, match=rf"lacks tensors {name}$"):
        assert_loads(tmp_path, checkpoint, weights, weights)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS.values(), ids=CHECKPOINTS.keys())
def test_an_unknown_tensor_of_a_head_is_named(tmp_path: Path, checkpoint: HeadFormat) -> None:
    weights = checkpoint.random_weights()
    beside, behind = checkpoint.hidden_norm, checkpoint.block
    for name in (
        checkpoint.name(beside, 0) + ".bias",
        checkpoint.name(beside, MTP_LAYERS) + ".weight",
        checkpoint.name(behind, 1) + "surprise.weight",
    ):
        with pytest.raises(ConfigError, match=rf"has no tensor {name}$"):
            assert_loads(tmp_path, checkpoint, weights | {name: torch.zeros(HIDDEN)}, weights)


@pytest.mark.parametrize(
    ("architecture", "prefix"),
    [
        ("DeepseekV3ForCausalLM", "model.layers.4."),
        ("Glm4MoeForCausalLM", "model.layers.4."),
        ("Ernie4_5_MoeForCausalLM", "model.mtp_block.1."),
        ("MiMoForCausalLM", "model.mtp_layers.1."),
    ],
)
def test_tensors_of_attention_and_experts_keep_their_names(
    tmp_path: Path, architecture: str, prefix: str
) -> None:
    view = open_view(tmp_path, architecture, {})
    for inner in (
        "mlp.experts.255.down_proj.weight",
        "mlp.shared_experts.up_proj.weight",
        "mlp.gate.e_score_correction_bias",
        "self_attn.kv_a_proj_with_mqa.weight",
    ):
        assert view.source(f"model.mtp_layers.1.{inner}").name == prefix + inner


def test_tensors_of_the_trunk_keep_theirs(tmp_path: Path) -> None:
    for checkpoint in CHECKPOINTS.values():
        view = open_view(tmp_path, checkpoint.architecture, {})
        inner = "self_attn.o_proj.weight"
        names = [f"model.layers.{layer}.{inner}" for layer in (0, 2, 5, 30, 41)]
        for name in [*names, "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]:
            assert view.source(name) == (name, None)
