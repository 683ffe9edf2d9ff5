"""MTP heads of DeepSeek-V3, GLM-4.5 and ERNIE-4.5: their drafts; outputs equal those without."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm
from transformers import (
    Ernie4_5_MoeForCausalLM,
    Glm4MoeForCausalLM,
    NemotronHForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3NextForCausalLM,
)

from benchmarks.harness import scheduled
from benchmarks.harness.engines import ENGINES, make_engine
from shared.model_folder import weight_files
from shared.wire.messages import SamplingParams
from tests.services.worker.checkpoints import change_config, oracle_of, random_prompts, save_model
from tests.services.worker.hybrids import EXPERTS, NEMOTRON, NEMOTRON_EXPERTS, SIZES
from tests.services.worker.speculation import iter_positions
from tests.services.worker.test_families import CASES, ERNIE, GLM

TRUNK_LAYERS, HIDDEN, DEPTH = 3, 64, 3
BLOCK = f"model.layers.{TRUNK_LAYERS}."


@dataclass(frozen=True)
class Family:
    """Names of a head's tensors, besides its ``block``, or several, in the family's checkpoints.
    ``counts`` are the keys of config.json for a trunk with a head; norms are stored minus
    ``norm_offset``."""

    model: type[PreTrainedModel]
    changes: dict[str, Any]
    token_norm: str
    hidden_norm: str
    proj: str
    final_norm: str
    block: str
    counts: dict[str, Any] = field(default_factory=lambda: {"num_nextn_predict_layers": 1})
    norm_offset: float = 0.0
    trunk: str = "model."
    trunk_norm: str = "model.norm"
    more_blocks: tuple[str, ...] = ()


FAMILIES = {
    "GLM-4.5": Family(
        Glm4MoeForCausalLM,
        {**GLM, "use_qk_norm": True},
        token_norm=f"{BLOCK}enorm",
        hidden_norm=f"{BLOCK}hnorm",
        proj=f"{BLOCK}eh_proj",
        final_norm=f"{BLOCK}shared_head.norm",
        block=BLOCK,
    ),
    "DeepSeek-V3": Family(
        *CASES["deepseek v3, yarn"],
        token_norm=f"{BLOCK}enorm",
        hidden_norm=f"{BLOCK}hnorm",
        proj=f"{BLOCK}eh_proj",
        final_norm=f"{BLOCK}shared_head.norm",
        block=BLOCK,
    ),
    "ERNIE-4.5": Family(
        Ernie4_5_MoeForCausalLM,
        {**ERNIE, "moe_layer_end_index": TRUNK_LAYERS - 1},
        token_norm="model.mtp_emb_norm.0",
        hidden_norm="model.mtp_hidden_norm.0",
        proj="model.mtp_linear_proj.0",
        final_norm="model.norm",
        block="model.mtp_block.0.",
    ),
}


def hybrid(model: type[PreTrainedModel], counts: dict[str, Any], **changes: Any) -> Family:
    types = ["linear_attention", "full_attention"] * 2
    return Family(
        model,
        {**SIZES, **changes, "layer_types": types},
        token_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        proj="mtp.fc",
        final_norm="mtp.norm",
        block="mtp.layers.0.",
        counts=counts | {"layer_types": types[:TRUNK_LAYERS]},
        norm_offset=1.0,
    )


def nemotron(**changes: Any) -> Family:
    """The layers of a head have one mixer each."""
    kinds = ["linear_attention", "moe", "full_attention"]
    shape = {**NEMOTRON, **NEMOTRON_EXPERTS, **changes, "initializer_range": 0.15}
    return Family(
        NemotronHForCausalLM,
        {**shape, "layers_block_type": [*kinds, "full_attention", "moe"], "num_hidden_layers": 5},
        token_norm="mtp.layers.0.enorm",
        hidden_norm="mtp.layers.0.hnorm",
        proj="mtp.layers.0.eh_proj",
        final_norm="mtp.layers.1.final_layernorm",
        block="mtp.layers.0.",
        counts={"layers_block_type": kinds, "num_nextn_predict_layers": 1},
        trunk="backbone.",
        trunk_norm="backbone.norm_f",
        more_blocks=("mtp.layers.1.",),
    )


HYBRID_FAMILIES = {
    "Qwen3.5": hybrid(Qwen3_5ForCausalLM, {"mtp_num_hidden_layers": 1}),
    "Qwen3.5 MoE": hybrid(Qwen3_5MoeForCausalLM, {"mtp_num_hidden_layers": 1}, **EXPERTS),
    "Qwen3-Next": hybrid(Qwen3NextForCausalLM, {}, **EXPERTS),
    "Nemotron 3": nemotron(),
    "Nemotron 3, latents": nemotron(moe_latent_size=32),
}


class Checkpoint:
    """A checkpoint in ``folder``. Its head's blocks are the last layers of a transformers model;
    the layers before them are the trunk."""

    def __init__(self, family: Family, folder: Path) -> None:
        changes = {"num_hidden_layers": TRUNK_LAYERS + 1, **family.changes}
        save_model(folder, family.model, "10MB", **changes)
        self._model: Any = oracle_of(folder)
        (file,) = weight_files(folder)
        stored = load_file(file).items()
        weights = dict(stored)
        for layer, block in enumerate((family.block, *family.more_blocks), TRUNK_LAYERS):
            own = f"{family.trunk}layers.{layer}."
            weights = {name.replace(own, block): each for name, each in weights.items()}
        added = {
            family.token_norm: torch.rand(HIDDEN) + 0.5,
            family.hidden_norm: torch.rand(HIDDEN) + 0.5,
            family.proj: torch.randn(HIDDEN, 2 * HIDDEN) * 0.1,
        }
        if family.final_norm != "model.norm":
            added[family.final_norm] = torch.rand(HIDDEN) + 0.5
        self._weights = weights | {f"{name}.weight": each for name, each in added.items()}
        save_file(self._weights, file, {"format": "pt"})
        change_config(folder, num_hidden_layers=TRUNK_LAYERS, **family.counts)
        self._family, self._layers = family, list(self._model.model.layers)
        self.folder = folder

    @torch.inference_mode()
    def draft_logits(self, ids: list[int], drafts: list[int]) -> Tensor:
        """[1 + len(drafts), vocab_size] after ``ids``, and after each of ``drafts``: each draft is
        paired with the head's own previous state."""
        family, model = self._family, self._model
        embed = model.get_input_embeddings()
        x = embed(torch.tensor(ids[:-1]))
        for layer in self._layers[:TRUNK_LAYERS]:
            x = self._run(layer, x)
        states, outs = self._norm(x, family.trunk_norm), []
        for num in range(1 + len(drafts)):
            embedded = embed(torch.tensor([*ids, *drafts[:num]][1:]))
            both = self._norm(embedded, family.token_norm), self._norm(states, family.hidden_norm)
            x = linear(torch.cat(both, 1), self._weights[f"{family.proj}.weight"])
            for layer in self._layers[TRUNK_LAYERS:]:
                x = self._run(layer, x)
            outs.append(self._norm(x[-1], family.final_norm))
            states = torch.cat((states, outs[-1][None]))
        return linear(torch.stack(outs), model.lm_head.weight)

    def _run(self, layer: Any, x: Tensor) -> Tensor:
        """[n, HIDDEN] from position 0 on → the same"""
        places = torch.arange(len(x))[None]
        others: dict[str, Any] = {}
        if rotary := getattr(self._model.model, "rotary_emb", None):
            others["position_embeddings"] = rotary(x[None], places)
        out = layer(x[None], attention_mask=None, position_ids=places, **others)
        return out[0]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        config = self._model.config
        eps = getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon
        weight = self._weights[f"{name}.weight"] + self._family.norm_offset
        return rms_norm(x, (HIDDEN,), weight, eps)


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    torch.manual_seed(0)
    return Checkpoint(FAMILIES[request.param], tmp_path_factory.mktemp("family"))


