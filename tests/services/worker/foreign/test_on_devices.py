"""transformers' architectures in the engine for GPUs, here on a CPU: transformers' own outputs, in
steps that can be recorded or are known not to be."""

import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from benchmarks.harness import scheduled
from benchmarks.harness.engines import make_engine
from services.worker.engine.device.recorders import CaptureError, CpuRecorder
from services.worker.foreign import backend
from shared.errors import ConfigError
from shared.wire.messages import SamplingParams
from tests.services.worker.checkpoints import assert_greedy, oracle_of, random_prompts
from tests.services.worker.driver import Driver, Job
from tests.services.worker.foreign_checkpoints import save_family

pytestmark = pytest.mark.usefixtures("_unwritten_memory")

# Softcaps and windows; sinks, windows and experts; small values and experts; small values, windows
# and experts; no option.
NAMES = [
    "Gemma2ForCausalLM",
    "GptOssForCausalLM",
    "DeepseekV3ForCausalLM",
    pytest.param("MiMoV2FlashForCausalLM", marks=pytest.mark.slow),
    pytest.param("Phi3ForCausalLM", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("name", NAMES)
def test_texts_match_transformers_in_chunks_and_recorded_steps(name: str, tmp_path: Path) -> None:
    save_family(tmp_path, name)
    oracle = oracle_of(tmp_path)
    prompts = [*random_prompts(4), random_prompts(3, seed=1)[2] * 3]
    engine = make_engine(tmp_path, "device", model_impl="transformers")
    assert len(engine._graphs) > 0
    texts = Driver(engine, [3, 7, 1, 5]).run([Job(prompt) for prompt in prompts])
    for prompt, text in zip(prompts, texts, strict=True):
        assert_greedy(oracle, prompt, text)


@pytest.mark.parametrize("method", [pytest.param("none", marks=pytest.mark.slow), "ngram"])
def test_texts_match_the_host_engine_while_steps_are_in_flight(method: str, tmp_path: Path) -> None:
    save_family(tmp_path, "GptOssForCausalLM")
    speculation: dict[str, Any] = {"method": method, "adaptive": False}
    prompts = [prompt * 2 for prompt in random_prompts(5)]
    params = SamplingParams(seed=1, temperature=0.0, max_tokens=12, ignore_eos=True)
    found, wanted = (
        scheduled.run(
            make_engine(
                *(tmp_path, kernels),
                model_impl="transformers",
                speculative_config=speculation,
                max_num_seqs=4,
            ),
            *(prompts, params),
            caches_prefixes=True,
        )
        for kernels in ("device", "torch")
    )
    assert found.texts == wanted.texts
    assert found.verified == wanted.verified


def test_a_capture_that_breaks_off_names_the_setting_that_does_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(recorder: CpuRecorder, run: Any) -> None:
        raise CaptureError("operation not permitted when stream is capturing")

    monkeypatch.setattr(CpuRecorder, "__call__", broken)
    save_family(tmp_path, "Phi3ForCausalLM")
    with pytest.raises(ConfigError, match=r"^enforce-eager: .* when stream is capturing; set it"):
        make_engine(tmp_path, "device")
    assert len(make_engine(tmp_path, "device", enforce_eager=True)._graphs) == 0


def test_a_model_that_looks_at_values_is_run_step_by_step_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers' plainest experts test which of them have tokens."""
    load = backend._pretrained

    def with_plain_experts(*arguments: Any) -> PreTrainedModel:
        model = load(*arguments)
        model.set_experts_implementation("eager")
        return model

    monkeypatch.setattr(backend, "_pretrained", with_plain_experts)
    save_family(tmp_path, "GptOssForCausalLM")
    with caplog.at_level(logging.WARNING):
        engine = make_engine(tmp_path, "device", model_impl="transformers")
    assert "CUDA graphs: none, steps run eagerly: aten._local_scalar_dense" in caplog.text
    assert len(engine._graphs) == 0
    oracle = oracle_of(tmp_path)
    prompts = random_prompts(3)
    texts = Driver(engine, [7]).run([Job(prompt) for prompt in prompts])
    for prompt, text in zip(prompts, texts, strict=True):
        assert_greedy(oracle, prompt, text)
