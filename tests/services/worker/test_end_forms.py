"""Quantized embeddings and output heads give every reader the dequantized result."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.harness.engines import ENGINES, make_engine
from kernels.cpu.library import load_library, variants
from kernels.cpu.operators import Kind, Operator, PackedMatrix
from kernels.cpu.packing import NativeLibrary
from kernels.cpu.program import Buffer, NativeProgram
from services.worker.backends.native import NativeLM
from services.worker.layers.embedding import TokenRows
from services.worker.layers.linear import Linear
from services.worker.layers.weights import Dense, Quantized
from services.worker.models.decoder import DecoderLM
from services.worker.models.registry import read_model_config
from services.worker.weights.checkpoint import StoredTensor
from services.worker.weights.load import load_model
from services.worker.weights.online import ONLINE, Quantization
from shared.errors import ConfigError
from tests.kernels.coded import KINDS, random_codes
from tests.selection import only
from tests.services.worker.builds import each_variant
from tests.services.worker.checkpoints import (
    VOCAB_SIZE,
    assert_greedy,
    oracle_of,
    quantized,
    random_prompts,
    save_mimo,
    save_model,
)
from tests.services.worker.driver import Driver, Job, assert_drafts_change_no_text, model_of
from tests.services.worker.stored_codes import LAYOUTS, save_quantized
from tests.services.worker.test_quantized_models import with_values

pytestmark = pytest.mark.usefixtures("_unwritten_memory")

CPU = torch.device("cpu")
HIDDEN = 64  # of the checkpoints
tied = pytest.mark.parametrize("is_tied", [False, True], ids=["", "tied"])
EMBEDDING, HEAD = "embedding_quantization", "lm_head_quantization"
QUICK = ((EMBEDDING, "wint4"), (HEAD, "wint8"))
ENDS = only(QUICK, (EMBEDDING, HEAD), ONLINE)


def embedded(library: NativeLibrary, packed: PackedMatrix, ids: Tensor, first: int) -> Tensor:
    embed = Operator(
        kind=Kind.EMBED, source=0, out=1, size=packed.k, weight=packed, first=first, num=packed.n
    )
    buffers = [Buffer(1, torch.int32), Buffer(packed.k, torch.float32)]
    return NativeProgram(library, [embed], buffers, 1, 1).run([ids])


@each_variant
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("group", "has_zeros"), [(None, False), (None, True), (16, True), (32, False), (256, False)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_native_rows_equal_the_dequantized_values_bit_by_bit(
    variant: str, kind: str, group: int | None, has_zeros: bool, dtype: torch.dtype
) -> None:
    """Also for a rank with the tokens from 100 on; other rows are zeros."""
    library = NativeLibrary(load_library(variant), dtype, 2)
    codes = random_codes(kind, (37, 528), group, zeros=has_zeros)
    ids = torch.tensor([99, *range(100, 137), 137, 0, 136, 100], dtype=torch.int32)
    found = embedded(library, library.pack_codes(codes), ids, 100)
    is_ours = (ids >= 100) & (ids < 137)
    assert torch.equal(found[is_ours], codes.values(dtype).float()[(ids - 100)[is_ours]])
    assert not found[~is_ours].any()


@tied
@pytest.mark.parametrize(("setting", "form"), ENDS)
@pytest.mark.parametrize("kernels", ENGINES)
def test_texts_match_transformers_with_dequantized_weights(
    tmp_path: Path, setting: str, form: Quantization, is_tied: bool, kernels: str
) -> None:
    """Embeddings with the weights of a quantized head keep their own copy."""
    save_model(tmp_path, LlamaForCausalLM, tie_word_embeddings=is_tied)
    engine = make_engine(tmp_path, kernels, **{setting: form})
    prompts = random_prompts(5)
    texts = Driver(engine, [3, 7, 1, 5], seed=1).run([Job(prompt) for prompt in prompts])
    oracle = oracle_of(tmp_path)
    ends: dict[str, Quantization] = {"of_head" if setting == HEAD else "of_embeddings": form}
    with quantized(oracle, "none", **ends):
        for prompt, text in zip(prompts, texts, strict=True):
            assert_greedy(oracle, prompt, text)


@pytest.mark.parametrize("kernels", ["native", "device"])
@pytest.mark.parametrize(
    ("setting", "is_tied"), [(EMBEDDING, False), (EMBEDDING, True), (HEAD, False)]
)
def test_with_drafts_texts_match_runs_without(
    tmp_path: Path, kernels: str, setting: str, is_tied: bool
) -> None:
    """An MTP head shares the embeddings and the output head."""
    save_mimo(tmp_path, tie_word_embeddings=is_tied)
    forms: dict[str, Any] = {"quantization": "wint8", setting: "wint4"}
    assert_drafts_change_no_text(tmp_path, kernels, **forms)


def load(folder: Path, dtype: torch.dtype = torch.bfloat16, **forms: Any) -> DecoderLM:
    config = read_model_config(folder)
    return load_model(folder, config, dtype, CPU, lambda *_: None, **forms)


def test_tied_embeddings_and_head_are_one_set_of_codes(tmp_path: Path) -> None:
    save_mimo(tmp_path, tie_word_embeddings=True)
    table = load(tmp_path).model.embed_tokens.weight.values
    alone: dict[str, Any] = {"embedding": "wint8"}
    for forms in (alone, alone | {"head": "wint8"}):
        model = load(tmp_path, **forms)
        assert model.lm_head is not None
        (form,) = (module for module in model.modules() if isinstance(module, Quantized))
        assert model.lm_head.weight is model.model.embed_tokens.weight is form
        assert torch.equal(form.values, ONLINE["wint8"](table).values)
    model = load(tmp_path, head="wint8")
    assert isinstance(model.model.embed_tokens.weight, Dense)


@tied
def test_codes_are_freed_when_they_are_packed(tmp_path: Path, is_tied: bool) -> None:
    save_mimo(tmp_path, tie_word_embeddings=is_tied)
    model = load(tmp_path, embedding="wint4")
    form = weakref.ref(model.model.embed_tokens.weight)
    library = NativeLibrary(load_library(variants()[0]), torch.bfloat16, 1)
    native = NativeLM(model, 16, library)
    assert form() is None
    assert native.draft_head is not None


@pytest.mark.parametrize("end", ["embedding", "head"])
def test_untied_ends_leave_each_other_alone(tmp_path: Path, end: str) -> None:
    save_mimo(tmp_path)
    forms: dict[str, Any] = {end: "nf4"}
    model = load(tmp_path, **forms)
    (form,) = (module for module in model.modules() if isinstance(module, Quantized))
    assert model.lm_head is not None
    ends = {"embedding": model.model.embed_tokens.weight, "head": model.lm_head.weight}
    assert ends.pop(end) is form
    assert all(isinstance(each, Dense) for each in ends.values())


@pytest.mark.parametrize("kernels", ["torch", "native"])
@tied
def test_freed_weights_are_not_counted(tmp_path: Path, kernels: str, is_tied: bool) -> None:
    """The dense embeddings: a byte and a share of a scale replace four bytes."""
    save_model(tmp_path, LlamaForCausalLM, tie_word_embeddings=is_tied)
    sizes = []
    for form in ("none", "wint8"):
        model = model_of(make_engine(tmp_path, kernels, embedding_quantization=form))
        sizes.append(sum(each.nbytes for each in (*model.parameters(), *model.buffers())))
    assert sizes[0] - sizes[1] == VOCAB_SIZE * (HIDDEN * 4 - HIDDEN - 4)


@tied
def test_embeddings_that_become_codes_have_no_memory_for_numbers(
    tmp_path: Path, is_tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither has a head that shares them; data read from the file is freed with the next layer."""
    save_mimo(tmp_path, tie_word_embeddings=is_tied)
    allocated: list[TokenRows] = []
    tables: list[weakref.ref[Tensor]] = []
    allocate_rows, allocate, read = TokenRows.allocate, Linear.allocate, StoredTensor.read

    def note(stored: StoredTensor, dim: int, start: int, num: int) -> Tensor:
        found = read(stored, dim, start, num)
        if stored.name == "model.embed_tokens.weight":
            tables.append(weakref.ref(found))
        return found

    def watch(linear: Linear, device: torch.device) -> None:
        assert [table() for table in tables] == [None]
        allocate(linear, device)

    def watch_rows(rows: TokenRows, device: torch.device) -> None:
        allocated.append(rows)
        allocate_rows(rows, device)

    monkeypatch.setattr(StoredTensor, "read", note)
    monkeypatch.setattr(Linear, "allocate", watch)
    monkeypatch.setattr(TokenRows, "allocate", watch_rows)
    model = load(tmp_path, torch.float32, embedding="wint4")
    assert allocated == ([] if is_tied else [model.lm_head])


