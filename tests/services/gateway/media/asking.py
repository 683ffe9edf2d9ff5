"""Chats with images for a model that takes them."""

import base64
import json
from dataclasses import replace
from typing import Any

import numpy as np
from msgspec import structs

from services.gateway.chat.requests.parse import Limits, parse_chat
from services.gateway.media.images import Images
from services.gateway.mesh.job import Job, Prompt
from shared.settings.gateway import GatewayConfig
from tests.services.gateway.fakes import LIMITS, MODEL

SEER = structs.replace(MODEL, media=["image"])
FILE = bytes(range(256)) * 3


def limits(**settings: Any) -> Limits:
    return replace(LIMITS, media=Images(GatewayConfig(**settings)))


def data_url(file: bytes = FILE, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


def image(file: bytes = FILE, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(file)} | more}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


def parsed(body: dict[str, Any] | bytes, model=SEER, **settings: Any) -> Job:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_chat(data, model, limits(**settings))


def prompt_of(*messages: Any, **settings: Any) -> Prompt:
    [prompt] = parsed({"messages": [*messages]}, **settings).prompts
    return prompt


def messages_of(prompt: Prompt) -> Any:
    return json.loads(prompt.data.tobytes())


def files_of(prompt: Prompt) -> list[bytes]:
    assert all(each.data.dtype == np.uint8 for each in prompt.media)
    return [each.data.tobytes() for each in prompt.media]
