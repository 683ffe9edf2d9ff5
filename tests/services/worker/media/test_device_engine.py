"""Images in the engine for GPUs, on a CPU: texts are the host engine's after hits, preemption and
drafts, in graphs and without."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.engines import make_engine
from benchmarks.harness.scheduled import Run
from shared.wire.kv_groups import most_blocks
from shared.wire.messages import SamplingParams
from tests.media.references import Reference
from tests.services.worker.device.test_device_groups import STEPS
from tests.services.worker.media import scheduled
from tests.services.worker.media.prompts import Chat, chat, each_family

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("_unwritten_memory"), each_family]

MAX_LEN = 192
COMMON: dict[str, Any] = {
    "max_model_len": MAX_LEN,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 6,
    "block_size": 4,
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}
SPECULATION: dict[str, dict[str, Any]] = {"none": {"method": "none"}, "ngram": NGRAM}


def crowd(oracle: Reference) -> list[Chat]:
    """Twice six chats: some share a picture at the beginning or elsewhere, two have no picture."""
    sizes = [(4, 5), (3, 2), (2, 7)]
    first, second, third = (oracle.picture(seed, *size) for seed, size in enumerate(sizes, 1))
    chats = [
        chat(oracle, first, " and ", second, "?"),
        chat(oracle, first, " and ", third, "?"),
        chat(oracle, "No picture at all."),
        chat(oracle, "Of ", second, third, second),
        chat(oracle, "Describe this. ", first),
        chat(oracle, "No picture here either, and so on."),
    ]
    return 2 * chats


def params_of(chats: list[Chat], max_tokens: int = 24) -> list[SamplingParams]:
    return [
        SamplingParams(seed=seed, temperature=seed % 3 / 2, max_tokens=max_tokens, ignore_eos=True)
        for seed in range(len(chats))
    ]


def few_blocks(host: Any) -> dict[str, Any]:
    return {"num_gpu_blocks_override": 3 * most_blocks(host.capacity, MAX_LEN) // 2}


def assert_texts_are_the_hosts(found: Run, wanted: Run, *, drafts: bool) -> None:
    assert found.texts == wanted.texts
    assert found.num_hits > 0
    assert found.num_readmitted > 0
    assert (found.num_accepted > 0) == drafts


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("method", SPECULATION)
def test_texts_with_few_blocks_are_the_host_engines_with_all(
    folder: Path, oracle: Reference, method: str, steps: str
) -> None:
    chats = crowd(oracle)
    common = {**COMMON, "speculative_config": SPECULATION[method]}
    host = make_engine(folder, **common)
    engine = make_engine(folder, "device", **few_blocks(host), **common, **STEPS[steps])
    found = scheduled.run(engine, chats, params_of(chats))
    wanted = scheduled.run(host, chats, params_of(chats))
    assert_texts_are_the_hosts(found, wanted, drafts=method != "none")
