"""``kv-cache-dtype: auto`` with checkpoints made for a quantized KV cache."""

from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV3ForCausalLM

from benchmarks.harness.engines import make_engine
from shared.errors import ConfigError
from tests.services.worker.checkpoints import random_prompts, save_mimo, save_model
from tests.services.worker.driver import Driver, Job
from tests.services.worker.stored_codes import save_made_for_codes
from tests.services.worker.test_families import GROUPS, LATENT
from tests.services.worker.test_memory import planned_bytes

BLOCKS = 256


@pytest.mark.parametrize(
    ("kernels", "kind", "name"),
    [
        ("native", "float", "fp8"),
        ("native", "int", "int8"),
        pytest.param("torch", "float", "fp8", marks=pytest.mark.slow),
        pytest.param("device", "int", "int8", marks=pytest.mark.slow),
    ],
)
def test_auto_follows_the_checkpoint(tmp_path: Path, kernels: str, kind: str, name: str) -> None:
    """With a scale for each token and head, like an explicit setting."""
    save_mimo(tmp_path / "dense")
    save_made_for_codes(tmp_path / "dense", tmp_path / "codes", kind)
    some, texts, sizes = random_prompts(4), {}, {}
    for setting in ("auto", name, "none"):
        limits = {"num_gpu_blocks_override": BLOCKS}
        engine = make_engine(tmp_path / "codes", kernels, kv_cache_dtype=setting, **limits)
        assert engine.model_info.kv_cache_dtype == ("auto" if setting == "none" else name)
        sizes[setting] = planned_bytes("kv_cache")
        texts[setting] = Driver(engine).run([Job(prompt) for prompt in some])
    assert texts["auto"] == texts[name]
    assert sizes["auto"] == sizes[name] < sizes["none"]


def test_codes_that_are_not_there_are_refused_unless_others_are_asked_for(tmp_path: Path) -> None:
    save_mimo(tmp_path / "dense")
    save_made_for_codes(tmp_path / "dense", tmp_path / "codes", "float", 4)
    problem = "kv-cache-dtype: auto: .* has type 'float' and 4 bits; 8 bits of float or int are"
    with pytest.raises(ConfigError, match=problem):
        make_engine(tmp_path / "codes")
    engine = make_engine(tmp_path / "codes", kv_cache_dtype="int8")
    assert engine.model_info.kv_cache_dtype == "int8"


def test_latents_get_the_codes_of_the_checkpoint(tmp_path: Path) -> None:
    changes: dict[str, Any] = {**LATENT, **GROUPS}
    save_model(tmp_path / "dense", DeepseekV3ForCausalLM, **changes)
    save_made_for_codes(tmp_path / "dense", tmp_path / "codes")
    assert make_engine(tmp_path / "codes").model_info.kv_cache_dtype == "fp8"
