"""An MTP head with a restricted draft vocabulary: its drafts, outputs, and refusals."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.harness import scheduled
from benchmarks.harness.engines import make_engine
from kernels.sample.reference import sample_row
from services.worker.backends.torch_lm import TorchLM
from services.worker.layers.parallel import ALONE
from services.worker.layers.weights import Dense
from services.worker.models.registry import read_model_config
from services.worker.speculation.draft_vocab import limit_drafts
from services.worker.startup.plan_memory import weight_bytes
from services.worker.weights.load import load_model
from shared.errors import ConfigError
from shared.model_folder import EMBEDDED_MODEL
from shared.settings.speculative import SpeculativeConfig
from shared.wire.messages import SamplingParams
from tests.services.worker.checkpoints import VOCAB_SIZE, random_prompts, save_mimo
from tests.services.worker.plain_mtp import PlainMtp
from tests.services.worker.speculation import iter_positions, params_of, plain, prompts

NUM_TOKENS = 1500
HIGHEST = list(range(8191, 4000, -1))  # the first of them have no low ids


def engine_of(kernels: str, **speculation: Any) -> Any:
    config = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False} | speculation
    settings = {"max_model_len": 160, "max_num_seqs": 32}
    return make_engine(EMBEDDED_MODEL, kernels, speculative_config=config, **settings)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "ids.json"
    path.write_text(json.dumps(HIGHEST))
    return path


@pytest.mark.parametrize(
    ("kernels", "temperature"),
    [
        ("native", 1.0),
        pytest.param("native", 0.0, marks=pytest.mark.slow),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in product(("torch", "device"), (0.0, 1.0))
        ),
    ],
)
def test_drafts_are_the_likeliest_of_the_vocabulary_and_texts_unchanged(
    kernels: str, temperature: float
) -> None:
    """At a temperature, sampled with the random bits of the output's tokens."""
    head, some = PlainMtp(EMBEDDED_MODEL), [*prompts()[1:3], prompts()[12]]
    params = params_of(temperature, len(some), logprobs=0, draft_logprobs=True, top_k=50)
    found = scheduled.run(engine_of(kernels, draft_vocab_size=NUM_TOKENS), some, params)
    assert found.texts == scheduled.run(plain("native"), some, params).texts
    assert found.num_accepted > 0
    num_seen = 0
    for index, prompt in enumerate(some):
        positions = iter_positions(found.verified[index])
        for (_, part), position in list(zip(found.drafts[index], positions, strict=True))[:5]:
            ids, drafts = prompt + found.texts[index][:position], part.ids.tolist()
            logits = head.draft_logits(ids, drafts[:-1]).clone()
            logits[:, NUM_TOKENS:] = -torch.inf
            seed, at = params[index].seed, len(ids)
            wanted = [
                sample_row(row, temperature, 50, 1.0, 0.0, 0.0, seed, at + i, 0)
                for i, row in enumerate(logits.numpy())
            ]
            assert drafts == wanted
            logprobs = torch.log_softmax(logits, -1)[range(len(drafts)), drafts]
            np.testing.assert_allclose(part.values, logprobs, atol=1e-3)
            num_seen += 1
    assert num_seen > 9


@pytest.mark.parametrize(
    ("size", "num"),
    [pytest.param(None, len(HIGHEST), marks=pytest.mark.slow), (300, 300)],
)
def test_a_file_ranks_the_tokens(file: Path, size: int | None, num: int) -> None:
    engine = engine_of("native", draft_vocab_file=str(file), draft_vocab_size=size)
    params = params_of(6.0, 6, logprobs=0, draft_logprobs=True)
    found = scheduled.run(engine, prompts()[:6], params)
    assert found.texts == scheduled.run(plain("native"), prompts()[:6], params).texts
    drafted = {token for parts in found.drafts for _, part in parts for token in part.ids.tolist()}
    assert len(drafted) > 20
    assert drafted <= set(HIGHEST[:num])


@pytest.mark.parametrize("kernels", ["native", "device"])
@pytest.mark.parametrize("form", ["wint8", "wint4", "fp8_block"])
def test_a_head_in_codes_gives_its_rows_too(tmp_path: Path, kernels: str, form: str) -> None:
    save_mimo(tmp_path)
    params = [SamplingParams(seed=seed, temperature=6.0, max_tokens=12) for seed in range(4)]
    texts = []
    for limit in ({"method": "mtp", "draft_vocab_size": 90}, {"method": "none"}):
        speculation = {"num_speculative_tokens": 2, "adaptive": False, **limit}
        settings = {"speculative_config": speculation, "lm_head_quantization": form}
        engine = make_engine(tmp_path, kernels, **settings)
        found = scheduled.run(engine, random_prompts(4), params)
        assert (found.num_accepted > 0) == (limit["method"] == "mtp")
        texts.append(found.texts)
    assert texts[0] == texts[1]


def test_a_forbidden_draft_vocabulary_leaves_a_sequence_without_drafts() -> None:
    """No token of the draft vocabulary is allowed."""
    params = [
        SamplingParams(seed=1, max_tokens=8, allowed_token_ids=list(range(2000, 3000))),
        SamplingParams(seed=1, max_tokens=8, temperature=0.0),
    ]
    some = prompts()[1:3]
    found = scheduled.run(engine_of("native", draft_vocab_size=NUM_TOKENS), some, params)
    assert found.texts == scheduled.run(plain("native"), some, params).texts
    assert sum(num for num, _ in found.verified[0]) == 0
    assert sum(num for num, _ in found.verified[1]) > 0


def test_memory_counts_the_rows(tmp_path: Path) -> None:
    save_mimo(tmp_path)
    config, device = read_model_config(tmp_path), torch.device("cpu")
    model = load_model(tmp_path, config, torch.float32, device, lambda *_: None, ALONE)
    before = weight_bytes(TorchLM(model))
    limit_drafts(SpeculativeConfig(draft_vocab_size=40), model)
    assert model.lm_head is not None
    assert isinstance(model.lm_head.weight, Dense)
    row = model.lm_head.weight.values[0].nbytes
    assert weight_bytes(TorchLM(model)) - before == 40 * (row + torch.int64.itemsize)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("{", "is no JSON"),
        ('{"ids": [1]}', "holds no array of ids"),
        ("[]", "holds no array of ids"),
        (f"[1, {VOCAB_SIZE}]", f"{VOCAB_SIZE} is no id between 0 and {VOCAB_SIZE - 1}"),
        ("[1, -1]", "-1 is no id"),
        ("[1, true]", "True is no id"),
        ("[1, 2, 1]", "1 is there twice"),
        ("[1, 2]", "draft_vocab_size: 3 is above the 2 ids of"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str | None, message: str) -> None:
    save_mimo(tmp_path)
    path = tmp_path / "ids"
    if text is not None:
        path.write_text(text)
    speculation = {"draft_vocab_size": 3, "draft_vocab_file": str(path)}
    with pytest.raises(ConfigError, match="speculative-config: draft_vocab") as error:
        make_engine(tmp_path, speculative_config=speculation)
    assert message in str(error.value)


def test_more_tokens_than_there_are_are_refused(tmp_path: Path) -> None:
    save_mimo(tmp_path)
    speculation = {"draft_vocab_size": VOCAB_SIZE + 1}
    with pytest.raises(ConfigError, match=f"{VOCAB_SIZE + 1} is above vocab_size {VOCAB_SIZE}"):
        make_engine(tmp_path, speculative_config=speculation)


def test_a_model_without_a_head_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="draft_vocab_…: the model has no MTP head"):
        make_engine(checkpoint, speculative_config={"draft_vocab_size": 40})
