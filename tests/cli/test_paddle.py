"""ERNIE-4.5 as FastDeploy's users have it, from the request to native code and back."""

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import Ernie4_5_MoeForCausalLM

from tests.cli.serving import serving
from tests.services.worker.checkpoints import assert_greedy, save_model
from tests.services.worker.paddle.test_layout import to_paddle
from tests.services.worker.test_families import CASES
from tests.shared.formats.older_tokenizers import VOCAB_SIZE, save_sentencepiece


@pytest.mark.slow
async def test_texts_and_forms_of_a_folder_of_paddle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "ERNIE-4.5-tiny-Paddle"
    family, changes = CASES["ernie moe"]
    save_model(folder, family, "10MB", **changes | {"vocab_size": VOCAB_SIZE, "eos_token_id": 2})
    oracle = Ernie4_5_MoeForCausalLM.from_pretrained(folder).eval()
    to_paddle(folder)
    (folder / "tokenizer.json").unlink()
    config = (folder / "config.json").read_text()
    save_sentencepiece(folder, "unigram")
    (folder / "config.json").write_text(config)
    flags = "--model", str(folder), "--dtype", "float32"
    async with serving(tmp_path / "mesh", *flags) as server, server.client() as client:
        await server.until_ready()
        messages: Any = [{"role": "user", "content": "Name the four services."}]
        chat: dict[str, Any] = {"model": folder.name, "messages": messages, "max_tokens": 12}
        free: Any = await client.chat.completions.create(
            **chat, temperature=0, extra_body={"return_token_ids": True}
        )
        held = await client.chat.completions.create(
            **chat, extra_body={"guided_regex": "[0-9]{3}-[0-9]{3}"}
        )
    assert_greedy(oracle, free.prompt_token_ids, free.choices[0].token_ids)
    assert re.fullmatch("[0-9]{3}-[0-9]{3}", held.choices[0].message.content or "")
