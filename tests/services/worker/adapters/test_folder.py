"""Folders of adapters, and the reasons of refusals."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from services.worker.adapters.folder import AdapterFolder
from services.worker.adapters.sites import Layers, LoadedAdapter, LowRank
from services.worker.weights.checkpoint import open_checkpoint
from shared.errors import ConfigError
from tests.services.worker.adapters.adapter_folders import random_layers, write_adapter

QUERY, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
SHAPES = {QUERY: (32, 16), DOWN: (16, 48)}
LAYERS = Layers(SHAPES)


def read(folder: Path, dtype: torch.dtype = torch.float32, name: str = "sql") -> LoadedAdapter:
    return AdapterFolder(name, folder, LAYERS, max_rank=16).read(dtype)


def write(folder: Path, rank: int = 4, seed: int = 0, **options: Any) -> Path:
    return write_adapter(folder, random_layers(SHAPES, rank, seed), **options)


def test_its_scale_is_in_b(tmp_path: Path) -> None:
    layers = random_layers(SHAPES, 4, 0)
    found = read(write(tmp_path, lora_alpha=10))
    assert found.rank == 4
    assert set(found.layers) == set(SHAPES)
    for name, (a, b) in found.layers.items():
        assert torch.equal(a, layers[name].a)
        assert torch.equal(b, layers[name].b * 2.5)
    assert found.num_bytes == 4 * 4 * sum(map(sum, SHAPES.values()))


def test_rank_and_alpha_of_a_layer(tmp_path: Path) -> None:
    """The first expression that matches the end of a name decides."""
    shapes = random_layers({QUERY: SHAPES[QUERY]}, 8, 0) | random_layers({DOWN: SHAPES[DOWN]}, 2, 1)
    folder = write_adapter(
        *(tmp_path, shapes),
        r=8,
        lora_alpha=8,
        use_rslora=True,
        rank_pattern={"own_proj": 5, r"mlp\.down_proj": 2, "down_proj": 3},
        alpha_pattern={"layers.1.mlp.down_proj": 4},
    )
    found = read(folder).layers
    assert torch.allclose(found[QUERY].b, shapes[QUERY].b * 8 / 8**0.5)
    assert torch.allclose(found[DOWN].b, shapes[DOWN].b * 4 / 2**0.5)


@pytest.mark.parametrize(
    "beginning", ["model.", "", "model.language_model.", "language_model.model."]
)
@pytest.mark.parametrize("prefix", ["base_model.model.", ""])
def test_other_names_of_layers(tmp_path: Path, prefix: str, beginning: str) -> None:
    layers = random_layers(SHAPES, 4, 0)
    named = {name.replace("model.", beginning, 1): each for name, each in layers.items()}
    found = read(write_adapter(tmp_path, named, prefix=prefix, alpha_pattern={QUERY: 8}))
    assert set(found.layers) == set(SHAPES)
    is_named = f".{beginning}".endswith(".model.")  # expressions are for names of the file
    assert torch.equal(found.layers[QUERY].b, layers[QUERY].b * (2 if is_named else 1))


def test_the_digest(tmp_path: Path) -> None:
    def digest(name: str = "sql", dtype: torch.dtype = torch.float32, **options: Any) -> str:
        return read(write(tmp_path / "one", **options), dtype, name).digest

    first = digest()
    assert digest() == first
    assert digest(dtype=torch.bfloat16) == first
    assert digest(task_type="CAUSAL_LM") == first
    others = [
        *(digest(seed=1), digest(rank=8), digest(lora_alpha=3), digest(use_rslora=True)),
        *(digest(alpha_pattern={"q_proj": 3}), digest(name="code"), digest(prefix="")),
        digest(alpha_pattern={"q_proj": 1, ".*_proj": 9}),
        digest(alpha_pattern={".*_proj": 9, "q_proj": 1}),
    ]
    assert len({first, *others}) == 1 + len(others)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"rank": 32}, "rank 32 of layer model.layers.*; max-lora-rank is 16"),
        ({"r": 8}, r"q_proj.lora_A.weight is \[4, 16\], expected \[8, 16\]"),
        ({"r": 0}, "rank 0 of r; at least 1"),
        ({"rank_pattern": {"q_proj": -1}}, "rank -1 of q_proj"),
        ({"rank_pattern": {"q_(": 4}}, "no expression"),
        ({"rank_pattern": {r"((\w|\.)+)+!": 4}}, "is not supported; patterns have names"),
        ({"rank_pattern": {"(?i)q_proj": 4}}, "is not supported"),
        ({"rank_pattern": {"a{99999999999999999999}": 4}}, "is not supported"),
        ({"alpha_pattern": {5000 * "(" + "q" + 5000 * ")": 4}}, "is not supported"),
        ({"alpha_pattern": {9 * ".*a": 4}}, "at most 8 of the last three"),
        ({"peft_type": "LOHA"}, "peft_type LOHA"),
        ({"bias": "all"}, "bias all"),
        ({"use_dora": True}, "use_dora: not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights pissa_niter_4"),
        ({"lora_alpha": "many"}, "lora_alpha"),
        ({"lora_alpha": 1e300}, "not finite"),
        ({"prefix": "base_model.model.decoder."}, "the nearest is model.layers"),
        ({"more_tensors": {"lm_head.lora_A.weight": torch.ones(4, 16)}}, "lm_head has no lora_B"),
        (
            {"more_tensors": {"base_model.model.x.lora_magnitude_vector": torch.ones(4)}},
            "tensor base_model.model.x.lora_magnitude_vector is not supported",
        ),
    ],
)
def test_bad_folders(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read(write(tmp_path, **options))


def test_no_finite_values(tmp_path: Path) -> None:
    layers = random_layers(SHAPES, 4, 0)
    layers[DOWN].b[3, 1] = float("nan")
    with pytest.raises(ConfigError, match=f"layer {DOWN}: values that are not finite"):
        read(write_adapter(tmp_path, layers))


def test_integers_are_refused(tmp_path: Path) -> None:
    layers = random_layers(SHAPES, 4, 0)
    layers[QUERY] = LowRank(layers[QUERY].a.to(torch.int32), layers[QUERY].b)
    with pytest.raises(ConfigError, match=r"lora_A.weight is I32; F32, BF16, F16 are supported"):
        read(write_adapter(tmp_path, layers))


def test_types_without_a_counterpart_in_torch(tmp_path: Path) -> None:
    header = b'{"x": {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [0, 4]}}'
    weights = write(tmp_path) / "adapter_model.safetensors"
    weights.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ConfigError, match="tensor x is F8_E8M0"):
        read(tmp_path)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        read(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"has no adapter_config\.json"):
        read(tmp_path)
    weights = write(tmp_path) / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for cut in (whole[:4], whole[:40], whole[:-1], b"\xff" * 8 + whole[8:], whole + b"x"):
        weights.write_bytes(cut)
        with pytest.raises(ConfigError, match="not a valid safetensors file"):
            read(tmp_path)
    os.truncate(weights, 1 << 30)
    with pytest.raises(ConfigError, match="safetensors file: its tensors are not all of it"):
        read(tmp_path)
    weights.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"adapter_model.bin is not read, since it may run code"):
        read(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"r": 8}', "[" * 100_000, '{"r": 1e400}'])
def test_bad_configs(tmp_path: Path, text: str) -> None:
    (write(tmp_path) / "adapter_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"adapter_config.json: "):
        read(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"a": "b" * (1 << 20)}))
    with pytest.raises(ConfigError, match="the limit is 1048576"):
        read(tmp_path)


EXPERTS = "model.layers.0.mlp.experts"
TABLE, HEAD, VOCAB = "model.embed_tokens", "lm_head", 48
OF_EXPERTS = {
    **{f"{EXPERTS}.{number}.gate_proj": (24, 16) for number in range(3)},
    **{f"{EXPERTS}.{number}.gate_up_proj": (48, 16) for number in range(3)},
    **{f"{EXPERTS}.{number}.down_proj": (16, 24) for number in range(3)},
}
RARE = Layers(
    {**OF_EXPERTS, QUERY: (32, 16), TABLE: (16, VOCAB), HEAD: (VOCAB, 16)},
    {EXPERTS: {
        each: [f"{EXPERTS}.{number}.{each}" for number in range(3)]
        for each in ("gate_up_proj", "down_proj")
    }},
    frozenset({TABLE}),
)  # fmt: skip


def rare_tensors() -> dict[str, torch.Tensor]:
    """Of rank 2, all that such a file may have."""
    generator = torch.Generator().manual_seed(1)
    shapes = {
        f"{EXPERTS}.base_layer.lora_A.weight": (6, 16),
        f"{EXPERTS}.base_layer.lora_B.weight": (48, 6),
        f"{EXPERTS}.lora_A.weight": (6, 24),
        f"{EXPERTS}.lora_B.weight": (16, 6),
        f"{TABLE}.lora_embedding_A": (2, VOCAB),
        f"{TABLE}.lora_embedding_B": (16, 2),
        f"{TABLE}.base_layer.weight": (VOCAB, 16),
        f"{HEAD}.lora_A.weight": (2, 16),
        f"{HEAD}.lora_B.weight": (VOCAB, 2),
        f"{HEAD}.base_layer.weight": (VOCAB, 16),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def read_rare(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> LoadedAdapter:
    named = {f"base_model.model.{name}": each for name, each in tensors.items()}
    write_adapter(folder, {}, more_tensors=named, **({"r": 2, "lora_alpha": 2} | config))
    return AdapterFolder("sql", folder, RARE, max_rank=16).read(torch.float32)


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    """Of all experts, ranks are side by side in A, and experts in B."""
    tensors = rare_tensors()
    found = read_rare(tmp_path, tensors).layers
    assert {*found} == {*RARE.shapes} - {QUERY, *(f"{EXPERTS}.{i}.gate_proj" for i in range(3))}
    for number in range(3):
        for part, base in (("gate_up_proj", ".base_layer"), ("down_proj", "")):
            a, b = found[f"{EXPERTS}.{number}.{part}"]
            of_a, of_b = (tensors[f"{EXPERTS}{base}.lora_{each}.weight"] for each in "AB")
            assert torch.equal(a, of_a[2 * number : 2 * number + 2])
            assert torch.equal(b, of_b[:, number::3])


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        (f"{EXPERTS}.lora_A.weight", None, f"layer {EXPERTS} has no lora_A"),
        (f"{EXPERTS}.base_layer.lora_B.weight", None, f"layer {EXPERTS}.base_layer has no lora_B"),
        (f"{TABLE}.lora_embedding_B", None, f"layer {TABLE} has no lora_B"),
        (f"{EXPERTS}.lora_A.weight", (4, 24), rf"tensors {EXPERTS}.lora_A.weight and .* \[4, 24\]"),
        (f"{EXPERTS}.lora_B.weight", (16, 8), r"expected \[6, 16\] and \[48, 6\] for gate_up_proj"),
        (
            f"{TABLE}.lora_embedding_A",
            (2, 47),
            r"lora_embedding_A is \[2, 47\], expected \[2, 48\]",
        ),
        (f"{HEAD}.lora_B.weight", (50, 2), r"lm_head.lora_B.weight is \[50, 2\], expected \[48, 2"),
        (f"{HEAD}.base_layer.weight", (50, 16), r"lm_head.base_layer.weight \[50, 16\] is no copy"),
        (f"{QUERY}.base_layer.weight", (32, 16), f"{QUERY}.base_layer.weight .* is no copy"),
        (f"{EXPERTS}.3.down_proj.lora_A.weight", (2, 24), "layer .*3.down_proj has no lora_B"),
        (f"{EXPERTS}.base_layer.base_layer.lora_A.weight", (6, 1), "base_layer has no lora_B"),
        (f"{TABLE}.token_adapter.trainable_tokens_delta", (2, 16), "tokens_delta is not supported"),
        (f"{HEAD}.lora_A.bias", (2,), f"tensor base_model.model.{HEAD}.lora_A.bias is not"),
        (f"{HEAD}.lora_embedding_A", (2, 16), "are both A or both B of a layer"),
    ],
)
def test_bad_tensors_of_experts_and_ends(
    tmp_path: Path, name: str, shape: tuple[int, ...] | None, reason: str
) -> None:
    tensors = rare_tensors()
    if shape is None:
        del tensors[name]
    else:
        tensors[name] = torch.ones(shape)
    with pytest.raises(ConfigError, match=reason):
        read_rare(tmp_path, tensors)


def test_experts_twice(tmp_path: Path) -> None:
    for part, (outputs, inputs) in {"gate_proj": (24, 16), "down_proj": (16, 24)}.items():
        more = {
            f"{EXPERTS}.1.{part}.lora_A.weight": torch.ones(2, inputs),
            f"{EXPERTS}.1.{part}.lora_B.weight": torch.ones(outputs, 2),
        }
        with pytest.raises(ConfigError, match="change the same experts"):
            read_rare(tmp_path, rare_tensors() | more)


def test_tied_ends_have_both(tmp_path: Path) -> None:
    tensors = {name: each for name, each in rare_tensors().items() if HEAD not in name}
    read_rare(tmp_path, tensors)
    with pytest.raises(
        ConfigError, match="ensure_weight_tying: the file has no tensors of lm_head"
    ):
        read_rare(tmp_path, tensors, ensure_weight_tying=True)
    read_rare(tmp_path, rare_tensors(), ensure_weight_tying=True)


def test_a_trained_copy_of_the_base(tmp_path: Path) -> None:
    tensors = rare_tensors()
    read_rare(tmp_path, tensors)
    save_file({f"{TABLE}.weight": tensors[f"{TABLE}.base_layer.weight"]}, tmp_path / "base")
    adapter = AdapterFolder("sql", tmp_path, RARE, max_rank=16)
    find = open_checkpoint([tmp_path / "base"]).find
    with pytest.raises(ConfigError, match=r"lm_head.base_layer.weight is no copy of the base's"):
        adapter.read(torch.float32, lambda name: find(f"{TABLE}.weight"))
    adapter.read(torch.float32, find)
