"""The digest of a layout changes with each fact that decides about the bytes of a block."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness.engines import make_engine
from services.worker.block_layout.layout import SETTINGS, backend_of, digest_of, facts_of
from shared.settings.worker import WorkerConfig
from shared.wire.same_model import FIELDS_OF_ONE_SERVICE
from tests.services.worker.checkpoints import save_qwen2

OTHERS: dict[str, dict[str, Any]] = {
    "load_format": {"load_format": "dummy"},
    "quantization": {"quantization": "wint8"},
    "lm_head_quantization": {"lm_head_quantization": "wint8"},
    "embedding_quantization": {"embedding_quantization": "wint8"},
    "kv_cache_dtype": {"kv_cache_dtype": "int8"},
    "activation_dtype": {"activation_dtype": "int8", "quantization": "wint4"},
    "max_model_len": {"max_model_len": 64},
    "block_size": {"block_size": 32},
    "dtype": {"dtype": "bfloat16"},
    "backend": {"native_kernels": False},
}
# Fields of a model that change no key and no value.
OF_OUTPUT = {"vocab_size", "runner", "pooling", "names", "defaults", "logprobs_mode"}
OF_OUTPUT |= {"tool_parser", "reasoning_parser"}


def facts(folder: Path, kernels: str = "native", **settings: Any) -> dict[str, object]:
    engine = make_engine(folder, kernels, num_gpu_blocks_override=16, **settings)
    wanted = {"dtype": "float32", "block_size": 16, **settings}
    config = WorkerConfig(model=str(folder), **wanted)
    dtype = getattr(torch, wanted["dtype"])
    return facts_of(config, folder, dtype, engine._model, engine._kv_cache)


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> dict[str, object]:
    return facts(checkpoint)


@pytest.mark.parametrize("name", OTHERS)
def test_each_setting_changes_the_digest(
    name: str, checkpoint: Path, plain: dict[str, object]
) -> None:
    found = facts(checkpoint, **OTHERS[name])
    assert found[name] != plain[name]
    assert digest_of(found) != digest_of(plain)


def test_the_model_and_its_cache_change_the_digest(
    tmp_path: Path, plain: dict[str, object]
) -> None:
    save_qwen2(tmp_path, num_key_value_heads=4)
    found = facts(tmp_path)
    assert found["model"] != plain["model"]
    assert found["layers"] != plain["layers"]


def test_weights_that_are_written_anew_change_the_digest(tmp_path: Path) -> None:
    """Also outside of the samples in the model's fingerprint."""
    save_qwen2(tmp_path)
    before = facts(tmp_path)
    file = max(tmp_path.glob("*.safetensors"), key=lambda each: each.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2 - 1] ^= 1  # the sample begins in the middle
    file.write_bytes(content)
    found = facts(tmp_path)
    assert found["model"] == before["model"]
    assert found["weights"] != before["weights"]


@pytest.mark.parametrize(
    "name", ["format", "model", "weights", "dtype", *SETTINGS, "sections", "backend"]
)
def test_each_fact_changes_the_digest(name: str, plain: dict[str, object]) -> None:
    assert digest_of(plain | {name: "other"}) != digest_of(plain)
    assert digest_of(dict(reversed(plain.items()))) == digest_of(plain)


def test_every_field_that_workers_compare_is_a_fact(plain: dict[str, object]) -> None:
    names = FIELDS_OF_ONE_SERVICE.keys() - OF_OUTPUT
    assert {name.replace("fingerprint", "model") for name in names} <= plain.keys()


def test_the_version_of_the_backend_is_a_fact(
    checkpoint: Path, plain: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert str(plain["backend"]).endswith(".so")
    model = make_engine(checkpoint, "torch")._model
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert "torch 9.9" in backend_of(model)
