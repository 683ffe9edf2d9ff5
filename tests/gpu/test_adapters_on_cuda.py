"""Adapters on a GPU: the host's texts, in any batch, recorded or not, with drafts."""

from typing import Any

import pytest

from benchmarks.harness.engines import make_engine
from services.worker.adapters.sites import layer_shapes
from shared.model_folder import EMBEDDED_MODEL
from shared.wire.messages import SamplingParams
from tests.gpu.engines import drafting, make_cuda_engine, prompts
from tests.services.worker.adapters.made import DIGESTS, adapters_of, make_adapter, texts_of

pytestmark = pytest.mark.gpu
PARAMS = SamplingParams(seed=0, temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
STEPS: dict[str, dict[str, Any]] = {
    "graphs": {"cudagraph_mode": "full"},
    "eager": {"enforce_eager": True},
    "drafts": {"speculative_config": drafting(2)},
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_texts_in_float32_are_the_cpus(steps: dict[str, Any]) -> None:
    given: dict[str, Any] = {"enable_lora": True, "max_num_seqs": 8}
    host = make_engine(EMBEDDED_MODEL, speculative_config=drafting(0), **given)
    engine = make_cuda_engine(**({"speculative_config": drafting(0)} | given | steps))
    shapes = layer_shapes([site for site in adapters_of(host).sites if site.is_common])
    for number, digest in enumerate(DIGESTS[:3]):
        adapter = make_adapter(shapes, digest, 8 << number)
        for each in (host, engine):
            adapters_of(each).table.add(adapter)
    asked = prompts()
    digests = [[*DIGESTS[:3], ""][number % 4] for number in range(len(asked))]
    found = texts_of(engine, asked, digests, PARAMS)
    wanted = texts_of(host, asked, digests, PARAMS)
    assert [ids for ids, _ in found] == [ids for ids, _ in wanted]
    for number, (ids, _) in enumerate(found[:4]):
        own = slice(number, number + 1)
        assert texts_of(engine, asked[own], digests[own], PARAMS)[0][0] == ids
