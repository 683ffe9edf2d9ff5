"""A GGUF file, from the request to native code and back, by real processes."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.oracle import load_as_qwen2
from cli.models.command import check, find_models
from services.tokenizer.text_model import TextModel
from shared.model_folder import EMBEDDED_MODEL
from tests.cli.texts import NUM_TOKENS, VOCAB_SIZE, prompts_with_one_beginning, text_of
from tests.mesh.forks import one_of_each
from tests.mesh.structured import client_of
from tests.services.worker.checkpoints import assert_greedy
from tests.shared.formats.gguf.writer import Made

QUESTION = [{"role": "user", "content": "What is the largest planet?"}]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_folders_of_files_are_listed(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        Made(EMBEDDED_MODEL, tmp_path / name / "tiny.gguf", "Q8_0").write()
    Made(EMBEDDED_MODEL, tmp_path / "two" / "other.gguf").write()
    one, two = find_models([tmp_path])
    assert (check(one.folder).backend, check(one.folder).architecture) == (
        "shoal",
        "Qwen2ForCausalLM",
    )
    assert "several GGUF models: other, tiny" in check(two.folder).reason


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
async def test_the_embedded_model_writes_the_texts_of_its_values(tmp_path: Path, kind: str) -> None:
    """Also chats, with the template and the ends of turns of the metadata."""
    made = Made(EMBEDDED_MODEL, tmp_path / "tiny.gguf", kind)
    text_model = TextModel(EMBEDDED_MODEL, 2048, VOCAB_SIZE)
    made.writer.add_chat_template(text_model.description["chat_template"])
    oracle = load_as_qwen2(EMBEDDED_MODEL)
    for name, parameter in oracle.named_parameters():
        parameter.data = made.values[name]
    settings = {"MODEL": str(made.write()), "DTYPE": "float32", "MAX_MODEL_LEN": "256"}
    async with (
        one_of_each(tmp_path / "mesh", **settings) as fleet,
        client_of(fleet.of("gateway")[0].url) as client,
    ):
        (model,) = (await client.models.list()).data
        assert model.id == "tiny"
        for prompt in prompts_with_one_beginning()[:3]:
            ids, _ = await text_of(client, prompt, model="tiny")
            assert len(ids) == NUM_TOKENS
            assert_greedy(oracle, prompt, ids)
        chat: dict[str, Any] = {
            "model": "tiny",
            "messages": QUESTION,
            "temperature": 0,
            "max_tokens": 40,
        }
        whole: Any = await client.chat.completions.create(
            **chat, extra_body={"return_token_ids": True}
        )
        parts = [
            each.choices[0].delta.content or ""
            async for each in await client.chat.completions.create(**chat, stream=True)
            if each.choices
        ]
    prompt = text_model.encode_chat(QUESTION).tolist()
    assert whole.prompt_token_ids == prompt
    ids = whole.choices[0].token_ids
    assert_greedy(oracle, prompt, ids)
    text = text_model.decode(ids)
    assert whole.choices[0].message.content == "".join(parts) == text
