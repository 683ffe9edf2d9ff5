"""A query and a document as input of a model that scores them."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from services.tokenizer.pairs.encode import encode_pair
from services.tokenizer.text_model import ChatSettings, TextModel, Truncation
from shared.errors import InvalidRequest
from tests.pooling_models import save_tokenizer

PAIRS = """\
{%- for m in messages if m.role in ["query", "document", "system"] -%}
[{{ m.role }}={{ m.content }}]
{%- endfor -%}
"""
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"


def make_model(folder: Path, own: str | None = None, **settings: object) -> TextModel:
    (folder / "config.json").write_text("{}")
    save_tokenizer(folder, ends=True)
    if own is not None:
        (folder / "chat_template.jinja").write_text(own)
    return TextModel(folder, 512, 8224, ChatSettings(**settings))  # type: ignore[arg-type]


def encoded(
    model: TextModel, *pair: str, truncation: Truncation | None = None
) -> tuple[np.ndarray, int]:
    prompt = np.frombuffer(msgspec.json.encode(pair), np.uint8)
    return encode_pair(model, prompt, True, truncation)


def read(model: TextModel, *pair: str) -> str:
    return model.decode_many(encoded(model, *pair)[0].tolist())


def test_a_document_is_cut_without_the_gil(tmp_path: Path, monkeypatch) -> None:
    """It may have megabytes; ``encode_exactly`` is for a few words, and holds the GIL."""
    model = make_model(tmp_path, PAIRS)
    whole, _ = encoded(model, "who?", "me " * 9)
    monkeypatch.delattr(TextModel, "encode_exactly")
    ids, _ = encoded(model, "who?", "me " * 9, truncation=Truncation(len(whole) - 2))
    assert 0 < len(ids) <= len(whole) - 2


def test_without_a_template_both_stand_side_by_side(tmp_path: Path) -> None:
    model = make_model(tmp_path, CHAT)
    assert read(model, "who?", "me") == "who?<|endoftext|>me<|endoftext|>"
    with pytest.raises(InvalidRequest, match="no template of pairs") as refusal:
        read(model, "who?", "me", "be short")
    assert refusal.value.param == "instruction"


@pytest.mark.parametrize(("num_ids", "num_second"), [(None, 4), (6, 2), (2, 1)])
def test_the_ids_of_the_second_text_are_counted(
    tmp_path: Path, num_ids: int | None, num_second: int
) -> None:
    """As the tokenizer's own types say, also after a cut; none under a template."""
    (tmp_path / "config.json").write_text("{}")
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[SEP]": 2}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["[SEP]"])
    tokenizer.post_processor = TemplateProcessing(
        single="$A [SEP]", pair="[SEP] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[SEP]", 2)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = TextModel(tmp_path, 512, 3, ChatSettings())
    cut = None if num_ids is None else Truncation(num_ids, keeps_start=True)
    ids, num = encoded(model, "a a", "b b b", truncation=cut)
    whole = [2, 0, 0, 2, 1, 1, 1, 2]
    assert ids.tolist() == (whole if num_ids is None else [*whole[: num_ids - 1], 2])
    assert num == num_second
    assert encoded(make_model(tmp_path, PAIRS), "who?", "me")[1] == 0


def test_a_template_that_knows_the_roles_is_taken(tmp_path: Path) -> None:
    model = make_model(tmp_path, PAIRS)
    assert read(model, "who?", "me") == "[query=who?][document=me]"
    assert read(model, "who?", "me", "be short").endswith("[system=be short]")


def test_a_template_that_is_set_is_taken_whatever_it_knows(tmp_path: Path) -> None:
    file = tmp_path / "set.jinja"
    file.write_text("{{ messages[0].content }} / {{ messages[1].content }}")
    assert read(make_model(tmp_path, PAIRS, template=file), "who?", "me") == "who? / me"
    file.write_text("{{ messages[7].content }}")
    with pytest.raises(InvalidRequest, match="template of pairs refuses this one"):
        read(make_model(tmp_path, PAIRS, template=file), "who?", "me")


def test_a_score_of_two_tokens_is_asked_for_as_qwen3_rerankers_are(tmp_path: Path) -> None:
    text = read(make_model(tmp_path, classifies_by_token=True), "who?", "me")
    assert "<Query>: who?\n<Document>: me<|im_end|>\n<|im_start|>assistant\n<think>\n\n" in text


def test_a_pair_that_is_too_long_is_refused_before_it_is_encoded(tmp_path: Path) -> None:
    model = make_model(tmp_path, PAIRS)
    for pair in (("a" * 10**6, "b"), ("a", "b" * 10**6)):
        with pytest.raises(InvalidRequest, match="max-model-len"):
            encoded(model, *pair)


@pytest.mark.parametrize("keeps_start", [True, False])
def test_under_a_template_the_document_is_cut(tmp_path: Path, keeps_start: bool) -> None:
    model = make_model(tmp_path, PAIRS)
    words = " ".join(str(number) for number in range(100))
    whole, _ = encoded(model, "who?", words)
    num = len(whole) - 60
    ids, _ = encoded(model, "who?", words, truncation=Truncation(num, keeps_start))
    assert len(ids) <= num
    text = model.decode_many(ids.tolist())
    start, end = ("0 1 2", "]") if keeps_start else ("", "98 99]")
    assert text.startswith(f"[query=who?][document={start}")
    assert text.endswith(end)
    with pytest.raises(InvalidRequest, match="max-model-len"):
        encoded(model, "who?", words, truncation=Truncation(3))


def test_a_document_with_more_tokens_at_each_cut_is_refused(tmp_path: Path) -> None:
    """An unknown word is written as three words, which are unknown too."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text(PAIRS)
    tokenizer = Tokenizer(models.WordLevel({"x.y": 0}, unk_token="x.y"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = TextModel(tmp_path, 512, 1, ChatSettings())
    words = " ".join("abcdefghij")
    num = len(encoded(model, "who", words)[0]) - 2
    with pytest.raises(InvalidRequest, match="max-model-len"):
        encoded(model, "who", words, truncation=Truncation(num))
