"""The embedded model as shipped, and its training data."""

import json
from functools import partial
from itertools import islice
from random import Random

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from models.training.corpus import load_documents, split_documents
from models.training.dialogues import draw_turn, generate_dialogues
from models.training.model import ModelConfig, ShoalTiny
from models.training.templates import TEMPLATES
from models.training.tokenizer import encode_dialogue
from models.training.tools import KINDS, ask, spelled
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


def test_its_card_has_the_required_sections():
    card = (EMBEDDED_MODEL / "README.md").read_text()
    for word in ("bits per byte", "licence", "parameters", "accepted", "demonstration", "held out"):
        assert word in card


def test_the_model_that_is_trained_is_the_model_that_is_served():
    """Random weights: the training code's logits equal transformers' Qwen2's."""
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


def test_dialogues_are_encoded_as_the_chat_template_writes_them():
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    oracle = PreTrainedTokenizerFast.from_pretrained(EMBEDDED_MODEL)
    roles = set()
    for dialogue in islice(generate_dialogues(3, WORDS), 200):
        text = oracle.apply_chat_template(**dialogue.for_template(), tokenize=False)
        ids, is_target = encode_dialogue(tokenizer, dialogue)
        assert ids == tokenizer.encode(text, add_special_tokens=False).ids
        learned = [token for token, is_learned in zip(ids, is_target, strict=True) if is_learned]
        answers = [message for message in dialogue.messages if message.role == "assistant"]
        assert oracle.decode(learned).count("<|im_end|>") == len(answers)
        roles |= {(message.role, bool(dialogue.tools)) for message in dialogue.messages}
    assert {("system", True), ("system", False), ("tool", True)} <= roles


@pytest.mark.parametrize("name", KINDS)
def test_calls_name_the_tool_and_some_are_held_out(name: str):
    tool = spelled(Random(0), KINDS[name])
    template = partial(ask, tool)
    turns = [template(Random(seed), WORDS) for seed in range(2000)]
    for turn in turns:
        assert {call.name for call in turn.calls} == {tool.name}
        assert len(turn.calls) == len(turn.responses)
        for call in turn.calls:
            assert tuple(call.arguments) == tool.parameters
            assert all(str(value) in turn.question for value in call.arguments.values())
    assert draw_turn(Random(1), template, WORDS, held_out=True)


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
