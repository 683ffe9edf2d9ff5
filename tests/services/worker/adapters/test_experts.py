"""Adapters of routed experts and routers, in both layouts of experts: texts of the checkpoints that
PEFT merges."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.harness.engines import make_engine
from services.worker.backends.native import NativeLM
from services.worker.layers.experts import Experts
from shared.errors import ConfigError
from shared.wire.messages import LoadAdapter
from tests.services.worker.adapters.made import adapters_of, texts_of
from tests.services.worker.adapters.peft_adapters import (
    STACKS,
    Written,
    write_random,
    write_tensors,
)
from tests.services.worker.adapters.test_texts import (
    assert_different,
    assert_near,
    assert_rows,
    assert_same,
)
from tests.services.worker.checkpoints import random_prompts, save_model
from tests.services.worker.driver import model_of
from tests.services.worker.hybrids import HYBRIDS
from tests.services.worker.test_families import CASES

FAMILIES = {
    **{
        name: CASES[name]
        for name in (
            *("qwen2 moe", "qwen3 moe", "mixtral", "ernie moe", "glm moe", "gpt-oss"),
            *("deepseek v2, groups", "deepseek v3, yarn"),
        )
    },
    **{name: HYBRIDS[name] for name in ("qwen3.5 moe", "qwen3-next", "nemotron 3, latents")},
}
FEW = ("qwen3 moe", "mixtral", "gpt-oss")
ROUTERS = ["gate.weight", "router.weight"]
DENSE = ["q_proj", "o_proj"]
LINEARS = ("gate_proj", "up_proj", "down_proj")
NOT_BY_PEFT = (
    "gpt-oss",
    "qwen2 moe",
    "qwen3.5 moe",
    "nemotron 3, latents",
)  # tensors of each expert


def each_family(few: tuple[str, ...], left_out: tuple[str, ...] = ()) -> list[Any]:
    names = [name for name in FAMILIES if name not in left_out]
    return [name if name in few else pytest.param(name, marks=pytest.mark.slow) for name in names]


def saved(name: str, folder: Path) -> Path:
    family, changes = FAMILIES[name]
    save_model(folder / "base", family, "10MB", **changes)
    return folder / "base"


def engine_of(base: Path, kernels: str, written: list[Written], **settings: Any) -> Any:
    modules = [f"a{number}={each.adapter}" for number, each in enumerate(written)]
    return make_engine(base, kernels, lora_modules=modules, **settings)


def digests_of(engine: Any) -> list[str]:
    return [row.digest for row in adapters_of(engine).store.rows]


def some_adapters(base: Path, target: Path) -> list[Written]:
    """Of experts, of a router and experts, of linear layers, of one stack."""
    options: dict[str, Any] = {"r": 4, "lora_alpha": 8}
    return [
        write_random(base, target / "0", 1, target_modules=[], target_parameters=STACKS, **options),
        write_random(
            *(base, target / "1", 2),
            target_modules=DENSE,
            target_parameters=STACKS + ROUTERS,
            rank_pattern={r".*\.experts\..*": 17},
            **options,
        ),
        write_random(base, target / "2", 3, target_modules=DENSE, **options),
        write_random(
            *(base, target / "3", 4),
            target_modules=[],
            target_parameters=STACKS[2:],
            **options,
        ),
    ]


@pytest.mark.parametrize("name", each_family(FEW))
def test_experts_in_one_tensor(name: str, tmp_path: Path) -> None:
    base = saved(name, tmp_path)
    written, prompts = some_adapters(base, tmp_path), random_prompts(5)
    for kernels in ("native", "torch"):
        engine = engine_of(base, kernels, written)
        assert isinstance(model_of(engine), NativeLM) == (kernels == "native")
        digests = [*digests_of(engine), ""]
        found = texts_of(engine, prompts, digests, chunk_sizes=(3, 7, 20))
        for number, each in enumerate(written):
            own = slice(number, number + 1)
            merged = texts_of(make_engine(each.merged, kernels), prompts[own], [""])
            assert_near(found[own], merged)
        plain = texts_of(make_engine(base, kernels), prompts, [""] * 5, chunk_sizes=(3, 7, 20))
        assert_near(found[4:], plain[4:])
        assert_different(found[:4], plain[:4])
        if kernels == "native":
            assert_same(found[4:], plain[4:])
            assert_rows(engine, texts_of(engine, prompts, digests), prompts, digests)


def of_each_expert(base: Path, rank: int, seed: int) -> dict[str, Tensor]:
    """As before transformers 5: tensors of each expert and of the router."""
    generator = torch.Generator().manual_seed(seed)
    model: Any = model_of(make_engine(base, "torch"))
    tensors: dict[str, Tensor] = {}
    for path, mixture in model.model.model.layers.named_modules():
        if not isinstance(mixture, Experts):
            continue
        outputs, inputs = mixture.gate.weight.shape
        shapes = {"gate": (outputs, inputs)}
        networks: Any = mixture.experts
        for number, each in enumerate(networks):
            for linear in (each.gate_up_proj, each.down_proj):
                for name, part in linear.parts.items():
                    shapes[f"experts.{number}.{name}"] = part.total, linear.inputs
        for name, (outputs, inputs) in shapes.items():
            a = torch.randn(rank, inputs, generator=generator) * 0.3 / inputs**0.5
            b = torch.randn(outputs, rank, generator=generator) * 0.3
            layer = f"base_model.model.model.layers.{path}.{name}"
            tensors |= {f"{layer}.lora_A.weight": a, f"{layer}.lora_B.weight": b}
    return tensors


@pytest.mark.parametrize("name", each_family(("mixtral", "ernie moe"), NOT_BY_PEFT))
def test_tensors_of_each_expert(name: str, tmp_path: Path) -> None:
    base, prompts = saved(name, tmp_path), random_prompts(3)
    targets = ["gate", *(("w1", "w2", "w3") if name == "mixtral" else LINEARS)]
    config = {"r": 3, "lora_alpha": 6, "target_modules": targets}
    written = write_tensors(base, tmp_path / "0", of_each_expert(base, 3, 1), **config)
    for kernels in ("native", "torch"):
        engine = engine_of(base, kernels, [written])
        found = texts_of(engine, prompts, [*digests_of(engine), "", *digests_of(engine)])
        merged = texts_of(make_engine(written.merged, kernels), prompts, [""] * 3)
        assert_near([found[0], found[2]], [merged[0], merged[2]])
        assert_different(found[:1], texts_of(engine, prompts[:1], [""]))


def test_memory_is_planned_for_experts_of_the_settings(tmp_path: Path) -> None:
    """And not for those that may come."""
    base = saved("qwen3 moe", tmp_path)
    options: dict[str, Any] = {"r": 16, "target_modules": []}
    written = write_random(base, tmp_path, 1, target_parameters=STACKS, **options)
    limits: dict[str, Any] = {"max_cpu_loras": 2, "max_lora_rank": 16}
    plain = adapters_of(make_engine(base, "native", enable_lora=True, **limits))
    engine = engine_of(base, "native", [written], **limits)
    found = adapters_of(engine)
    assert found.memory.planned == plain.memory.planned
    assert plain.memory.larger == 0
    assert found.memory.larger > 0
    purposes = found.num_bytes(1)
    assert purposes["the larger size of adapters of experts, embeddings or heads"] > 0
    (row,) = found.store.rows
    (packed,) = found.table._adapters.values()
    assert row.num_bytes == packed.num_bytes
    left = found.memory.room - row.num_bytes
    assert left == plain.memory.room // 2

    directory = tmp_path / "adapters"
    directory.mkdir()
    refusing = make_engine(base, "native", lora_dir=directory, **limits)
    shutil.copytree(written.adapter, directory / "late")
    store = adapters_of(refusing).store
    store.load(LoadAdapter("1", "late", "late"))
    assert "0 of which are taken, and this adapter needs" in store.rows[-1].problem


def test_devices_refuse_them(tmp_path: Path) -> None:
    base = saved("qwen3 moe", tmp_path)
    written = write_random(
        base, tmp_path, 1, target_modules=["o_proj"], target_parameters=ROUTERS, r=2
    )
    reason = r"mlp.gate is not one .*; routed experts, routers, embeddings and output heads are"
    with pytest.raises(ConfigError, match=reason):
        engine_of(base, "device", [written])
