"""Groups of layers on ranks and stages."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.worker.startup import model_shape
from tests.services.worker.foreign_checkpoints import save_family
from tests.services.worker.ranks import rank_processes, stage_processes
from tests.services.worker.ranks.rank_processes import Texts, texts_of_ranks
from tests.services.worker.test_dropped_blocks import (
    CHUNKS,
    MAX_LEN,
    PARAMS,
    assert_same_bits,
    one_group,
    prompts,
    with_one_group,
)
from tests.services.worker.tight_driver import Poisoned, run_tightly


@pytest.mark.slow
def test_stages_have_sections_for_their_own_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages of two layers each, one of them with a window."""
    settings = {"max_num_batched_tokens": 50, "max_model_len": MAX_LEN, "kv_cache_dtype": "int8"}
    cases = {}
    for name in ("GptOssForCausalLM", "Gemma3ForCausalLM"):
        folder = tmp_path / name
        folder.mkdir()
        save_family(folder, name, max_position_embeddings=MAX_LEN)
        cases[name] = stage_processes.Case(
            *(folder, prompts(), PARAMS),
            settings=settings,
            options={"chunk_sizes": CHUNKS},
            drive=run_tightly,
            wrap=Poisoned,
        )
    found = stage_processes.run_stages(cases, 2, tmp_path)
    with_one_group(monkeypatch)
    for name, case in cases.items():
        assert_same_bits(found[name].run, stage_processes.run_alone(case))


@pytest.mark.slow
def test_ranks_have_the_same_groups(tmp_path: Path) -> None:
    save_family(tmp_path, "Gemma3ForCausalLM", max_position_embeddings=MAX_LEN)
    cases = {
        f"{kernels}, {name}": rank_processes.Case(
            *(tmp_path, kernels, {"max_num_batched_tokens": 50}),
            texts=tight_texts,
            prepare=prepare,
        )
        for name, prepare in (("groups", None), ("one group", make_one_group))
        for kernels in ("native", "torch")
    }
    with texts_of_ranks(cases, 2, tmp_path) as found:
        pass
    for kernels in ("native", "torch"):
        both = found[f"{kernels}, groups"], found[f"{kernels}, one group"]
        for own, plain in zip(*both, strict=True):
            assert own.ids == plain.ids
            assert own.logprobs.tobytes() == plain.logprobs.tobytes()


def tight_texts(engine: Any, _: int) -> Texts:
    run = run_tightly(Poisoned(engine), prompts(), PARAMS, CHUNKS)
    return Texts(run.texts, np.concatenate([np.stack(each) for each in run.logprobs]))


def make_one_group(_: int) -> None:
    vars(model_shape)["group_layers"] = one_group
