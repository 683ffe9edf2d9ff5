"""A model folder without torch: its description, and errors in it."""

import json
import os
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.model_folder import decode_json, read_eos_ids, read_model_info, weight_files

HEADER = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 50, "max_position_embeddings": 64}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(len(HEADER).to_bytes(8, "little") + HEADER + b"1234")
    return folder


def shard(folder: Path, *names: str) -> None:
    (folder / "model.safetensors").unlink()
    for name in names:
        (folder / name).write_bytes(b"weights")
    index = {"weight_map": {f"t{number}": name for number, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_model_info_is_read_from_the_folder(folder: Path) -> None:
    os.utime(folder / "config.json", (5, 1234567))
    info = read_model_info(folder, ["a", "b"], None)
    assert (info.names, info.vocab_size, info.max_model_len) == (["a", "b"], 50, 64)
    assert info.created == 1234567
    assert len(info.fingerprint) == 32
    assert read_model_info(folder, [], 10).max_model_len == 10


def test_more_length_than_positions_is_refused_with_both(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"max-model-len: 65 .* 64"):
        read_model_info(folder, [], 65)


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=rf"model: {folder} has no file config\.json"):
        read_model_info(folder, [], None)


def test_only_services_that_load_weights_miss_them(folder: Path) -> None:
    before = read_model_info(folder, [], None)
    (folder / "model.safetensors").unlink()
    without = read_model_info(folder, [], None)
    assert without.vocab_size == before.vocab_size
    assert without.fingerprint != before.fingerprint
    with pytest.raises(ConfigError, match=rf"model: {folder} has no file model\.safetensors"):
        weight_files(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    shard(folder, "a.safetensors", "b.safetensors")
    (folder / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no file b\.safetensors"):
        weight_files(folder)


def test_shards_match_the_index(folder: Path) -> None:
    shard(folder, "b.safetensors", "a.safetensors")
    (folder / "c.safetensors").write_bytes(b"another")
    assert [file.name for file in weight_files(folder)] == ["a.safetensors", "b.safetensors"]


def test_an_index_cannot_lead_out_of_the_folder(folder: Path) -> None:
    (folder.parent / "secret").write_bytes(b"")
    index = {"weight_map": {"t": "../secret"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="has no file"):
        weight_files(folder)


TEXT = {"model_type": "gemma3_text", "vocab_size": 50, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt2", "vocab_size": 50, "n_positions": 64, "eos_token_id": 7},
        {"model_type": "gemma3", "text_config": TEXT | {"eos_token_id": [7, 50]}},
    ],
)
def test_sizes_and_ends_are_found_under_other_names_and_further_in(
    folder: Path, config: dict[str, object]
) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    info = read_model_info(folder, [], None)
    assert (info.vocab_size, info.max_model_len) == (50, 64)
    assert read_eos_ids(folder, info.vocab_size) == [7]
    with pytest.raises(ConfigError, match=r"max-model-len: 65 .* 64"):
        read_model_info(folder, [], 65)


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"eos_token": "<|im_end|>"}},
        {"tokenizer_config.json": {"eos_token": {"content": "<|im_end|>", "lstrip": False}}},
        {"special_tokens_map.json": {"eos_token": {"content": "<|im_end|>"}}},
        {
            "tokenizer_config.json": {
                "eos_token": "<|im_end|>",
                "added_tokens_decoder": {"9": {"content": "<|im_end|>"}, "3": {"content": "x"}},
            },
            "tokenizer.json": {},
        },
        {
            "tokenizer_config.json": {"eos_token": "<|im_end|>"},
            "special_tokens_map.json": {"eos_token": "<|endoftext|>"},
        },
    ],
)
def test_the_tokenizers_end_is_an_end_too(folder: Path, files: dict[str, object]) -> None:
    """A chat model's configs may still name only its base model's end."""
    added = [{"id": 3, "content": "<|endoftext|>"}, {"id": 9, "content": "<|im_end|>"}]
    ends = {"config.json": {"eos_token_id": 3}, "generation_config.json": {"eos_token_id": [3, 4]}}
    for name, content in (ends | {"tokenizer.json": {"added_tokens": added}} | files).items():
        (folder / name).write_text(json.dumps(content))
    assert read_eos_ids(folder, 50) == [3, 4, 9]
    assert read_eos_ids(folder, 9) == [3, 4]


def test_a_tokenizer_without_an_end_adds_none(folder: Path) -> None:
    assert read_eos_ids(folder, 50) == []
    (folder / "tokenizer_config.json").write_text('{"eos_token": null}')
    assert read_eos_ids(folder, 50) == []
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert read_eos_ids(folder, 50) == []


def test_a_model_of_which_nobody_knows_the_longest_text_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "bloom", "vocab_size": 50}')
    with pytest.raises(ConfigError, match=r"config\.json has no max_position_embeddings, and"):
        read_model_info(folder, [], None)


@pytest.mark.parametrize("text", ["", "[]", '{"vocab_size": "x"}', '{"vocab_size": 3}', "\xff"])
def test_a_broken_config_is_named(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_model_info(folder, [], None)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^model: {tmp_path} cannot be read: Is a directory$"):
        decode_json(tmp_path, dict)


def test_a_file_that_is_no_safetensors_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match="not a safetensors file"):
        read_model_info(folder, [], None)


def test_the_fingerprint_follows_the_identity_of_the_model(folder: Path) -> None:
    seen = [read_model_info(folder, [], None).fingerprint]
    (folder / "README.md").write_text("of no matter")
    assert read_model_info(folder, ["other"], 5).fingerprint == seen[0]
    (folder / "tokenizer.json").write_text("[]")
    seen.append(read_model_info(folder, [], None).fingerprint)
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"more")
    seen.append(read_model_info(folder, [], None).fingerprint)
    shard(folder, "a.safetensors")
    seen.append(read_model_info(folder, [], None).fingerprint)
    assert len(set(seen)) == 4


def test_other_weights_of_the_same_names_and_shapes_are_another_model(folder: Path) -> None:
    before = read_model_info(folder, [], None).fingerprint
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-1] + b"5")
    assert read_model_info(folder, [], None).fingerprint != before
