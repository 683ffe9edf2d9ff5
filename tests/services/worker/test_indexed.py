"""DeepSeek-V3.2 and GLM-5: chosen keys, by native code and torch's operators, and in engines."""

import json
import re
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.harness import scheduled
from benchmarks.harness.engines import make_engine
from benchmarks.harness.oracle import true_logits
from kernels.cpu.library import load_library, variants
from kernels.cpu.packing import NativeLibrary
from services.worker.backends.native import NativeLM
from services.worker.backends.torch_lm import DEVICE, TorchLM
from services.worker.config.model_config import ModelConfig
from services.worker.indexed.deepseek_v32 import check_device
from services.worker.indexed.indexer import Indexer
from services.worker.layers.ops import NotSupported
from services.worker.layers.parallel import Parallel
from services.worker.layers.stage import Stage
from services.worker.models.decoder import DecoderLM
from services.worker.models.registry import find_model, read_model_config
from services.worker.startup.model_shape import shape_of
from services.worker.weights.load import build_model
from shared.errors import ConfigError
from shared.wire.messages import SamplingParams
from tests.services.worker.builds import each_variant
from tests.services.worker.checkpoints import (
    assert_greedy,
    change_config,
    oracle_of,
    random_prompts,
    save_model,
)
from tests.services.worker.forward import our_logits
from tests.services.worker.speculation import iter_positions
from tests.services.worker.stored_codes import LAYOUTS, save_quantized
from tests.services.worker.test_families import CASES, DENSE
from tests.services.worker.test_latents import (
    GREEDY,
    PROMPTS,
    texts_in_few_blocks,
    with_values,
)
from tests.services.worker.test_mtp_families import BLOCK, Checkpoint, Family, speculation
from tests.services.worker.test_native import (
    LATENT,
    MAX_LEN,
    VOCAB_SIZE,
    YARN,
    furthest,
    make_model,
    run,
)
from tests.services.worker.test_native import random_prompts as long_prompts

pytestmark = pytest.mark.usefixtures("_unwritten_memory")

CPU, META = torch.device("cpu"), torch.device("meta")
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
V32, GLM5 = "deepseek v3.2, yarn", "glm 5, shared choices, biases"
SIZES: dict[str, Any] = {
    **LATENT,
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 208,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "index_n_heads": 32,
    "index_head_dim": 48,
}
DEEPSEEK = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "rope_scaling": {**YARN, "original_max_position_embeddings": 64},
}
GLM = {"architectures": ["GlmMoeDsaForCausalLM"], "index_topk_pattern": "FS"}
FAMILIES: dict[str, dict[str, Any]] = {"deepseek": DEEPSEEK, "glm": GLM}
families = pytest.mark.parametrize("family", FAMILIES)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def config_of(family: str, topk: int, **changes: Any) -> ModelConfig:
    values = SIZES | FAMILIES[family] | {"index_topk": topk} | changes
    return find_model(values["architectures"]).Config(**values)


def native_of(model: DecoderLM, dtype: torch.dtype, variant: str) -> NativeLM:
    return NativeLM(model, 16, NativeLibrary(load_library(variant), dtype, 2))


@each_variant
@pytest.mark.parametrize(
    ("family", "first_key"),
    [("deepseek", None), ("glm", 290), slow("deepseek", 290), slow("glm", None)],
)
def test_logits_of_native_code_match_torch(
    family: str, variant: str, first_key: int | None
) -> None:
    """More chosen keys than native code attends to at once, also with hidden ones."""
    config, prompts = config_of(family, 300), long_prompts(1, 17, 400, 620)
    model = TorchLM(make_model(config, FLOAT32))
    expected = run(model, config, FLOAT32, prompts, 250, first_key=first_key)
    native = native_of(make_model(config, FLOAT32), FLOAT32, variant)
    found = run(native, config, FLOAT32, prompts, 250, first_key=first_key)
    assert furthest(found, expected) < 1e-4
    few = config_of(family, 100)
    native = native_of(make_model(few, FLOAT32), FLOAT32, variant)
    assert furthest(run(native, few, FLOAT32, prompts, 250, first_key=first_key), found) > 0.1


