"""Layers that transformers computes give blocks behind their windows back too."""

from pathlib import Path

import pytest

from services.worker.foreign import backend
from tests.selection import only
from tests.services.worker.foreign_checkpoints import save_family
from tests.services.worker.test_dropped_blocks import (
    CHUNKS,
    FAMILIES,
    MAX_LEN,
    PARAMS,
    Case,
    assert_same_bits,
    engine_of,
    one_group,
    prompts,
)
from tests.services.worker.tight_driver import Poisoned, run_tightly


@pytest.mark.parametrize(
    ("name", "cache"),
    only([("GptOssForCausalLM", "auto")], FAMILIES, ["auto", "int8"]),
)
def test_dropped_blocks_are_not_missed(
    tmp_path: Path, name: str, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_family(tmp_path, name, max_position_embeddings=MAX_LEN)
    case = Case("torch", cache=cache)
    engine = Poisoned(engine_of(tmp_path, case, model_impl="transformers"))
    options = {"resume_every": 9, "windows": engine.capacity.groups}
    found = run_tightly(engine, prompts(), PARAMS, CHUNKS, **options)
    monkeypatch.setattr(backend, "group_layers", one_group)
    plain = engine_of(tmp_path, case, model_impl="transformers")
    assert_same_bits(found, run_tightly(plain, prompts(), PARAMS, CHUNKS, **options))
