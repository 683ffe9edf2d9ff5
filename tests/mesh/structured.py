"""Clients of a mesh's HTTP API."""

from openai import AsyncOpenAI


def client_of(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
