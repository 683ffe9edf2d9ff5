"""The byte-level BPE tokenizer of the embedded model, and its chat format (ChatML)."""

import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from models.training.dialogues import Dialogue, call_text

VOCABULARY_SIZE = 8192
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
# Qwen2's pattern: single digits, so that numbers of one length have one shape.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text()


def train_tokenizer(texts: Iterable[str], vocabulary_size: int = VOCABULARY_SIZE) -> Tokenizer:
    """Learn the merges; nothing is normalised, so decoding gives back the exact text."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocabulary_size:
        raise ValueError(f"{tokenizer.get_vocab_size()} tokens instead of {vocabulary_size}")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and the configuration that transformers reads."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [TURN_START, TURN_END],
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def tools_text(dialogue: Dialogue) -> str:
    """Return the system message with the tools, after the dialogue's own one."""
    first = dialogue.messages[0]
    own = f"{first.content}\n\n" if first.role == "system" else ""
    listed = "".join(f"\n{json.dumps(tool, ensure_ascii=False)}" for tool in dialogue.tools)
    call = '<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>'
    return (
        f"{own}# Tools\n\nThese functions can be called:\n<tools>{listed}\n</tools>\n\n"
        f"A call is written like this:\n{call}"
    )


def dialogue_pieces(dialogue: Dialogue) -> Iterator[tuple[str, bool]]:
    """Yield the text of a dialogue in the chat template's format, with True for the parts to
    learn."""
    messages = dialogue.messages
    if dialogue.tools:
        yield f"{TURN_START}system\n{tools_text(dialogue)}{TURN_END}\n", False
        messages = messages[1:] if messages[0].role == "system" else messages
    for is_response, group in groupby(messages, lambda message: message.role == "tool"):
        if is_response:
            texts = (f"\n<tool_response>\n{each.content}\n</tool_response>" for each in group)
            yield f"{TURN_START}user{''.join(texts)}{TURN_END}\n", False
            continue
        for message in group:
            yield f"{TURN_START}{message.role}\n", False
            content = call_text(message.tool_calls) if message.tool_calls else message.content
            yield f"{content}{TURN_END}", message.role == "assistant"
            yield "\n", False


def encode_dialogue(tokenizer: Tokenizer, dialogue: Dialogue) -> tuple[list[int], list[bool]]:
    """Return the ids of a dialogue, with True for the ids the model must learn to write.

    No piece ends inside a possible token, so encoding piece by piece equals encoding the whole.
    """
    ids: list[int] = []
    is_target: list[bool] = []
    for piece, learned in dialogue_pieces(dialogue):
        piece_ids = tokenizer.encode(piece, add_special_tokens=False).ids
        ids += piece_ids
        is_target += [learned] * len(piece_ids)
    return ids, is_target
