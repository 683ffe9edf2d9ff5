"""Gemma 4: ranks and stages change nothing."""

from pathlib import Path

import pytest

from tests.services.worker.checkpoints import save_model
from tests.services.worker.gemma4 import GEMMA4
from tests.services.worker.ranks import stage_processes
from tests.services.worker.ranks.rank_processes import Case, texts_of_ranks
from tests.services.worker.ranks.test_ranks import WHOLE, assert_same
from tests.services.worker.ranks.test_stages import assert_same as assert_same_stages
from tests.services.worker.ranks.test_stages import case

DENSE, EXPERTS = "gemma 4", "gemma 4, experts"


def saved(folder: Path, name: str) -> Path:
    folder.mkdir()
    family, shape = GEMMA4[name]
    save_model(folder, family, **(shape | {"initializer_range": 0.1}))
    return folder


@pytest.mark.slow
def test_ranks_have_the_texts_of_one_process(tmp_path: Path) -> None:
    experts = saved(tmp_path / "experts", EXPERTS)
    shared = saved(tmp_path / "shared", "gemma 4, inputs of layers, shared keys and values")
    cases = {
        "shared": Case(shared),
        "shared, native": Case(shared, "native"),
        "experts": Case(experts),
        "experts, native": Case(experts, "native"),
        "experts, whole, native": Case(experts, "native", WHOLE),
        "experts, whole": Case(experts, settings=WHOLE),
        "experts, codes": Case(experts, settings={"quantization": "wint8"}),
    }
    with texts_of_ranks(cases, 2, tmp_path) as found:
        pass
    assert_same(found, cases)


@pytest.mark.slow
def test_stages_have_the_texts_of_one_process(tmp_path: Path) -> None:
    cases = {"dense": case(saved(tmp_path / "dense", DENSE))}
    found = stage_processes.run_stages(cases, 2, tmp_path)
    assert_same_stages(found, cases)
