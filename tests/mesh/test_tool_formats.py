"""Forced calls in formats other than the embedded model's own, by real processes."""

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from benchmarks.harness.fleet import running_fleet
from tests.mesh.forks import fork
from tests.mesh.structured import client_of
from tests.mesh.test_tools import MESSAGES, SCHEMAS, SETTINGS, TOOLS

SEEDS = range(8)
slow = pytest.mark.slow


@slow
@pytest.mark.parametrize("name", ["openai", "gemma4", "minimax_m3", "kimi_k3"])
async def test_a_model_of_another_format_calls_in_it(tmp_path: Path, name: str):
    """Markers are text here, for the model has no tokens for them. In harmony's channels it may
    reason until its text is cut."""
    async with running_fleet(tmp_path, SETTINGS, fork) as fleet:
        for kind in ("scheduler", "worker", "gateway"):
            await fleet.start(kind)
        await fleet.start("tokenizer", TOOL_CALL_PARSER=name, REASONING_PARSER="none")
        await fleet.until_ready()
        asked: Any = {"model": "shoal-tiny", "messages": MESSAGES, "tools": TOOLS, "temperature": 1}
        asked |= {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
        calls: list[Any] = []
        async with client_of(fleet.of("gateway")[0].url) as client:
            create = client.chat.completions.create
            for done in await asyncio.gather(*(create(**asked, seed=seed) for seed in SEEDS)):
                (choice,) = done.choices
                if choice.finish_reason == "tool_calls":
                    assert not choice.message.content
                    calls += choice.message.tool_calls or []
        await fleet.until_idle()
    assert calls
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
