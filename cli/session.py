"""A session with a server, for many requests at once."""

import aiohttp

# Less than servers keep connections, or a server might close one we are about to use.
KEEPALIVE_S = 2.0


def session_with(url: str, api_key: str | None) -> aiohttp.ClientSession:
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
    return aiohttp.ClientSession(url, connector=connector, headers=headers)
