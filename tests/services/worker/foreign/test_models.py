"""transformers' architectures in our engine: transformers' own outputs, or a reason for refusal."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertLMHeadModel,
    BloomForCausalLM,
    FalconH1ForCausalLM,
    GraniteForCausalLM,
    JambaForCausalLM,
    Lfm2ForCausalLM,
    LlamaForCausalLM,
    MambaForCausalLM,
    MistralForCausalLM,
    Olmo2ForCausalLM,
    PhimoeForCausalLM,
    PreTrainedModel,
    Qwen3NextForCausalLM,
    T5ForConditionalGeneration,
)

from benchmarks.harness.engines import make_engine
from services.worker.foreign import backend
from shared.errors import ConfigError
from tests.selection import only
from tests.services.worker.checkpoints import (
    asked_once,
    assert_greedy,
    change_config,
    oracle_of,
    random_prompts,
    save_model,
)
from tests.services.worker.driver import Driver, Job
from tests.services.worker.foreign_checkpoints import FAMILIES, save_family, save_with_images

# Experts, learned positions, other norms, joined projections; test_on_devices.py has more.
KINDS = ("Qwen3MoeForCausalLM", "GPT2LMHeadModel", "Cohere2ForCausalLM", "Phi3ForCausalLM")
MOE = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.fixture(scope="module", params=only([(each,) for each in KINDS], FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("family")
    save_family(folder, request.param)
    return folder


def test_texts_match_transformers_whole_and_in_chunks(folder: Path) -> None:
    oracle = asked_once(oracle_of(folder))
    prompts = [*random_prompts(4), random_prompts(3, seed=1)[2] * 3]
    engine = make_engine(folder, model_impl="transformers")
    for chunk_sizes in ([1000], [3, 7, 1, 5]):
        texts = Driver(engine, chunk_sizes).run([Job(prompt) for prompt in prompts])
        for prompt, text in zip(prompts, texts, strict=True):
            assert_greedy(oracle, prompt, text)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        (LlamaForCausalLM, {}),
        (GraniteForCausalLM, FAMILIES["GraniteForCausalLM"]),
        (Olmo2ForCausalLM, {}),
        (MistralForCausalLM, {"sliding_window": 7}),
    ],
)
def test_the_same_weights_have_the_same_text_with_either_implementation(
    tmp_path: Path, family: type[PreTrainedModel], changes: dict[str, Any]
) -> None:
    save_model(tmp_path, family, **changes)
    ours, theirs = (
        Driver(make_engine(tmp_path, model_impl=impl), [7]).run(
            [Job(prompt) for prompt in random_prompts(6)]
        )
        for impl in ("auto", "transformers")
    )
    assert ours == theirs


def test_in_bfloat16_logits_are_compared_in_float32(tmp_path: Path) -> None:
    save_family(tmp_path, "Gemma2ForCausalLM", tie_word_embeddings=True)
    engine = make_engine(tmp_path, dtype="bfloat16", model_impl="transformers")
    model = engine._model
    assert model.base.get_input_embeddings().weight.dtype == torch.bfloat16
    hidden = model.base.get_input_embeddings().weight[:3]
    logits = model.logits(hidden)
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())


def test_a_model_of_texts_and_images_is_served_for_texts(tmp_path: Path) -> None:
    save_with_images(tmp_path)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    prompts = random_prompts(6)
    texts = Driver(make_engine(tmp_path), [7]).run([Job(prompt) for prompt in prompts])
    for prompt, text in zip(prompts, texts, strict=True):
        assert_greedy(oracle, prompt, text)


def test_random_weights_are_made_without_a_file(tmp_path: Path) -> None:
    save_family(tmp_path, "Phi3ForCausalLM")
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    engines = [make_engine(tmp_path, load_format="dummy") for _ in range(2)]
    first, second = (Driver(engine).run([Job([8, 9, 10])]) for engine in engines)
    assert first == second
    with pytest.raises(ConfigError, match=r"cannot serve it.*safetensors"):
        make_engine(tmp_path)


REFUSED: dict[str, tuple[type[PreTrainedModel], dict[str, Any], str]] = {
    "linear attention": (Qwen3NextForCausalLM, MOE, "linear_attention"),
    "hybrid": (FalconH1ForCausalLM, {}, "hybrid"),
    "convolutions": (Lfm2ForCausalLM, {"layer_types": ["conv", "full_attention", "conv"]}, "conv"),
    "state space and attention": (JambaForCausalLM, {}, "layer_types"),
    "state space": (MambaForCausalLM, {"state_size": 4}, "linear_attention"),
    "encoder": (BertLMHeadModel, {"is_decoder": False}, "see the ones behind them"),
    "other attention": (BloomForCausalLM, {}, "BloomForCausalLM does not use"),
    "two halves": (T5ForConditionalGeneration, {"d_kv": 16, "d_ff": 64}, "encoder-decoder"),
    "a rope that looks at the batch": (
        LlamaForCausalLM,
        {
            "max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 64,
            },
        },
        "longrope.*max-model-len is 128: lower it to 64",
    ),
    "unknown codes": (
        LlamaForCausalLM,
        {"quantization_config": {"quant_method": "hqq"}},
        "quant_method 'hqq' is not supported",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_with_other_state_are_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    family, changes, reason = REFUSED[name]
    save_model(tmp_path, family, **changes)
    with pytest.raises(ConfigError, match=reason):
        make_engine(tmp_path, model_impl="transformers")


def test_state_that_nobody_declares_is_found_by_comparing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path, Lfm2ForCausalLM, layer_types=["full_attention", "conv", "full_attention"])
    kinds = backend.LAYER_TYPES | {"conv"}
    monkeypatch.setattr(backend, "LAYER_TYPES", kinds)
    with pytest.raises(ConfigError, match="may keep state that is not in the KV cache"):
        make_engine(tmp_path, model_impl="transformers")


@pytest.mark.parametrize("window", [64, 200])
def test_a_window_that_is_in_the_mask_alone_is_refused_where_it_matters(
    tmp_path: Path, window: int
) -> None:
    """It exceeds the compared texts; with 128 positions a window of 200 hides nothing."""
    changes: dict[str, Any] = {
        "num_local_experts": 4,
        "sliding_window": window,
        "max_position_embeddings": 128,
    }
    save_model(tmp_path, PhimoeForCausalLM, **changes)
    if window < 128:
        with pytest.raises(ConfigError, match="layer 0 does not tell attention how wide"):
            make_engine(tmp_path)
    engine = make_engine(tmp_path, max_model_len=min(window, 128))
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    prompt = random_prompts(3)[2]
    (text,) = Driver(engine).run([Job(prompt)])
    assert_greedy(oracle, prompt, text)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Qwen3MoeForCausalLM", {}),
        (
            "DeepseekV3ForCausalLM",
            {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 12},
        ),
    ],
)
def test_experts_in_bfloat16_pass_the_comparison(
    tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    save_family(tmp_path, name, **changes)
    make_engine(tmp_path, dtype="bfloat16", model_impl="transformers")


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    save_family(tmp_path, "Olmo2ForCausalLM")
    change_config(tmp_path, num_hidden_layers=5)
    with pytest.raises(ConfigError, match=r"lacks tensors.*layers\.4"):
        make_engine(tmp_path, model_impl="transformers")


def test_weights_of_its_models_are_not_quantised(tmp_path: Path) -> None:
    save_family(tmp_path, "Phi3ForCausalLM")
    with pytest.raises(ConfigError, match="quantization: wint8 is for our own architectures"):
        make_engine(tmp_path, quantization="wint8")


def test_an_architecture_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, LlamaForCausalLM)
    change_config(tmp_path, architectures=["UnheardOf"], model_type="unheard-of")
    with pytest.raises(ConfigError, match="unheard-of"):
        make_engine(tmp_path)


def test_models_that_are_no_decoders_in_transformers_are_refused(tmp_path: Path) -> None:
    name = "ViTForImageClassification"
    save_model(tmp_path, LlamaForCausalLM)
    change_config(tmp_path, architectures=[name], model_type="vit")
    with pytest.raises(ConfigError, match=f"{name}: transformers does not load it as a decoder"):
        make_engine(tmp_path)


def test_model_impl_shoal_refuses_models_of_transformers(tmp_path: Path) -> None:
    save_family(tmp_path, "Phi3ForCausalLM")
    with pytest.raises(ConfigError, match="Phi3ForCausalLM is not supported; supported are "):
        make_engine(tmp_path, model_impl="shoal")


@pytest.mark.parametrize(
    ("family", "changes", "settings", "reason", "is_hinted"),
    [
        (LlamaForCausalLM, {"hidden_act": "gelu"}, {}, "hidden_act 'gelu'", True),
        (Olmo2ForCausalLM, {"rms_norm_eps": None}, {}, "`rms_norm_eps`", True),
        (LlamaForCausalLM, {"hidden_act": "gelu"}, {"quantization": "wint8"}, "hidden_act", False),
        (LlamaForCausalLM, {"hidden_act": "unheard-of"}, {}, "hidden_act", False),
        (LlamaForCausalLM, {"num_key_value_heads": 3}, {}, "no multiple", False),
        (
            LlamaForCausalLM,
            {"quantization_config": {"bits": 4}},
            {},
            "quant_method None is not",
            False,
        ),
        (LlamaForCausalLM, {"head_dim": 15}, {}, "head_dim 15 is odd", False),
        (LlamaForCausalLM, {"partial_rotary_factor": 0.5}, {}, "partial_rotary_factor", True),
    ],
)
def test_a_refusal_hints_at_transformers_if_that_computes_the_model(
    tmp_path: Path,
    family: type[PreTrainedModel],
    changes: dict[str, Any],
    settings: dict[str, Any],
    reason: str,
    is_hinted: bool,
) -> None:
    """If the hint is followed it works; without the hint it would not."""
    save_model(tmp_path, family)
    change_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=reason) as found:
        make_engine(tmp_path, **settings)
    assert ("--model-impl transformers" in str(found.value)) == is_hinted
    if is_hinted:
        make_engine(tmp_path, model_impl="transformers")
        return
    with pytest.raises(ConfigError):
        make_engine(tmp_path, model_impl="transformers", **settings)
