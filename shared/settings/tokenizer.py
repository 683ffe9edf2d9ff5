from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from shared.media.settings import MediaReading
from shared.settings.base import Settings
from shared.settings.fields import (
    LISTEN_ADDRESS,
    MAX_MODEL_LEN,
    MAX_OPEN_REQUESTS,
    MODEL,
    SCHEDULER_ADDRESS,
    Addresses,
    JsonObject,
    ListenAddress,
    Model,
    Names,
    NumTokens,
)
from shared.settings.pooler import POOLER_CONFIG, RUNNER, Pooler, RunnerSetting


def _without_name_of_vllm(value: Any) -> Any:
    """Reads vllm, its neutral defaults, as none."""
    return "none" if value == "vllm" else value


class PlainTokenizer(Settings):
    """Without the settings of optional parts."""

    listen_address: ListenAddress | None = LISTEN_ADDRESS
    scheduler_address: Addresses = SCHEDULER_ADDRESS
    model: Model = MODEL
    served_model_name: Names = Field(
        [], description="model names for clients (default: the folder's name, or org/name)"
    )
    max_model_len: NumTokens = MAX_MODEL_LEN
    runner: RunnerSetting = RUNNER
    pooler_config: Pooler = POOLER_CONFIG
    generation_config: Annotated[str, BeforeValidator(_without_name_of_vllm)] = Field(
        "auto",
        description="sampling defaults: auto (generation_config.json of the model's folder),"
        " none (OpenAI's), or another folder",
    )
    override_generation_config: JsonObject = Field(
        {}, description='overrides of generation_config.json, for example {"temperature": 0.6}'
    )
    chat_template: Path | None = Field(
        None, description="file with a chat template to use instead of the model's"
    )
    default_chat_template_kwargs: JsonObject = Field(
        {},
        description="variables of the chat template, unless a request sets them in"
        ' chat_template_kwargs, for example {"enable_thinking": false}',
    )
    trust_request_chat_template: bool = Field(
        False,
        description="accept the chat_template of a request, which can use 2 s of CPU and much"
        " memory of the tokenizer",
    )
    tool_call_parser: str = Field(
        "auto",
        description="format of the model's tool calls: auto (recognized from its chat"
        " template), none, or a name, for example hermes",
    )
    reasoning_parser: str = Field(
        "auto",
        description="format of the model's reasoning: auto (recognized from its chat template),"
        " none, or a name, for example qwen3",
    )
    max_open_requests: int = MAX_OPEN_REQUESTS
    tokenizer_threads: int = Field(2, gt=0, description="threads that render and encode prompts")


class TokenizerConfig(
    MediaReading,
    PlainTokenizer,
):
    """The settings of a tokenizer."""