def speculation(method: str) -> dict[str, Any]:
    return {"method": method, "num_speculative_tokens": DEPTH, "adaptive": False}


@pytest.mark.parametrize("kernels", ENGINES)
@pytest.mark.parametrize("checkpoint", FAMILIES, indirect=True)
def test_drafts_match_plain_torch(checkpoint: Checkpoint, kernels: str) -> None:
    engine = make_engine(checkpoint.folder, kernels, speculative_config=speculation("mtp"))
    prompts = random_prompts(6)
    params = SamplingParams(seed=0, temperature=0.0, max_tokens=10, logprobs=0, draft_logprobs=True)
    done = scheduled.run(engine, prompts, params)
    num_seen = 0
    for index, prompt in enumerate(prompts):
        positions = iter_positions(done.verified[index])
        for (_, part), position in zip(done.drafts[index], positions, strict=True):
            ids, drafts = prompt + done.texts[index][:position], part.ids.tolist()
            logits = checkpoint.draft_logits(ids, drafts[:-1])
            places = range(len(drafts))
            assert (logits.amax(1) - logits[places, drafts]).max() < 1e-3
            logprobs = torch.log_softmax(logits, -1)[places, drafts]
            np.testing.assert_allclose(part.values, logprobs, atol=2e-3)
            num_seen += len(drafts)
    assert num_seen > 60


@pytest.mark.parametrize("kernels", ENGINES)
@pytest.mark.parametrize("checkpoint", FAMILIES, indirect=True)
def test_with_drafts_texts_match_runs_without(checkpoint: Checkpoint, kernels: str) -> None:
    """At a high temperature even drafts of a random head are often accepted."""
    params = [SamplingParams(seed=seed, temperature=6.0, max_tokens=12) for seed in range(8)]
    texts = []
    for method in ("mtp", "none"):
        engine = make_engine(checkpoint.folder, kernels, speculative_config=speculation(method))
        found = scheduled.run(engine, random_prompts(8), params)
        assert (found.num_accepted > 0) == (method == "mtp")
        texts.append(found.texts)
    assert texts[0] == texts[1]


def test_a_head_that_was_left_out_is_not_needed(tmp_path: Path) -> None:
    family = FAMILIES["GLM-4.5"]
    save_model(tmp_path, family.model, **family.changes)
    change_config(tmp_path, num_nextn_predict_layers=1)
    assert make_engine(tmp_path).capacity.num_speculative_tokens == 0
