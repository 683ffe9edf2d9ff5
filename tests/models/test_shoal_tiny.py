"""The embedded model as it is shipped, and the data it was made from."""

import json
from itertools import islice
from random import Random

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from models.training.corpus import load_documents, split_documents
from models.training.dialogues import TEMPLATES, draw_turn, generate_dialogues
from models.training.model import ModelConfig, ShoalTiny
from shared.model_folder import EMBEDDED_MODEL

MIB = 1 << 20
WORDS = ["able", "bear", "code", "data", "each", "file", "give", "here", "item", "just"]


def test_its_shards_are_small_and_complete():
    index = json.loads((EMBEDDED_MODEL / "model.safetensors.index.json").read_text())
    shards = {EMBEDDED_MODEL / name for name in index["weight_map"].values()}
    assert len(shards) >= 2
    assert shards == set(EMBEDDED_MODEL.glob("*.safetensors"))
    assert max(shard.stat().st_size for shard in shards) < 12 * MIB
    assert sum(path.stat().st_size for path in EMBEDDED_MODEL.iterdir()) < 32 * MIB
    assert any("mtp_layers.0.input_proj" in name for name in index["weight_map"])


def test_its_card_has_what_a_card_must_have():
    card = (EMBEDDED_MODEL / "README.md").read_text()
    for word in ("bits per byte", "licence", "parameters", "accepted", "demonstration", "held out"):
        assert word in card


def test_the_model_that_is_trained_is_the_model_that_is_served():
    """Random weights: the training code's logits are those of transformers' Qwen2."""
    torch.manual_seed(0)
    model = ShoalTiny(ModelConfig()).eval()
    oracle = Qwen2ForCausalLM(Qwen2Config.from_pretrained(EMBEDDED_MODEL)).float().eval()
    state = {name: each for name, each in model.state_dict().items() if "mtp_layers" not in name}
    missing, unexpected = oracle.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    oracle.tie_weights()
    ids = torch.randint(0, 8192, (2, 40))
    with torch.no_grad():
        head = model.model.embed_tokens.weight
        logits = model.model.norm(model.hidden(ids)) @ head.T
        assert torch.allclose(logits, oracle(ids).logits, atol=1e-4)


def test_dialogues_are_the_same_for_the_same_seed():
    first, second = ([*islice(generate_dialogues(7, WORDS), 20)] for _ in range(2))
    assert first == second
    assert first != [*islice(generate_dialogues(8, WORDS), 20)]


@pytest.mark.parametrize("name", ["addition", "subtraction", "multiplication"])
def test_sums_are_right(name: str):
    for seed in range(200):
        turn = draw_turn(Random(seed), TEMPLATES[name][0], WORDS, held_out=False)
        left, symbol, right, _, result = turn.answer.split()
        numbers = int(left), int(right)
        expected = {"+": sum(numbers), "-": numbers[0] - numbers[1], "*": numbers[0] * numbers[1]}
        assert int(result) == expected[symbol]


def test_held_out_files_are_not_trained_on():
    training, held_out = split_documents(load_documents())
    assert held_out
    assert not {each.text for each in held_out} & {each.text for each in training}
