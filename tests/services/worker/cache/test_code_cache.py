"""Weights are quantized once, and found again by the same files."""

import os
from pathlib import Path

import pytest
import torch

from services.worker.layers.weights import Quantized
from services.worker.models.decoder import DecoderLM
from services.worker.models.registry import read_model_config
from services.worker.weights import load
from services.worker.weights.load import load_model
from services.worker.weights.online import ONLINE, Quantization
from shared.model_folder import weight_files
from tests.services.worker.checkpoints import save_mimo

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_mimo(tmp_path / "model")
    return tmp_path / "model"


def loaded(
    folder: Path,
    quantization: Quantization,
    cache: Path | None,
    head: Quantization = "none",
    embedding: Quantization = "none",
) -> DecoderLM:
    config, quiet = read_model_config(folder), lambda *_: None
    return load_model(
        *(folder, config, torch.float32, CPU, quiet),
        quantization=quantization,
        cache=cache,
        head=head,
        embedding=embedding,
    )


def assert_same(one: DecoderLM, other: DecoderLM) -> None:
    first, second = one.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype
        assert torch.equal(tensor.float(), second[name].float()), name


def refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes quantization fail."""
    monkeypatch.setattr(load, "ONLINE", {})


@pytest.mark.parametrize("quantization", ONLINE)
def test_codes_are_read_where_they_were_made_before(
    folder: Path, tmp_path: Path, quantization: Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = loaded(folder, quantization, None)
    assert_same(loaded(folder, quantization, tmp_path / "a" / "cache"), expected)
    refuse(monkeypatch)
    assert_same(loaded(folder, quantization, tmp_path / "a" / "cache"), expected)
    (file,) = (tmp_path / "a" / "cache").iterdir()
    assert file.name.startswith(f"model-{quantization}-")


@pytest.mark.parametrize("quantization", ["none", "wint4"])
@pytest.mark.parametrize(
    ("head", "embedding", "is_tied"),
    [("wint8", "none", False), ("wint8", "wint4", False), ("none", "wint4", True)],
)
def test_codes_of_head_and_embeddings_are_kept_too(
    tmp_path: Path,
    quantization: Quantization,
    head: Quantization,
    embedding: Quantization,
    is_tied: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, forms = tmp_path / "model", (head, embedding)
    save_mimo(folder, tie_word_embeddings=is_tied)
    expected = loaded(folder, quantization, None, *forms)
    assert expected.lm_head is not None
    assert isinstance(expected.lm_head.weight, Quantized)
    assert_same(loaded(folder, quantization, tmp_path / "cache", *forms), expected)
    refuse(monkeypatch)
    found = loaded(folder, quantization, tmp_path / "cache", *forms)
    assert_same(found, expected)
    assert found.lm_head is not None
    assert (found.lm_head.weight is found.model.embed_tokens.weight) == is_tied


def test_other_weights_and_forms_have_files_of_their_own(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    loaded(folder, "wint4", cache)
    loaded(folder, "wint4", cache, "wint4")
    loaded(folder, "wint4", cache, "wint4", "wint8")
    assert len(list(cache.iterdir())) == 3
    (file,) = weight_files(folder)
    os.utime(file, ns=(1, 1))
    loaded(folder, "wint4", cache)
    assert len(list(cache.iterdir())) == 4


@pytest.mark.parametrize("content", [b"", b"nothing of the kind", None])
def test_a_file_that_is_no_good_is_made_anew(
    folder: Path,
    tmp_path: Path,
    content: bytes | None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Truncated, if there is no ``content``."""
    expected = loaded(folder, "wint4", tmp_path / "cache")
    (file,) = (tmp_path / "cache").iterdir()
    file.write_bytes(file.read_bytes()[:-100] if content is None else content)
    assert_same(loaded(folder, "wint4", tmp_path / "cache"), expected)
    assert f"{file} is no good" in caplog.text
    refuse(monkeypatch)
    assert_same(loaded(folder, "wint4", tmp_path / "cache"), expected)


def test_a_folder_that_cannot_be_written_costs_a_line_of_the_log(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    expected = loaded(folder, "wint4", None)
    assert_same(loaded(folder, "wint4", tmp_path / "file" / "cache"), expected)
    assert "was not written" in caplog.text
