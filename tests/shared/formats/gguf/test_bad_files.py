"""Damaged and unknown files are refused with their names and the part that is wrong."""

import math
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from shared.errors import ConfigError
from shared.formats.gguf.families import ROPE_FACTORS
from shared.formats.gguf.file import GgufFile
from shared.formats.gguf.folder import find, folder_of
from shared.model_location import locate_model
from tests.shared.formats.gguf.writer import add_layer, add_shape_of_nothing

WIDTH, NUM_TOKENS = 32, 5
Change = Callable[[GGUFWriter], None]


def save(path: Path, change: Change = lambda _: None, arch: str = "llama", skip: str = "") -> Path:
    """A small model of one layer."""
    writer = GGUFWriter(path, arch)
    add_shape_of_nothing(writer, NUM_TOKENS, num_layers=1, skip=skip)
    if skip != "tokenizer":
        writer.add_tokenizer_model("llama")
        writer.add_token_list([*"abcde"])
        writer.add_token_scores([0.0] * NUM_TOKENS)
    add_layer(writer, 0, skip)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refused(path: Path, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as found:
        folder_of(path)
    assert str(path) in str(found.value)


@pytest.mark.parametrize(
    ("start", "text"),
    [
        (b"", "does not begin with GGUF"),
        (b"GG", "does not begin with GGUF"),
        (b"GGML" + bytes(40), "does not begin with GGUF"),
        (b"GGUF", "the header is damaged"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "keys do not fit"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "tensors do not fit"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 60) + bytes(9), "the name of key 0"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "general.architecture is missing"),
    ],
)
def test_bad_beginnings(tmp_path: Path, start: bytes, text: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(start)
    refused(path, text)


def quantized(name: str, kind: str) -> Change:
    type_ = GGMLQuantizationType[kind]
    return lambda writer: writer.add_tensor(name, np.zeros((4, 82), np.uint8), raw_dtype=type_)


@pytest.mark.parametrize(
    ("change", "skip", "text"),
    [
        (lambda _: None, "blk.0.ffn_up.weight", "lacks tensor blk.0.ffn_up.weight"),
        (lambda _: None, "output_norm.weight", "lacks tensor output_norm.weight"),
        (lambda _: None, "token_embd.weight", "lacks tensor token_embd.weight"),
        (lambda _: None, "block_count", "metadata llama.block_count is missing"),
        (lambda _: None, "head_count", "metadata llama.attention.head_count is missing"),
        (lambda _: None, "layer_norm_rms_eps", "attention.layer_norm_rms_epsilon is missing"),
        (lambda _: None, "tokenizer", "metadata tokenizer.ggml.model is missing"),
        (lambda w: w.add_tensor("blk.0.new.weight", np.zeros(4, "f4")), "", "no tensor blk.0.new"),
        (lambda w: w.add_tensor("blk.7.attn_q.weight", np.zeros(4, "f4")), "", "tensor blk.7"),
        (lambda w: w.add_tensor("blk.x", np.zeros(4, "f4")), "", "has no tensor blk.x"),
        (quantized("blk.0.ffn_new.weight", "IQ2_S"), "", "type IQ2_S, which is not supported"),
        (lambda w: w.add_string("llama.rope.scaling.type", "longrope"), "", "longrope is not"),
        (lambda w: w.add_rope_dimension_count(4), "", "rope.dimension_count 4 of 16 elements"),
        (lambda w: w.add_tensor("rope_freqs.weight", np.zeros(8, "f4")), "", "not positive"),
        (lambda w: w.add_tensor("rope_freqs.weight", np.ones(4, "f4")), "", "rope_freqs.weight is"),
        (lambda w: w.add_array("llama.attention.head_count_kv", [1, 2]), "", "for each layer"),
        (lambda w: w.add_string("llama.expert_count", "x"), "", "llama.expert_count: Expected"),
    ],
)
def test_bad_models(tmp_path: Path, change: Change, skip: str, text: str) -> None:
    def scaled(writer: GGUFWriter) -> None:
        change(writer)
        writer.add_float32("llama.rope.scaling.factor", 2.0)

    refused(save(tmp_path / "model.gguf", scaled, skip=skip), text)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("rope.scaling.factor", -2.0, "-2.0 is no number above 1"),
        ("rope.scaling.factor", 0.5, "0.5 is no number above 1"),
        ("rope.scaling.factor", math.nan, "nan is no number above 1"),
        ("rope.scale_linear", math.inf, "inf is no number above 1"),
        ("rope.scaling.attn_factor", -1.0, "-1.0 is no number above 0"),
        ("rope.freq_base", 0.0, "0.0 is no number above 1"),
        ("attention.layer_norm_rms_epsilon", math.nan, "nan is no number above 0"),
    ],
)
def test_bad_numbers(tmp_path: Path, key: str, value: float, text: str) -> None:
    def with_yarn(writer: GGUFWriter) -> None:
        numbers = {"attention.layer_norm_rms_epsilon": 1e-6, key: value}
        if key not in ROPE_FACTORS:
            numbers["rope.scaling.factor"] = 2.0
        for name, number in numbers.items():
            writer.add_float32(f"llama.{name}", number)
        writer.add_string("llama.rope.scaling.type", "yarn")
        writer.add_uint32("llama.rope.scaling.original_context_length", 64)

    path = save(tmp_path / "model.gguf", with_yarn, skip="layer_norm_rms_eps")
    refused(path, f"metadata llama.{key}: {text}")


