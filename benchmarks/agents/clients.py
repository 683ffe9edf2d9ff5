"""The clients: their commands, tools and settings."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.agents.steps import CLAUDE_CODE, CODEX, OPENCODE, Toolset
from benchmarks.agents.wire import MODEL, chat_stream, messages_stream, responses_stream

CODEX_CONFIG = """
model = "{model}"
model_provider = "shoal"
web_search = "disabled"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.shoal]
name = "Shoal"
base_url = "{url}/v1"
wire_api = "responses"
"""


@dataclass(frozen=True)
class Client:
    """``arguments`` for a prompt, which may continue the last session. If it ``is_interactive``
    they start one process for all prompts, which are typed."""

    path: str
    stream: Callable[..., Iterator[dict[str, Any]]]
    tools: Toolset
    arguments: Callable[[str, bool], list[str]]
    environment: dict[str, str] = field(default_factory=dict)
    is_interactive: bool = False


def _claude(prompt: str, again: bool) -> list[str]:
    return ["--allow-dangerously-skip-permissions", "--permission-mode", "bypassPermissions"]


def _codex(prompt: str, again: bool) -> list[str]:
    unsandboxed = "--dangerously-bypass-approvals-and-sandbox"
    return ["exec", unsandboxed, *(["resume", "--last"] if again else []), prompt]


def _opencode(prompt: str, again: bool) -> list[str]:
    return ["run", *(["--continue"] if again else []), prompt]


CLIENTS = {
    "claude-code": Client(
        "/v1/messages",
        messages_stream,
        CLAUDE_CODE,
        _claude,
        {
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_TELEMETRY": "1",
            "IS_SANDBOX": "1",
        },
        is_interactive=True,
    ),
    "codex": Client("/v1/responses", responses_stream, CODEX, _codex),
    "opencode": Client(
        "/v1/chat/completions",
        chat_stream,
        OPENCODE,
        _opencode,
        {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
    ),
}


def write_settings(home: Path, root: Path, url: str) -> None:
    """The settings of all clients that have no variables for them."""
    limit = {"context": 1 << 20, "output": 8192}
    model = {"name": MODEL, "reasoning": True, "interleaved": {"field": "reasoning_content"}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {MODEL: model | {"tool_call": True, "limit": limit}},
    }
    opencode = {"model": f"shoal/{MODEL}", "autoupdate": False, "provider": {"shoal": provider}}
    trust = {"hasTrustDialogAccepted": True, "hasCompletedProjectOnboarding": True}
    claude = {"hasCompletedOnboarding": True, "theme": "dark", "projects": {str(root): trust}}
    claude["bypassPermissionsModeAccepted"] = True
    for name, text in (
        (".claude.json", json.dumps(claude)),
        (".codex/config.toml", CODEX_CONFIG.format(model=MODEL, url=url)),
        (".config/opencode/opencode.json", json.dumps(opencode)),
    ):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
