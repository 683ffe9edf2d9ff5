"""ERNIE-4.5 in Paddle's layout computes the same as in torch's: dense, experts, heads, ranks."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file
from safetensors.torch import save_file as save_torch_file
from torch import Tensor
from transformers import Ernie4_5ForCausalLM

from benchmarks.harness import scheduled
from benchmarks.harness.engines import make_engine
from services.worker.layers.parallel import Parallel
from services.worker.models.registry import read_model_config
from services.worker.weights.load import load_model
from shared.errors import ConfigError
from shared.model_folder import weight_files
from shared.wire.messages import SamplingParams
from tests.services.worker.checkpoints import change_config, random_prompts, save_model
from tests.services.worker.forward import our_logits
from tests.services.worker.test_families import CASES
from tests.services.worker.test_mtp_families import FAMILIES, Checkpoint, speculation

JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "up_gate_proj": ("gate_proj", "up_proj"),
}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "ernie": {"tie_word_embeddings": True},
    "ernie, biases": {},
    "ernie moe": {"tie_word_embeddings": False},
}


def to_paddle(folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Rewrites the checkpoint in ``folder``; bfloat16 as integers."""
    (file,) = weight_files(folder)
    config = json.loads((folder / "config.json").read_text())
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in joined(load_file(file)).items():
        keeps = name.endswith("embed_tokens.weight") or tensor.dim() < 2
        keeps |= not name.endswith(".weight")
        keeps |= name == "lm_head.weight" and config["tie_word_embeddings"]
        whole = (tensor if keeps else tensor.T).to(dtype).contiguous()
        bits = whole.view(torch.uint16) if dtype == torch.bfloat16 else whole
        tensors[re.sub(r"^model\.", "ernie.", name)] = bits.numpy()
    save_file(tensors, file, {"format": "np"})


def joined(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With one tensor for the parts of ``JOINED``; experts one by one."""
    single = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                single[name.replace("gate_up_proj", f"{expert}.up_gate_proj.weight")] = both
        elif name.endswith("experts.down_proj"):
            for expert, own in enumerate(tensor):
                single[name.replace("down_proj", f"{expert}.down_proj.weight")] = own
        else:
            single[name] = tensor
    for whole, parts in JOINED.items():
        for first in [name for name in single if f".{parts[0]}." in name]:
            found = [single.pop(first.replace(parts[0], part)) for part in parts]
            single[first.replace(parts[0], whole)] = torch.cat(found)
    return single


@pytest.fixture(params=CHECKPOINTS)
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint in torch's layout, and in Paddle's."""
    family, changes = CASES[request.param]
    both = tmp_path / "torch", tmp_path / "paddle"
    for folder in both:
        torch.manual_seed(0)
        save_model(folder, family, "10MB", **changes | CHECKPOINTS[request.param])
    to_paddle(both[1])
    if family is Ernie4_5ForCausalLM:
        change_config(both[1], architectures=["Ernie4_5_ForCausalLM"])
    return both


def test_logits_have_the_same_bits(folders: tuple[Path, Path]) -> None:
    prompts = random_prompts(3)
    expected, found = (our_logits(each, prompts, torch.float32, "native") for each in folders)
    for one, other in zip(expected, found, strict=True):
        assert one.tobytes() == other.tobytes()


def test_each_rank_has_the_same_weights(folders: tuple[Path, Path]) -> None:
    for rank in range(2):
        expected, found = (weights_of(each, Parallel(rank, 2)) for each in folders)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)


def weights_of(folder: Path, parallel: Parallel) -> dict[str, Tensor]:
    config, device = read_model_config(folder), torch.device("cpu")
    return load_model(
        folder, config, torch.float32, device, lambda text, share: None, parallel
    ).state_dict()


def test_bfloat16_is_stored_as_integers(tmp_path: Path) -> None:
    family, changes = CASES["ernie moe"]
    both = tmp_path / "torch", tmp_path / "paddle"
    for folder in both:
        torch.manual_seed(0)
        save_model(folder, family, "10MB", **changes)
    (file,) = weight_files(both[0])
    save_torch_file({name: each.bfloat16() for name, each in load_file(file).items()}, file)
    to_paddle(both[1], torch.bfloat16)
    prompts = random_prompts(2)
    expected, found = (our_logits(each, prompts, torch.bfloat16, "native") for each in both)
    assert [each.tobytes() for each in expected] == [each.tobytes() for each in found]


def test_an_mtp_head_drafts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    Checkpoint(FAMILIES["ERNIE-4.5"], tmp_path)
    params = SamplingParams(seed=0, temperature=0.0, max_tokens=10, draft_logprobs=True)
    texts, num_drafts = [], []
    for _ in range(2):
        engine = make_engine(tmp_path, "native", speculative_config=speculation("mtp"))
        done = scheduled.run(engine, random_prompts(3), params)
        texts.append(done.texts)
        num_drafts.append([len(each) for each in done.drafts])
        if len(texts) == 1:
            to_paddle(tmp_path)
    assert texts[0] == texts[1]
    assert num_drafts[0] == num_drafts[1]
    assert sum(num_drafts[1]) > 0


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"quantization_config": {"quantization": "wint4"}},
            "quantization_config is not supported for Paddle's weights",
        ),
        ({"vision_config": {"depth": 2}}, "vision_config is not supported for Paddle's weights"),
        (
            {"num_attention_heads": 7},
            r"qkv_proj\.weight has \d+ outputs, no multiple of num_attention_heads 7 \+ 2 · ",
        ),
    ],
)
def test_other_folders_are_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    save_model(tmp_path, Ernie4_5ForCausalLM, "10MB", head_dim=16)
    to_paddle(tmp_path)
    config = read_model_config(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=problem):
        load_model(tmp_path, config, torch.float32, torch.device("cpu"), lambda text, share: None)
