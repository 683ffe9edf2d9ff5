"""Ranks that share a model with images give the texts of transformers; the first one encodes."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.harness.engines import make_engine
from services.worker.media.encoder import ENCODED_TOKENS
from tests.media.checkpoints import save_checkpoint
from tests.media.families import ROTATIONS
from tests.media.gemma3_checkpoints import gemma3_reference, save_gemma3
from tests.media.references import Clip, Reference, reference
from tests.media.videos import scene
from tests.services.worker.media.prompts import Chat, chat, texts_of
from tests.services.worker.ranks.rank_processes import Case, Texts, texts_of_ranks

LIMITS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 6, "max_num_batched_tokens": 512}
WHOLE = {"enable_expert_parallel": True}
ERNIE = "ernie4.5-vl"
CHANGES: dict[str, dict[str, Any]] = {
    ERNIE: {"moe_intermediate_size": [64, 32]},  # halves are whole tiles of native code
    "qwen3.5": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
}


def texts_with_pictures(
    chats: Sequence[Chat], chunk_sizes: Sequence[int], engine: Any, num_steps: int
) -> Texts:
    """With the number of encoded tokens in place of logprobs."""
    before = encoded_tokens()
    ids = [
        text
        for size in chunk_sizes
        for text in texts_of(engine, chats, chunk_sizes=[size], num_steps=num_steps)
    ]
    return Texts(ids, np.array([encoded_tokens() - before]))


def encoded_tokens() -> float:
    return float(ENCODED_TOKENS._value.get())


def saved(folder: Path, family: str) -> Path:
    folder.mkdir()
    if family == "gemma3":
        save_gemma3(folder)
    else:
        save_checkpoint(folder, family=family, **CHANGES.get(family, {}))
    return folder


def chats_of(oracle: Reference) -> list[Chat]:
    first, second = oracle.picture(1, 3, 5), oracle.picture(2, 7, 2)
    return [
        chat(oracle, "Describe it. ", first),
        chat(oracle, second, " and ", first, "?"),
        chat(oracle, "No picture at all."),
    ]


def assert_texts_of_transformers(
    found: dict[str, list[Texts]], expected: dict[str, Sequence[Chat]]
) -> None:
    """Each rank has them, and the first one alone has encoded."""
    for name, of_ranks in found.items():
        ids = [each.expected.ids for each in expected[name]]
        for texts in of_ranks:
            assert texts.ids == ids * (len(texts.ids) // len(ids)), name
        first, *others = (int(texts.logprobs[0]) for texts in of_ranks)
        assert first > 0
        assert not any(others), name


def test_two_ranks_have_the_texts_of_transformers(tmp_path: Path) -> None:
    """Of ERNIE-4.5-VL, with its experts in parts, in native code."""
    folder = saved(tmp_path / "model", ERNIE)
    chats = chats_of(reference(folder))
    texts = partial(texts_with_pictures, chats, [13])
    with texts_of_ranks({"": Case(folder, "native", LIMITS, texts=texts)}, 2, tmp_path) as found:
        pass
    assert_texts_of_transformers(found, {"": chats})


@pytest.mark.slow
@pytest.mark.parametrize("num_hosts", [1, 2])
@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3-vl", ERNIE, "gemma3", "qwen3.5"])
def test_ranks_of_each_family_in_chunks(tmp_path: Path, family: str, num_hosts: int) -> None:
    """By each engine; images of Gemma 3 are computed whole, so its chunks are longer."""
    folder = saved(tmp_path / "model", family)
    oracle = gemma3_reference(folder) if family == "gemma3" else reference(folder)
    chats = chats_of(oracle)
    if family in ("qwen2.5-vl", ERNIE):
        clip = Clip(scene(4, 6, 3 * oracle.side, 2 * oracle.side))
        chats.append(chat(oracle, "What moves? ", clip))
    case = partial(Case, folder, texts=partial(texts_with_pictures, chats, [1, 7, 1000]))
    cases = {kernels: case(kernels, LIMITS) for kernels in ("native", "torch")}
    if num_hosts == 1:
        cases["device"] = case("device", LIMITS)
    if family == ERNIE:
        cases["whole, native"] = case("native", LIMITS | WHOLE)
        cases["whole, torch"] = case("torch", LIMITS | WHOLE)
    with texts_of_ranks(cases, 2, tmp_path, num_hosts) as found:
        pass
    assert_texts_of_transformers(found, dict.fromkeys(cases, chats))


@pytest.mark.slow
def test_four_ranks_of_quantized_experts_have_the_texts_of_one_process(tmp_path: Path) -> None:
    """A hundred images in one prompt, as a deployment with weights in four bits has them."""
    rotations = ROTATIONS | {"mrope_section": [6, 6, 4]}
    sizes: dict[str, Any] = {
        "intermediate_size": 128,
        "moe_intermediate_size": [128, 128],
        "head_dim": 32,
        "rope_parameters": rotations,
    }
    save_checkpoint(tmp_path / "model", family=ERNIE, **sizes)
    oracle = reference(tmp_path / "model")
    pictures = [oracle.picture(seed, 2, 2) for seed in range(100)]
    chats = [*chats_of(oracle), chat(oracle, *pictures, "Which is the brightest?")]
    limits = LIMITS | {"max_model_len": 1024, "max_num_batched_tokens": 384}
    texts = partial(texts_with_pictures, chats, [384])
    case = partial(Case, tmp_path / "model", "native", texts=texts)
    cases = {
        "wint4, parts": case(limits | {"quantization": "wint4"}),
        "wint4, whole": case(limits | {"quantization": "wint4"} | WHOLE),
        "wint8, whole": case(limits | {"quantization": "wint8"} | WHOLE),
    }
    with texts_of_ranks(cases, 4, tmp_path) as found:
        pass
    for name, each in cases.items():
        alone = make_engine(
            each.folder, "native", **each.settings | {"enable_expert_parallel": False}
        )
        expected = texts_of(alone, chats, chunk_sizes=[384])
        assert [texts.ids for texts in found[name]] == [expected] * 4, name
