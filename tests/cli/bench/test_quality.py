"""`shoal bench quality` from its flags to its figures."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from benchmarks.harness.oracle import load_as_qwen2, true_logits
from cli.bench import quality
from cli.bench.command import main
from cli.bench.divergence import compare, summary
from cli.bench.pieces import cut, load_tokenizer, read_text
from services.worker.weights.online import ONLINE
from shared.model_folder import EMBEDDED_MODEL, weight_files
from tests.services.worker.checkpoints import change_config, quantized

WORKER = ["--device", "cpu", "--num-threads", "1"]
LENGTH, NUM_PIECES = 40, 2
SMALL = ["--length", str(LENGTH), "--pieces", str(NUM_PIECES)]


@pytest.fixture(autouse=True)
def _threads():
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the embedded model, to be changed."""
    return Path(shutil.copytree(EMBEDDED_MODEL, tmp_path / "copy"))


def measured(tmp_path: Path, *flags: str) -> dict[str, Any]:
    path = tmp_path / "run.json"
    assert main(["quality", *SMALL, *WORKER, *flags, "--json", str(path)]) == 0
    return json.loads(path.read_text())


def test_a_run_ends_with_a_table_and_everything_as_json(tmp_path: Path, capsys):
    text = tmp_path / "text"
    text.write_text(read_text(None)[:2000], encoding="utf-8")
    payload = measured(tmp_path, "--text", str(text), "--quantization", "wint4,none")
    output = capsys.readouterr().out
    for word in ("shoal-tiny", "reference", "wint4", "bits per byte", "KL divergence", "100.00%"):
        assert word in output
    assert "\x1b" not in output, "a pipe gets neither a bar nor colours"
    assert payload["command"].startswith(f"shoal bench quality --length {LENGTH}")
    assert {"date", "machine", "versions"} <= set(payload)
    assert payload["settings"]["quantization"] == ["wint4", "none"]
    assert payload["worker"]["num_threads"] == 1
    assert payload["num_tokens"] == NUM_PIECES * (LENGTH - 1)
    figures = payload["figures"]
    assert [*figures] == ["reference", "wint4", "none"]
    assert figures["none"] == figures["reference"]
    assert (figures["none"]["kl_divergence"], figures["none"]["same_first_choice"]) == (0, 1)
    assert figures["wint4"]["kl_divergence"] > 0
    assert figures["wint4"]["weights_bytes"] < 0.6 * figures["none"]["weights_bytes"]


@pytest.mark.slow
def test_codes_in_the_kv_cache_are_compared_with_numbers(tmp_path: Path):
    flags = ["--quantization", "none", "--kv-cache-dtype", "fp8"]
    figures = measured(tmp_path, *flags)["figures"]
    assert 0 < figures["none"]["kl_divergence"] < 0.1
    assert figures["reference"]["kl_divergence"] == 0


def test_the_figures_match_transformers(tmp_path: Path):
    """All forms, by default on text held out of training."""
    figures = measured(tmp_path, "--dtype", "float32")["figures"]
    assert [*figures] == ["reference", *ONLINE]
    oracle = load_as_qwen2(EMBEDDED_MODEL)
    pieces = cut(read_text(None), load_tokenizer(EMBEDDED_MODEL), LENGTH, NUM_PIECES)
    num_bytes = sum(piece.num_bytes for piece in pieces)
    found: dict[str, list[np.ndarray]] = {}
    for name in figures:
        with nullcontext() if name == "reference" else quantized(oracle, name):
            found[name] = [logprobs(oracle, piece.ids) for piece in pieces]
        pairs = zip(found["reference"], found[name], strict=True)
        expected = summary([compare(*pair) for pair in pairs], num_bytes)
        for figure, value in expected.items():
            assert figures[name][figure] == pytest.approx(value, rel=1e-3), (name, figure)


def logprobs(oracle: Any, ids: np.ndarray) -> np.ndarray:
    values = torch.from_numpy(true_logits(oracle, ids.tolist())[:-1]).log_softmax(-1).numpy()
    return np.concatenate([values[range(len(ids) - 1), ids[1:], None], values], 1)


@pytest.mark.slow
def test_a_folder_is_compared_with_the_one_that_it_came_from(tmp_path: Path, copy: Path):
    """Dequantized weights lose as much as quantized ones."""
    for file in weight_files(copy):
        weights = {
            name: ONLINE["wint4"](each.float()).values if name.endswith("proj.weight") else each
            for name, each in load_file(file).items()
        }
        save_file(weights, file)
    flags = ["--dtype", "float32"]
    expected = measured(tmp_path, *flags, "--quantization", "wint4")["figures"]["wint4"]
    payload = measured(tmp_path, *flags, "--model", str(copy), "--reference", str(EMBEDDED_MODEL))
    assert (payload["model"], payload["reference"]) == ("copy", "shoal-tiny")
    assert [*payload["figures"]] == ["reference", "none"]
    found = payload["figures"]["none"]
    for name in ("bits_per_byte", "kl_divergence", "same_first_choice"):
        assert found[name] == pytest.approx(expected[name], rel=1e-3)


def test_a_terminal_gets_a_bar_that_counts(monkeypatch: pytest.MonkeyPatch, tmp_path, capsys):
    monkeypatch.setattr(quality, "Console", lambda **_: Console(force_terminal=True, markup=False))
    measured(tmp_path, "--quantization", "wint8")
    assert f"{2 * NUM_PIECES}/{2 * NUM_PIECES}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--length", "4096"], "--length: 4096 is more than max_position_embeddings = 2048 of"),
        (["--length", "3"], "--length: '3' is not an integer from 16 to"),
        (["--pieces", "0"], "--pieces: '0' is not an integer from 1 to"),
        (["--quantization", "wint8,wint5"], "'wint5' is not one of none, wint8, wint4, nf4"),
        (["--text", "/no/such"], "--text: cannot read /no/such: No such file"),
        (["--text", str(weight_files(EMBEDDED_MODEL)[0])], "is not UTF-8"),
        (["--text", str(EMBEDDED_MODEL / "generation_config.json")], "fewer than --length = 512"),
        (["--model", "/no/such"], "model: no such folder: /no/such"),
        (["--reference", "/no/such"], "--reference: model: no such folder: /no/such"),
        (["--dtype", "int3"], "dtype: 'int3'"),
        (["--json", "/no/such/file"], "--json: /no/such/file is not a path for a file"),
        (["--lenght", "64"], "--lenght"),
    ],
)
def test_mistyped_arguments_are_errors_of_one_line(words: list[str], text: str, capsys):
    assert_refused(words, text, capsys)


def assert_refused(words: list[str], text: str, capsys) -> None:
    assert main(["quality", *WORKER, *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("shoal bench quality: ")
    assert text in error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_a_reference_with_other_ids_is_refused(copy: Path, capsys):
    words = ["--reference", str(copy)]
    path = copy / "tokenizer.json"
    tokenizer = load_tokenizer(copy)
    tokenizer.add_tokens(["<other>"])
    tokenizer.save(str(path))
    assert_refused(
        words, f"--reference: {copy} has another vocabulary than {EMBEDDED_MODEL}", capsys
    )
    path.unlink()
    assert_refused(words, f"--reference: model: {copy} has no file tokenizer.json", capsys)
    change_config(copy, vocab_size=2000)
    assert_refused(words, "--reference: vocab_size is 2000, and 8192 of", capsys)


def test_a_text_with_ids_that_the_model_lacks_is_refused(copy: Path, capsys):
    change_config(copy, vocab_size=100)
    assert_refused(["--model", str(copy)], "and vocab_size is 100", capsys)