def test_an_unknown_architecture(tmp_path: Path) -> None:
    refused(save(tmp_path / "model.gguf", arch="mamba"), "architecture mamba is not supported")


def test_every_cut_is_found(tmp_path: Path) -> None:
    whole = save(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(0, 1500, 37), *range(1500, len(whole) - 31, 501)]:
        path.write_bytes(whole[:size])
        refused(path, "damaged|not complete|does not begin|do not fit")


def test_random_damage_is_an_error_or_harmless(tmp_path: Path) -> None:
    whole = save(tmp_path / "whole.gguf").read_bytes()
    num_header = GgufFile(tmp_path / "whole.gguf").tensors["token_embd.weight"].start
    rng, num_refused = np.random.default_rng(3), 0
    for number in range(400):
        damaged = np.frombuffer(whole, np.uint8).copy()
        places = rng.integers(0, num_header, rng.integers(1, 4))
        damaged[places] = rng.integers(0, 256, len(places))
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(damaged.tobytes())
        try:
            folder_of(path)
        except ConfigError as error:
            num_refused += str(path) in str(error)
    assert num_refused > 100


def test_a_folder_of_one_model_and_a_folder_of_several(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    save(folder / "some-Q8_0.gguf")
    (folder / "mmproj-F16.gguf").write_bytes(b"")
    location = locate_model(str(folder))
    assert location.name == "one"
    assert locate_model(str(folder / "some-Q8_0.gguf")).name == "some-Q8_0"
    assert locate_model(str(folder / "some-Q8_0.gguf")).folder == location.folder
    save(folder / "some-F16.gguf")
    with pytest.raises(ConfigError, match="several GGUF models: some-F16, some-Q8_0"):
        locate_model(str(folder))


def test_other_paths_are_none_of_its(tmp_path: Path) -> None:
    assert find(tmp_path) is None
    assert find(tmp_path / "missing.gguf") is None
    (tmp_path / "model.safetensors").write_bytes(b"")
    save(tmp_path / "model.gguf")
    assert find(tmp_path) is None


def test_a_changed_file_gets_another_folder(tmp_path: Path) -> None:
    path = save(tmp_path / "model.gguf")
    first = folder_of(path)
    assert folder_of(path) == first
    save(path, lambda writer: writer.add_string("general.name", "changed"))
    assert folder_of(path) != first
    assert not [*first.parent.glob(".unfinished*")]


@pytest.mark.parametrize(("number", "count"), [(1, 0), (0, 2), (3, 2)])
def test_numbers_of_parts(tmp_path: Path, number: int, count: int) -> None:
    path = save(tmp_path / f"model-{number:05}-of-{count:05}.gguf")
    refused(path, f"its name says part {number} of {count}")


def test_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").symlink_to(tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"model\.gguf: cannot be read"):
        find(tmp_path)


def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 3_999_999_999)
    path = save(tmp_path / "model.gguf")
    refused(path, "user 3999999999 has no home directory .* XDG_CACHE_HOME names another place")


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME names another place"):
        folder_of(save(tmp_path / "model.gguf"))
