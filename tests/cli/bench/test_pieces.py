import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from cli.bench.pieces import cut, load_tokenizer, read_text
from shared.errors import ConfigError
from shared.model_folder import EMBEDDED_MODEL

TEXT = "".join(
    f"TraceLine {number} of a text – with ünïcode, and {number * number}.\n" for number in range(40)
)


@pytest.fixture
def tokenizer() -> Tokenizer:
    return load_tokenizer(EMBEDDED_MODEL)


def begin_with(tokenizer: Tokenizer, *ids: int) -> None:
    """Like many models' tokenizers at the beginning of each text."""
    special = [(tokenizer.id_to_token(each), each) for each in ids]
    words = " ".join(word for word, _ in special)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{words} $A {special[0][0]}", special_tokens=special
    )


def test_pieces_are_of_one_length_and_spread_over_the_text(tokenizer: Tokenizer):
    ids = tokenizer.encode(TEXT).ids
    found = cut(TEXT, tokenizer, 20, 4)
    num_whole = len(ids) // 20
    starts = [int(number * num_whole / 4) * 20 for number in range(4)]
    assert [piece.ids.tolist() for piece in found] == [ids[each : each + 20] for each in starts]
    for piece in found:
        assert piece.num_given == 1
        assert piece.ids.dtype == np.int32
        assert piece.num_bytes == len(tokenizer.decode(piece.ids[1:].tolist()).encode())


def test_there_are_as_many_pieces_as_the_text_has(tokenizer: Tokenizer):
    found = cut(TEXT, tokenizer, 20, 10_000)
    ids = tokenizer.encode(TEXT).ids
    assert np.concatenate([piece.ids for piece in found]).tolist() == ids[: len(ids) // 20 * 20]


@pytest.mark.parametrize("special", [(0,), (0, 1)])
def test_special_tokens_begin_each_piece_and_are_not_scored(
    tokenizer: Tokenizer, special: tuple[int, ...]
):
    plain = cut(TEXT, tokenizer, 20 - len(special), 10_000)
    begin_with(tokenizer, *special)
    found = cut(TEXT, tokenizer, 20, 10_000)
    assert len(found) == len(plain)
    for piece, without in zip(found, plain, strict=True):
        assert piece.ids.tolist() == [*special, *without.ids.tolist()]
        assert piece.num_given == len(special)
        assert piece.num_bytes == len(tokenizer.decode(without.ids.tolist()).encode())


def test_a_text_that_is_too_short_is_refused_with_its_length(tokenizer: Tokenizer):
    with pytest.raises(ConfigError, match=r"--text: its \d tokens are fewer than --length = 16"):
        cut("Hello.", tokenizer, 16, 3)


@pytest.mark.slow
def test_the_default_needs_the_source_tree(monkeypatch: pytest.MonkeyPatch):
    assert len(read_text(None)) > 100_000
    monkeypatch.setitem(sys.modules, "models.training.corpus", None)
    with pytest.raises(ConfigError, match="--text: a file is needed"):
        read_text(None)


def test_a_tokenizer_that_does_not_parse_is_named(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"model: .*/tokenizer.json: "):
        load_tokenizer(tmp_path)
