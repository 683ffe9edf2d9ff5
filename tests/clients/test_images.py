"""An image in the form of each client. The model sees the same in all of them."""

import base64
import json
import os
import struct
import subprocess
import urllib.request
import zlib
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise its import downloads prices

import litellm
import pytest
from anthropic import Anthropic
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from openai import OpenAI
from test_node import NODE, NODE_TIMEOUT_S, needs_node

QUESTION = "Describe it."
WIDTH, HEIGHT = 112, 84
MAX_TOKENS = 20


def png() -> bytes:
    """Stripes."""
    lines = b"".join(b"\0" + bytes([row, 255 - row, 3 * row]) * WIDTH for row in range(HEIGHT))
    head = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 8, 2, 0, 0, 0)
    chunks = (b"IHDR", head), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


IMAGE = base64.b64encode(png()).decode()
DATA_URL = f"data:image/png;base64,{IMAGE}"
CHAT: Any = {
    "role": "user",
    "content": [
        {"type": "image_url", "image_url": {"url": DATA_URL}},
        {"type": "text", "text": QUESTION},
    ],
}
ASKED: Any = {"model": "tiny-vl", "temperature": 0}


@pytest.fixture(scope="session")
def answer(seeing_url: str) -> str:
    """Without any client."""
    body = json.dumps(ASKED | {"messages": [CHAT], "max_tokens": MAX_TOKENS}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{seeing_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as reply:
        found = json.load(reply)
    assert found["usage"]["prompt_tokens"] > WIDTH * HEIGHT // 28**2
    text: str = found["choices"][0]["message"]["content"]
    assert text
    return text


def test_openais_chats(seeing_url: str, answer: str):
    client = OpenAI(base_url=seeing_url, api_key="none", max_retries=0)
    reply = client.chat.completions.create(**ASKED, messages=[CHAT], max_tokens=MAX_TOKENS)
    assert reply.choices[0].message.content == answer


def test_openais_responses(seeing_url: str, answer: str):
    client = OpenAI(base_url=seeing_url, api_key="none", max_retries=0)
    content: Any = [
        {"type": "input_image", "image_url": DATA_URL, "detail": "auto"},
        {"type": "input_text", "text": QUESTION},
    ]
    asked: Any = [{"role": "user", "content": content}]
    reply = client.responses.create(**ASKED, input=asked, max_output_tokens=MAX_TOKENS)
    assert reply.output_text == answer


def test_anthropics_messages(seeing_url: str, answer: str):
    client = Anthropic(base_url=seeing_url.removesuffix("/v1"), api_key="none", max_retries=0)
    source = {"type": "base64", "media_type": "image/png", "data": IMAGE}
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    reply = client.messages.create(
        model="tiny-vl",
        messages=[{"role": "user", "content": content}],
        max_tokens=MAX_TOKENS,
        extra_body={"temperature": 0},
    )
    assert reply.content[0].text == answer


@pytest.mark.parametrize("is_response", [False, True])
def test_langchains_images(seeing_url: str, answer: str, is_response: bool):
    model = ChatOpenAI(
        base_url=seeing_url,
        api_key="none",
        model="tiny-vl",
        temperature=0,
        max_tokens=MAX_TOKENS,
        max_retries=0,
        use_responses_api=is_response,
    )
    image = {"type": "image", "base64": IMAGE, "mime_type": "image/png"}
    asked = HumanMessage([image, {"type": "text", "text": QUESTION}])
    assert model.invoke([asked]).text == answer


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
def test_litellms_images(seeing_url: str, answer: str, provider: str):
    reply = litellm.completion(
        model=f"{provider}/tiny-vl",
        api_base=seeing_url.removesuffix("/v1") if provider == "anthropic" else seeing_url,
        api_key="none",
        messages=[CHAT],
        temperature=0,
        max_tokens=MAX_TOKENS,
        num_retries=0,
    )
    assert reply.choices[0].message.content == answer


@needs_node
def test_clients_for_node(seeing_url: str, answer: str):
    given = {"url": seeing_url, "image": IMAGE, "question": QUESTION, "answer": answer}
    found = subprocess.run(
        ["node", "--test", "images.js"],
        cwd=NODE,
        env=os.environ | {"SHOAL_IMAGES": json.dumps(given | {"maxTokens": MAX_TOKENS})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=NODE_TIMEOUT_S,
    )
    assert found.returncode == 0, found.stdout