@each_variant
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("deepseek", BFLOAT16),
        ("glm", FLOAT32),
        slow("deepseek", FLOAT32),
        slow("glm", BFLOAT16),
    ],
    ids=str,
)
def test_a_tokens_logits_are_the_same_bits_whatever_shares_its_step(
    family: str, variant: str, dtype: torch.dtype
) -> None:
    config, prompts = config_of(family, 40), long_prompts(330, 35, 1, 9, 70, 41, 2, 64, 300)
    model = native_of(make_model(config, dtype), dtype, variant)
    expected = run(model, config, dtype, prompts, 1000)
    for chunk_size in (1, 7, 64):
        found = run(model, config, dtype, prompts, chunk_size)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True)), chunk_size
    (alone,) = run(model, config, dtype, prompts[:1], 13)
    assert torch.equal(alone, expected[0])


@each_variant
@families
def test_with_few_keys_the_bits_match_dense_attention(family: str, variant: str) -> None:
    """Where a token sees 300 keys at most, and not behind them."""
    config, prompts = config_of(family, 300), long_prompts(1, 40, 400)
    model = make_model(config, FLOAT32)
    dense = dense_config(family)
    whole = make_model(dense, FLOAT32)
    weights = {name: each for name, each in model.state_dict().items() if ".indexer." not in name}
    whole.load_state_dict(weights)
    found = run(native_of(model, FLOAT32, variant), config, FLOAT32, prompts, 64)
    expected = run(native_of(whole, FLOAT32, variant), dense, FLOAT32, prompts, 64)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one[:300], other[:300])
    assert (found[2][300:] - expected[2][300:]).abs().max() > 0.01


def dense_config(family: str) -> ModelConfig:
    """Of a DeepSeek-V3 with the same weights but for the indexers."""
    values = SIZES | FAMILIES[family] | {"architectures": ["DeepseekV3ForCausalLM"]}
    make: Any = find_model(["DeepseekV3ForCausalLM"]).Config
    known = {name: values[name] for name in values.keys() & {*make.__struct_fields__}}
    return cast(ModelConfig, make(**known))


@each_variant
def test_of_keys_with_equal_scores_the_first_are_chosen(variant: str) -> None:
    """Without weights or without keys, all scores are 0."""
    config, prompts = config_of("deepseek", 40), long_prompts(120, 60)

    def with_ties() -> DecoderLM:
        model = make_model(config, FLOAT32)
        first, second = (each for each in model.modules() if isinstance(each, Indexer))
        first.weights_proj.weight.values.zero_()
        second.k_norm.weight.data.zero_()
        second.k_norm.bias.data.zero_()
        return model

    expected = run(TorchLM(with_ties()), config, FLOAT32, prompts, 50)
    found = run(native_of(with_ties(), FLOAT32, variant), config, FLOAT32, prompts, 50)
    assert furthest(found, expected) < 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index_n_heads": 24}, "index_n_heads 24 is no multiple of 16"),
        ({"index_head_dim": 264}, "index_head_dim 264 is no multiple of 16"),
        ({"index_n_heads": 144}, "index_n_heads 144 is above 128"),
        ({"index_head_dim": 272}, "index_head_dim 272 is above 256"),
    ],
)
def test_sizes_that_native_code_lacks_are_refused_by_name(
    change: dict[str, int], message: str
) -> None:
    model = make_model(config_of("deepseek", 40, **change), FLOAT32)
    with pytest.raises(NotSupported, match=f"indexer of layer 0: {message}"):
        native_of(model, FLOAT32, variants()[0])
    TorchLM(model)


