"""Settings of vLLM, SGLang and FastDeploy, as flags, variables and keys of a file."""

import json
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ConfigError
from shared.settings.gateway import GatewayConfig
from shared.settings.known import NAMES
from shared.settings.load import load_given, load_settings
from shared.settings.other_servers.tables import FOREIGN, PROTECTING, SAME, SHORT, SWITCHED
from shared.settings.other_servers.values import CACHE_SYNONYMS
from shared.settings.serve import ServeConfig

KNOWN = ServeConfig.model_fields.keys()


def settings_of(*flags: str) -> dict[str, Any]:
    config = load_settings(ServeConfig, [*flags], "shoal serve")
    return {name: getattr(config, name) for name in config.model_fields_set}


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ("-tp 2", {"tensor_parallel_size": 2}),
        ("--tp-size=2", {"tensor_parallel_size": 2}),
        ("-dp 2", {"workers": 2}),
        ("--max_num_seqs 4", {"max_num_seqs": 4}),
        ("--context-length 32k", {"max_model_len": 32_000}),
        ("--max-num-batched-tokens 1K", {"max_num_batched_tokens": 1024}),
        ("--max-model-len auto", {"max_model_len": None}),
        ("-c 0", {"max_model_len": None}),
        ("--disable-radix-cache", {"enable_prefix_caching": False}),
        ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("--served-model-name a b --port 1", {"served_model_name": ["a", "b"], "port": 1}),
        ("--cuda-graph-bs 1 2 4", {"cudagraph_capture_sizes": [1, 2, 4]}),
        ("-m a.gguf -c 4096 -np 4", {"model": "a.gguf", "max_model_len": 4096, "max_num_seqs": 4}),
        (
            "-t 2 --embedding -a b",
            {"num_threads": 2, "runner": "pooling", "served_model_name": ["b"]},
        ),
        ("--dtype half", {"dtype": "float16"}),
        ("--gpu_memory_utilization 0.5", {"gpu_memory_utilization": 0.5}),
        ("--kv-cache-dtype bfloat16", {"kv_cache_dtype": "none"}),
        ("--kv-cache-dtype fp8_ds_mla", {"kv_cache_dtype": "fp8"}),
        ("--quantization w4a8", {"quantization": "wint4"}),
        ("--quantization wfp8afp8", {"quantization": "fp8"}),
        ("--quantization fp8_per_tensor", {"quantization": "fp8"}),
        ("--generation-config vllm", {"generation_config": "none"}),
    ],
)
def test_a_foreign_flag_is_ours(flags: str, settings: dict[str, Any]):
    assert settings_of(*flags.split()) == settings


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--enable-auto-tool-choice", "--enable-auto-tool-choice has no effect: tools are on"),
        ("--swap-space 4", "--swap-space has no effect: kv-offloading-size alone keeps KV blocks"),
        ("--no-async-scheduling", "--no-async-scheduling has no effect: steps are always"),
        ("--async-scheduling=false", "--async-scheduling has no effect: steps are always"),
        ("--lora-dtype auto x", "--lora-dtype has no effect: not a part of adapters here"),
        ("-ngl 99", "-ngl has no effect: a GPU computes all layers; see device and cpu-offload-gb"),
        ("--no-mmap", "--no-mmap has no effect: weights on a CPU are copied"),
        ("-O3", "-O3 has no effect: kernels are not a choice"),
        ("-cc.use_inductor=True", "-cc.use_inductor has no effect: kernels are not a choice"),
        ("--seed -1", "--seed has no effect: a request's seed decides"),
        ("--load-format runai_streamer", "runai_streamer has no effect: safetensors are read"),
        ("--quantization modelopt", "modelopt has no effect: a quantized checkpoint says so"),
        ("--enable-mamba-cache-stochastic-rounding", "--enable-mamba-cache"),
        ("--mamba-cache-philox-rounds 5", "--mamba-cache-philox-rounds has no effect: windows"),
        ("--dcp-comm-backend a2a", "--dcp-comm-backend has no effect: a split of one"),
        ("--attention-backend FLASHINFER", "--attention-backend has no effect: kernels are not"),
    ],
)
def test_a_foreign_flag_without_effect_is_one_line_and_nothing_else(caplog, flags: str, text: str):
    assert settings_of("--port", "1", *flags.split(), "--host", "a")["host"] == "a"
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(text)


def test_an_object_may_be_given_key_by_key():
    flags = [
        *("--speculative-config.method", "mtp", "--port", "1"),
        "--speculative-config.num_speculative_tokens=2",
    ]
    translated = NAMES.flags(flags, KNOWN)
    assert translated[:3] == ["--port", "1", "--speculative-config"]
    assert json.loads(translated[3]) == {"method": "mtp", "num_speculative_tokens": 2}


