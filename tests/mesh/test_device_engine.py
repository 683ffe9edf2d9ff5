"""The engine for GPUs in a mesh of real processes, on a CPU: its answers equal the other
engine's."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from benchmarks.harness.checked_load import TIMEOUT
from benchmarks.harness.fleet import running_fleet
from shared.model_folder import EMBEDDED_MODEL
from tests.mesh.forks import fork
from tests.services.worker.foreign_checkpoints import save_family

SETTINGS = {
    "DTYPE": "float32",
    "MAX_MODEL_LEN": "512",
    "MAX_NUM_SEQS": "16",
    "MAX_NUM_BATCHED_TOKENS": "96",
    "SPECULATIVE_CONFIG": '{"num_speculative_tokens": 2, "adaptive": false}',
}
PROMPTS = (
    "import os\nimport sys\n\n\nclass Server:\n    def __init__(self, ",
    "def main():\n    parser = argparse.",
    "if __name__ == '__main__':\n",
    "x = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3, 4, 5, 6",
)
ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9, "n": 2},
    {"temperature": 0.7, "frequency_penalty": 0.5, "logit_bias": {"262": 2}},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.02, "top_n_sigma": 3, "max_tokens": 90},
    {"temperature": 0, "logprobs": 3, "prompt_logprobs": 1, "max_tokens": 20},
)


def bodies() -> list[dict[str, Any]]:
    return [
        {"prompt": prompt * (1 + 2 * index), "max_tokens": 40, "seed": index} | asked
        for index, prompt in enumerate(PROMPTS)
        for asked in ASKED
    ]


async def answers(
    directory: Path, worker: str, asked: list[dict[str, Any]], **settings: str
) -> list[dict[str, Any]]:
    """Answers to all requests, sent at once, and once more with cached prompts."""
    directory.mkdir()
    async with running_fleet(directory, SETTINGS | settings, fork) as fleet:
        for kind in ("scheduler", "tokenizer"):
            await fleet.start(kind)
        await fleet.start("worker", worker)
        gateway = await fleet.start("gateway")
        await fleet.until_ready()
        async with aiohttp.ClientSession(f"{gateway.url}/v1/", timeout=TIMEOUT) as session:
            first = await asyncio.gather(*(answer(session, body) for body in asked))
            again = await asyncio.gather(*(answer(session, body) for body in asked))
    return first + again


async def answer(session: aiohttp.ClientSession, body: dict[str, Any]) -> dict[str, Any]:
    async with session.post("completions", json=body) as response:
        reply: dict[str, Any] = await response.json()
        assert response.status == 200, reply
        return reply


async def test_answers_match_the_engine_of_cpus(tmp_path: Path) -> None:
    """Each prompt and each kind of request at least once, and short texts."""
    await compare(tmp_path, [body | {"max_tokens": 12} for body in bodies()[::4]])


@pytest.mark.slow
async def test_drafts_of_some_tokens_leave_answers_as_they_are(tmp_path: Path) -> None:
    """Drafts from a file's tokens, in a worker that logs it."""
    (tmp_path / "ids.json").write_text(json.dumps([*range(1000, 3000), *range(1000)]))
    limit = {"draft_vocab_file": str(tmp_path / "ids.json"), "draft_vocab_size": 2500}
    speculation = json.dumps({"num_speculative_tokens": 2, "adaptive": False, **limit})
    asked = bodies()[::7]
    found = await answers(tmp_path / "some", "", asked, SPECULATIVE_CONFIG=speculation)
    wanted = await answers(tmp_path / "none", "", asked, SPECULATIVE_CONFIG='{"method": "none"}')
    assert [texts(each) for each in found] == [texts(each) for each in wanted]
    assert sum(num_accepted(each) for each in found) > 0
    logs = [file.read_text() for file in (tmp_path / "some").rglob("*.log")]
    assert any("drafts: 2500 of 8192 tokens" in log for log in logs)


@pytest.mark.slow
async def test_answers_with_layers_in_the_hosts_memory_match_runs_without(tmp_path: Path) -> None:
    """All layers of the trunk, quantized, in a worker that logs it."""
    asked, codes = bodies()[::7], {"QUANTIZATION": "wint4"}
    offloading = codes | {"CPU_OFFLOAD_GB": "1"}
    found = await answers(tmp_path / "host", "tests.mesh.device_worker", asked, **offloading)
    wanted = await answers(tmp_path / "device", "tests.mesh.device_worker", asked, **codes)
    assert [texts(each) for each in found] == [texts(each) for each in wanted]
    assert sum(num_accepted(each) for each in found) > 0
    logs = [file.read_text() for file in (tmp_path / "host").rglob("*.log")]
    assert any("cpu-offload-gb: 6 of 6 layers" in log for log in logs)


@pytest.mark.slow
async def test_answers_with_experts_in_the_hosts_memory_match_runs_without(tmp_path: Path) -> None:
    """A random DeepSeek-V3: a layer without experts, three with, and latent attention."""
    model = tmp_path / "model"
    save_family(model, "DeepseekV3ForCausalLM", vocab_size=8192, max_position_embeddings=512)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_MODEL / name, model / name)
    settings = {"MODEL": str(model), "SPECULATIVE_CONFIG": '{"method": "ngram"}'}
    asked, worker = bodies()[::5], "tests.mesh.device_worker"
    wanted = await answers(tmp_path / "device", worker, asked, **settings)
    found = await answers(tmp_path / "host", worker, asked, **settings, CPU_OFFLOAD_GB="1")
    assert [texts(each) for each in found] == [texts(each) for each in wanted]
    logs = [file.read_text() for file in (tmp_path / "host").rglob("*.log")]
    assert any("cpu-offload-gb: 4 of 4 layers" in log for log in logs)


@pytest.mark.slow
async def test_all_answers_match_the_engine_of_cpus(tmp_path: Path) -> None:
    await compare(tmp_path, bodies())


async def compare(directory: Path, asked: list[dict[str, Any]]) -> None:
    found = await answers(directory / "device", "tests.mesh.device_worker", asked)
    wanted = await answers(directory / "host", "", asked)
    assert [texts(each) for each in found] == [texts(each) for each in wanted]
    assert sum(num_accepted(each) for each in found) > 0


def texts(reply: dict[str, Any]) -> list[tuple[str, str]]:
    return [(choice["text"], choice["finish_reason"]) for choice in reply["choices"]]


def num_accepted(reply: dict[str, Any]) -> int:
    details: dict[str, int] = reply["usage"]["completion_tokens_details"]
    return details["accepted_prediction_tokens"]
