"""The embedded model with markers of reasoning in its vocabulary and template."""

import json
from pathlib import Path

from shared.model_folder import EMBEDDED_MODEL

THINK = "{%- if enable_thinking is not defined or enable_thinking %}{{- '<think>\\n' }}{%- endif %}"


def make_thinking_model(folder: Path) -> Path:
    """Two words of its vocabulary become the markers; its output remains nonsense."""
    folder.mkdir()
    for path in EMBEDDED_MODEL.iterdir():
        (folder / path.name).symlink_to(path)
    tokenizer = _replaced(folder / "tokenizer.json")
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    for marker in ("</think>", "<think>"):
        word, token_id = max(vocabulary.items(), key=lambda item: int(item[1]))
        tokenizer["model"]["merges"] = merges = [each for each in merges if "".join(each) != word]
        del vocabulary[word]
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        tokenizer["added_tokens"].append({"id": token_id, "content": marker} | flags)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = _replaced(folder / "tokenizer_config.json")
    config["chat_template"] = config["chat_template"].replace(
        "{{- '<|im_start|>assistant\\n' }}", "{{- '<|im_start|>assistant\\n' }}" + THINK
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _replaced(link: Path) -> dict:
    """The JSON of a file, to be rewritten."""
    text = link.read_text()
    link.unlink()
    content: dict = json.loads(text)
    return content
