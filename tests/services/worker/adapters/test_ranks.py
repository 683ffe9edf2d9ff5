"""Ranks with their shares of adapters give the texts of one process."""

from itertools import product
from pathlib import Path

import pytest

from tests.services.worker.adapters.made import engine_with
from tests.services.worker.adapters.rank_texts import adapted_texts
from tests.services.worker.checkpoints import save_model
from tests.services.worker.hybrids import HYBRIDS
from tests.services.worker.ranks.rank_processes import Case, texts_of_ranks
from tests.services.worker.test_families import CASES

FAMILIES = {
    "biases": CASES["llama, no groups, biases"],
    "a KV head of all ranks": CASES["llama, one KV head"],
    "factors": CASES["granite"],
    "latents": CASES["deepseek v3, yarn"],
    "states and gates": HYBRIDS["qwen3.5"],
    "shares of experts": CASES["qwen3 moe"],
    "whole experts": CASES["qwen2 moe"],
    "gates and ups in turn": CASES["gpt-oss"],
}
WHOLE = ("whole experts",)
SIZES = {"intermediate_size": 128, "shared_expert_intermediate_size": 64}
SETTINGS = {"enable_lora": True, "max_cpu_loras": 1}
TOLERANCE = 5e-5  # of logprobs, in float32


FEW = [
    *(("latents", "native"), ("biases", "torch")),
    *(("shares of experts", "native"), ("whole experts", "torch")),
]


@pytest.mark.parametrize(
    "chosen",
    [
        FEW,
        pytest.param(
            [each for each in product(FAMILIES, ("native", "torch")) if each not in FEW],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["few", "others"],
)
def test_two_ranks_have_the_texts_of_one_process(
    tmp_path: Path, chosen: list[tuple[str, str]]
) -> None:
    cases = {}
    for number, (name, kernels) in enumerate(chosen):
        family, changes = FAMILIES[name]
        folder = tmp_path / str(number)
        folder.mkdir()
        save_model(folder, family, **(changes | SIZES))
        settings = SETTINGS | {"enable_expert_parallel": name in WHOLE}
        cases[f"{name}, {kernels}"] = Case(folder, kernels, settings, texts=adapted_texts)
    with texts_of_ranks(cases, 2, tmp_path) as found:
        pass
    for name, case in cases.items():
        expected = adapted_texts(engine_with(case.folder, case.kernels), 1)
        for texts in found[name]:
            assert texts.ids == expected.ids, name
            assert texts.logprobs.tobytes() == found[name][0].logprobs.tobytes(), name
        difference = abs(found[name][0].logprobs - expected.logprobs).max()
        assert difference < TOLERANCE, f"{name}: {difference}"