@tied
@pytest.mark.parametrize("kernels", ENGINES)
def test_a_checkpoints_codes_of_embeddings_and_head_are_kept(
    tmp_path: Path, is_tied: bool, kernels: str
) -> None:
    save_model(tmp_path / "dense", LlamaForCausalLM, tie_word_embeddings=is_tied)
    layout, codes = LAYOUTS["compressed-tensors"], tmp_path / "codes"
    values = save_quantized(tmp_path / "dense", codes, layout, ends=("embed_tokens", "lm_head"))
    model = load(codes, torch.float32)
    assert model.lm_head is not None
    assert isinstance(model.model.embed_tokens.weight, Quantized)
    assert isinstance(model.lm_head.weight, Quantized)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_tied
    expected = values["model.embed_tokens.weight"]
    assert torch.equal(model.model.embed_tokens.weight.values, expected)
    oracle = with_values(tmp_path / "dense", values, tmp_path / "values")
    engine = make_engine(codes, kernels)
    for prompt in random_prompts(3):
        (text,) = Driver(engine, [5]).run([Job(prompt)])
        assert_greedy(oracle, prompt, text)


def test_quantized_weights_are_not_quantized_again(tmp_path: Path) -> None:
    save_model(tmp_path / "dense", LlamaForCausalLM)
    layout, codes = LAYOUTS["compressed-tensors"], tmp_path / "codes"
    save_quantized(tmp_path / "dense", codes, layout, ends=("embed_tokens", "lm_head"))
    for setting, layer in (("embedding", "model.embed_tokens"), ("lm_head", "lm_head")):
        text = f"{setting.replace('_', '-')}-quantization: wint8 is made of dense .* {layer} are"
        with pytest.raises(ConfigError, match=text):
            make_engine(codes, **{f"{setting}_quantization": "wint8"})


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_tied_head_in_another_form_is_refused(tmp_path: Path, load_format: str) -> None:
    save_model(tmp_path, LlamaForCausalLM, tie_word_embeddings=True)
    forms = {"embedding_quantization": "wint4", "lm_head_quantization": "wint8"}
    with pytest.raises(ConfigError, match=r"lm-head-quantization: wint8: .* makes wint4: leave it"):
        make_engine(tmp_path, load_format=load_format, **forms)
    dummy = make_engine(tmp_path, load_format="dummy", embedding_quantization="wint4")
    assert isinstance(model_of(dummy).model.lm_head.weight, Quantized)  # type: ignore[union-attr]


@pytest.mark.parametrize("setting", [EMBEDDING, HEAD])
def test_a_model_that_transformers_computes_is_refused(tmp_path: Path, setting: str) -> None:
    save_model(tmp_path, LlamaForCausalLM)
    text = f"{setting.replace('_', '-')}: wint8 is for our own architectures"
    with pytest.raises(ConfigError, match=text):
        make_engine(tmp_path, model_impl="transformers", **{setting: "wint8"})