def test_a_device_refuses_the_choice_of_keys() -> None:
    model = make_model(config_of("glm", 40), FLOAT32)
    with pytest.raises(NotSupported, match=r"layers\.0\.self_attn: attention's options index_topk"):
        TorchLM(model, DEVICE)
    check_device(CPU)
    with pytest.raises(ConfigError, match="device: cuda:0: indexed attention"):
        check_device(torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("deepseek", {"index_topk": 0}, "`int` >= 1"),
        ("deepseek", {"q_lora_rank": None}, "q_lora_rank null is not supported"),
        ("deepseek", {"index_head_dim": 8}, "index_head_dim 8 is below qk_rope_head_dim 16"),
        ("deepseek", {"mlp_layer_types": ["dense"]}, "mlp_layer_types has 1, not 3"),
        ("glm", {"indexer_types": ["full"] * 3}, "indexer_types has 3, not 4"),
        ("glm", {"indexer_types": ["full", "none"] * 2}, "indexer_types none are not supported"),
        ("glm", {"indexer_types": ["shared"] * 4}, "indexer_types: the first layer has no earlier"),
    ],
)
def test_configs_that_cannot_be_are_refused_by_name(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    kind, given = CASES[{"deepseek": V32, "glm": GLM5}[family]]
    assert kind.config_class is not None
    kind.config_class(**given).save_pretrained(tmp_path)
    num_layers = 3 if family == "deepseek" else 4
    change_config(tmp_path, architectures=[kind.__name__], num_hidden_layers=num_layers)
    path = tmp_path / "config.json"
    given = json.loads(path.read_text())
    path.write_text(json.dumps(given | {"mlp_layer_types": ["dense"] * num_layers}))
    read_model_config(tmp_path)
    path.write_text(json.dumps(given | {"mlp_layer_types": None} | changes))
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_model_config(tmp_path)


def test_a_stage_that_would_begin_with_a_shared_choice_is_refused() -> None:
    config = config_of("glm", 40, num_hidden_layers=4, index_topk_pattern="FSFS")
    model = find_model(config.architectures)
    with META:
        model(config, Parallel(0, 1, stage=Stage(1, 2)))
        with pytest.raises(ConfigError, match="stage 1 of 4 would begin with layer 1"):
            model(config, Parallel(0, 1, stage=Stage(1, 4)))


def test_a_token_of_glm_5_takes_so_many_bytes() -> None:
    """A latent of 576 numbers in each layer, or of 512 codes and 64 numbers, and a key of 128
    numbers where keys are chosen."""
    make: Any = find_model(["GlmMoeDsaForCausalLM"]).Config
    config = make(
        **SIZES
        | GLM
        | {
            "num_hidden_layers": 4,
            "first_k_dense_replace": 4,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "index_head_dim": 128,
            "index_topk_pattern": None,
            "index_topk_freq": 2,
            "index_skip_topk_offset": 2,
        }
    )
    model = build_model(config, BFLOAT16, META)
    assert [config.has_indexer(layer) for layer in range(5)] == [True, True, False, True, True]
    shape = shape_of(model, BFLOAT16, drafts=False)
    sizes = [layout.num_bytes for layout in shape.kv_layouts]
    assert sorted(sizes) == [256] * 3 + [1152] * 4
    shape = shape_of(model, BFLOAT16, drafts=False, codes=torch.uint8)
    sizes = [layout.num_bytes for layout in shape.kv_layouts]
    assert sorted(sizes) == [256] * 3 + [656] * 4


@pytest.mark.parametrize(
    ("case", "kernels"), [(V32, "native"), slow(GLM5, "torch"), (GLM5, "native")]
)
def test_texts_with_cached_beginnings_preemption_and_drafts_match_transformers(
    tmp_path: Path, case: str, kernels: str
) -> None:
    """Prompts with a common beginning, in chunks, in blocks for a few of them."""
    family, changes = CASES[case]
    save_model(tmp_path, family, **changes)
    oracle = oracle_of(tmp_path)
    for prompt, text in zip(PROMPTS, texts_in_few_blocks(tmp_path, kernels), strict=True):
        assert_greedy(oracle, prompt, text)


@pytest.mark.parametrize(
    ("case", "kernels", "name"),
    [(V32, "native", "fp8"), slow(GLM5, "native", "int8"), slow(GLM5, "torch", "fp8")],
)
def test_texts_of_quantized_latents_match_each_prompt_alone(
    tmp_path: Path, case: str, kernels: str, name: str
) -> None:
    """Index keys are numbers."""
    family, changes = CASES[case]
    save_model(tmp_path, family, **changes)
    engine = make_engine(tmp_path, kernels, kv_cache_dtype=name)
    alone = [scheduled.run(engine, [prompt], GREEDY).texts[0] for prompt in PROMPTS]
    assert texts_in_few_blocks(tmp_path, kernels, kv_cache_dtype=name) == alone


def test_quantized_weights_of_the_indexer_are_read(tmp_path: Path) -> None:
    """In blocks with scales, as published."""
    dense, quantized = tmp_path / "dense", tmp_path / "quantized"
    family, changes = CASES[V32]
    save_model(dense, family, **changes | DENSE | {"index_n_heads": 32})
    values = save_quantized(dense, quantized, LAYOUTS["fp8"], ("indexer.wq_b", "indexer.wk"))
    oracle = with_values(dense, values)
    prompts = random_prompts(6)
    for kernels in ("native", "torch"):
        logits = our_logits(quantized, prompts, FLOAT32, kernels)
        for prompt, found in zip(prompts, logits, strict=True):
            np.testing.assert_allclose(found, true_logits(oracle, prompt), atol=1e-4, rtol=1e-4)


class WithIndex(Checkpoint):
    """The transformers' layers need a mask, and those of GLM-5 return the choice as well."""

    def _run(self, layer: Any, x: Tensor) -> Tensor:
        places = torch.arange(len(x))[None]
        rotation = self._model.model.rotary_emb(x[None], places)
        mask = torch.full((len(x), len(x)), torch.finfo().min).triu(1)[None, None]
        out = layer(x[None], position_embeddings=rotation, attention_mask=mask, position_ids=places)
        return (out[0] if isinstance(out, tuple) else out)[0]


@pytest.mark.parametrize(
    ("case", "kernels"), [slow(V32, "torch"), (V32, "native"), slow(GLM5, "native")]
)
def test_drafts_of_the_head_match_plain_torch(tmp_path: Path, case: str, kernels: str) -> None:
    """And texts are those without drafts."""
    torch.manual_seed(0)
    kind, changes = CASES[case]
    if case == GLM5:
        changes = changes | {"indexer_types": ["full"] * 4}
    names = {"token_norm": "enorm", "hidden_norm": "hnorm", "proj": "eh_proj"}
    parts: dict[str, Any] = {part: f"{BLOCK}{name}" for part, name in names.items()}
    family = Family(kind, changes, **parts, final_norm=f"{BLOCK}shared_head.norm", block=BLOCK)
    checkpoint = WithIndex(family, tmp_path)
    prompts = random_prompts(6)
    params = SamplingParams(seed=0, temperature=0.0, max_tokens=10, logprobs=0, draft_logprobs=True)
    engine = make_engine(tmp_path, kernels, speculative_config=speculation("mtp"))
    done = scheduled.run(engine, prompts, params)
    num_seen = 0
    for index, prompt in enumerate(prompts):
        positions = iter_positions(done.verified[index])
        for (_, part), position in zip(done.drafts[index], positions, strict=True):
            ids, drafts = prompt + done.texts[index][:position], part.ids.tolist()
            logits = checkpoint.draft_logits(ids, drafts[:-1])
            assert (logits.amax(1) - logits[range(len(drafts)), drafts]).max() < 1e-3
            num_seen += len(drafts)
    assert num_seen > 60
    plain = make_engine(tmp_path, kernels, speculative_config=speculation("none"))
    assert scheduled.run(plain, prompts, params).texts == done.texts