@pytest.mark.parametrize("method", ["mtp", "qwen3_next_mtp", "ernie_mtp"])
def test_an_mtp_head_has_the_name_of_its_family(method: str):
    given = json.dumps({"method": method, "num_speculative_tokens": 1, "model": "a/b"})
    found = settings_of("--speculative-config", given)["speculative_config"]
    assert (found.method, found.num_speculative_tokens) == ("mtp", 1)


@pytest.mark.parametrize("method", [{"method": "eagle"}, {}])
def test_a_model_is_served_without_its_draft_model(caplog, method: dict[str, str]):
    given = json.dumps({**method, "num_speculative_tokens": 1, "model": "a/b"})
    assert settings_of("--speculative-config", given)["speculative_config"].method == "none"
    assert caplog.messages == [
        "speculative-config has no effect: of draft models only eagle3 and assistants of Gemma 4"
        " work"
    ]


@pytest.mark.parametrize("method", [{"method": "eagle3"}, {}])
def test_a_draft_model_of_eagle3_is_known_by_its_method_or_its_name(method: dict[str, str]):
    given = json.dumps({**method, "model": "a/Model-EAGLE3", "draft_tensor_parallel_size": 1})
    found = settings_of("--speculative-config", given)["speculative_config"]
    assert (found.method, found.model) == ("eagle3", "a/Model-EAGLE3")


@pytest.mark.parametrize("method", [{"method": "draft_model"}, {"method": "mtp"}, {}])
def test_an_assistant_of_gemma_4_is_known_by_its_name(method: dict[str, str]):
    given = json.dumps({**method, "model": "google/gemma-4-31B-it-assistant"})
    found = settings_of("--speculative-config", given)["speculative_config"]
    assert (found.method, found.model) == ("mtp", "google/gemma-4-31B-it-assistant")


def test_a_file_follows_the_same_rule(tmp_path: Path, caplog):
    path = tmp_path / "config.yaml"
    path.write_text(
        "async-scheduling: true\nno-enable-prefix-caching: true\ndisable_log_requests: true\n"
        "disable-radix-cache: false\ndata-parallel-size: 2\nswap_space: 20\n"
    )
    found = settings_of("--config", str(path))
    del found["config"]
    assert found == {"enable_prefix_caching": False, "log_requests": False, "workers": 2}
    assert len(caplog.messages) == 4


@pytest.mark.parametrize("name", PROTECTING)
def test_a_setting_that_protects_is_refused(name: str):
    with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')}: "):
        settings_of(f"--{name.replace('_', '-')}", "secret")


def test_a_key_of_vllm_in_the_environment_is_refused_and_not_quoted(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with pytest.raises(ConfigError, match=r"^VLLM_API_KEY has no effect here: use SHOAL_API_KEY$"):
        load_settings(GatewayConfig, [], "shoal gateway")


def test_each_foreign_name_has_one_meaning_and_ours_come_first():
    ours = {*SAME.values(), *(name for name, _ in SWITCHED.values())}
    assert ours <= KNOWN
    assert not FOREIGN.keys() & KNOWN
    assert {*SHORT.values()} <= FOREIGN.keys() | KNOWN


@pytest.mark.parametrize("flags", ["--swap-spaec 4", "-x 3", "--no-such", "--no-swap-space 3"])
def test_a_flag_that_nobody_knows_is_an_error(flags: str):
    with pytest.raises(ConfigError, match="unrecognized arguments"):
        settings_of(*flags.split())


def test_python_values_follow_the_same_rule(caplog):
    given = {"tp": 2, "disable_radix_cache": True, "swap_space": 4, "max_model_len": None}
    config = load_given(ServeConfig, given, "LLM")
    assert config.model_fields_set == {"tensor_parallel_size", "enable_prefix_caching"}
    assert "LLM: swap-space has no effect: kv-offloading-size" in caplog.text


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"max_modell_len": 1},
            "LLM: max-modell-len is not a setting; did you mean max-model-len?",
        ),
        ({"max_num_seqs": 0}, "max-num-seqs: 0: must be greater than 0"),
        ({"config": "/nowhere"}, "config: no such file: /nowhere"),
    ],
)
def test_wrong_python_values_are_named(given: dict[str, Any], text: str):
    with pytest.raises(ConfigError, match=text.replace("?", r"\?")):
        load_given(ServeConfig, given, "LLM")


@pytest.mark.parametrize(("name", "ours"), CACHE_SYNONYMS.items())
def test_the_types_of_a_cache_have_other_names(name: str, ours: str) -> None:
    assert settings_of("--kv-cache-dtype", name) == {"kv_cache_dtype": ours}
