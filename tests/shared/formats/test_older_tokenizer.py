"""Folders without tokenizer.json: sentencepiece's ids, links to all files, and refusals."""

import builtins
import contextlib
import json
import shutil
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Tokenizer

from services.tokenizer.text_model import TextModel
from shared.errors import ConfigError
from shared.formats import made_folder
from shared.model_folder import EMBEDDED_MODEL, TOKENIZER_FILE
from shared.model_location import locate_model
from tests.shared.formats.older_tokenizers import CONFIG, VOCAB_SIZE, save_sentencepiece

TEXTS = [
    "Hello  shoal, name the four services!",
    "naïve café: 12 + 30 = 42\n\tif x:\n        return 0",
    "鱼群 moves 🐟🐟",
    " leading and trailing ",
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    save_sentencepiece(folder, request.param)
    return folder


def test_ids_match_sentencepiece(trained: Path) -> None:
    found = locate_model(str(trained))
    assert found.name == trained.name
    text = TextModel(found.folder, 4096, VOCAB_SIZE)
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(trained / "tokenizer.model"))
    for each in TEXTS:
        ids = text.encode(each).tolist()
        assert ids == oracle.encode(each), each
        assert text.decode(ids).lstrip() == oracle.decode(ids).lstrip()
    mark = oracle.piece_to_id("<|im_start|>")
    assert text.encode("<|im_start|>").tolist() == [mark]
    assert text.end_ids == [oracle.eos_id()]


def test_the_folder_has_links_to_the_others_files_and_is_made_once(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = locate_model(str(trained)).folder
    assert {each.name for each in folder.iterdir()} == {
        TOKENIZER_FILE,
        *(each.name for each in trained.iterdir()),
    }
    assert (folder / "config.json").resolve() == trained / "config.json"
    monkeypatch.setattr(made_folder, "_make", None)
    assert locate_model(str(trained)).folder == folder
    assert locate_model(str(folder)).folder == folder


def test_a_changed_file_gets_another_folder(trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    (copy / "README.md").write_text("one")
    first = locate_model(str(copy)).folder
    (copy / "README.md").write_text("another")
    assert locate_model(str(copy)).folder == first
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(config | {"unk_token": "</s>"}))
    second = locate_model(str(copy)).folder
    assert second != first
    assert not first.exists()


def test_byte_level_bpe_in_two_files(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / TOKENIZER_FILE))
    tokenizer.model.save(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    text = TextModel(locate_model(str(tmp_path)).folder, 4096, tokenizer.get_vocab_size())
    assert text.encode(TEXTS[0]).tolist() == tokenizer.encode(TEXTS[0]).ids


@pytest.mark.parametrize(
    ("name", "content"), [("tokenizer.model", b"no protobuf"), ("vocab.json", b"{}")]
)
def test_a_damaged_tokenizer_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text(CONFIG)
    with pytest.raises(ConfigError, match=f"model: {tmp_path} holds no tokenizer"):
        locate_model(str(tmp_path))


def test_code_of_the_folder_is_not_run(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builtins, "input", lambda question: "y")  # transformers would ask
    copy, mark = tmp_path / "copy", tmp_path / "mark"
    shutil.copytree(trained, copy)
    (copy / "own.py").write_text(f"open({str(mark)!r}, 'w')\nclass Own:\n    pass\n")
    config = json.loads((copy / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    (copy / "config.json").write_text('{"model_type": "own"}')  # else transformers takes its own
    with contextlib.suppress(ConfigError):
        locate_model(str(copy))
    assert not mark.exists()


def test_folders_without_a_tokenizer_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(CONFIG)
    assert locate_model(str(tmp_path)).folder == tmp_path
    with pytest.raises(ConfigError, match=r"has no file tokenizer\.json"):
        TextModel(tmp_path, 4096, 512)
