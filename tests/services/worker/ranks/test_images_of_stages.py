"""Stages of a pipeline give the texts of transformers about images, and one process's bits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from services.worker.engine.build import build_engine
from shared.errors import ConfigError
from shared.settings.worker import WorkerConfig
from shared.wire.messages import ALL_TOKENS
from tests.media.gemma3_checkpoints import gemma3_reference
from tests.media.references import reference
from tests.services.worker.media import scheduled
from tests.services.worker.media.prompts import GREEDY
from tests.services.worker.ranks.stage_processes import Case, run_alone, run_stages
from tests.services.worker.ranks.test_images_of_ranks import ERNIE, LIMITS, chats_of, saved
from tests.services.worker.ranks.test_stages import assert_close, numbers

STEPS = {"whole": 512, "chunks of 7": 7, "chunks of 1": 1}  # most tokens of each


def compare(tmp_path: Path, family: str, size: int, cases: dict[str, dict[str, Any]]) -> None:
    """In native code and torch's operators, by ``cases`` of settings."""
    folder = saved(tmp_path / "model", family)
    chats: Any = chats_of(gemma3_reference(folder) if family == "gemma3" else reference(folder))
    params = [structs.replace(GREEDY, logprobs=ALL_TOKENS)] * len(chats)
    case = Case(folder, chats, params, drive=scheduled.run)
    named = {
        name: replace(case, kernels=settings.pop("kernels", "native"), settings=LIMITS | settings)
        for name, settings in cases.items()
    }
    found = run_stages(named, size, tmp_path)
    for name, each in named.items():
        assert found[name].run.texts == [chat.expected.ids for chat in chats], name
        if found[name].is_native:
            alone = run_alone(each)
            assert numbers(found[name].run).tobytes() == numbers(alone).tobytes(), name
        else:
            assert_close(found[name].run, run_alone(each))


def test_two_stages_of_experts_of_images_have_the_bits_of_one_process(tmp_path: Path) -> None:
    """Both stages know the tokens of images."""
    compare(tmp_path, ERNIE, 2, {"chunks": {"max_num_batched_tokens": 13}})


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3-vl", ERNIE, "gemma3", "qwen3.5"])
def test_two_stages_of_each_family(tmp_path: Path, family: str) -> None:
    """Prompts whole and in chunks; steps of Gemma 3 have room for an image."""
    least = 76 if family == "gemma3" else 1
    chunks = {name: {"max_num_batched_tokens": max(num, least)} for name, num in STEPS.items()}
    torchs = {"torch": {"kernels": "torch", "max_num_batched_tokens": 512}}
    compare(tmp_path, family, 2, chunks | torchs)


@pytest.mark.slow
def test_marks_of_images_reach_the_third_stage(tmp_path: Path) -> None:
    compare(tmp_path, ERNIE, 3, {"chunks": {"max_num_batched_tokens": 13}})


def test_features_of_layers_behind_the_first_stage_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "qwen3-vl")
    config = WorkerConfig(model=folder, device="cpu", pipeline_parallel_size=3)
    text = "pipeline-parallel-size: 3: the first stage needs the 2 layers .* 1 to 2 would work"
    with pytest.raises(ConfigError, match=text):
        build_engine(config, lambda text, fraction: None)
