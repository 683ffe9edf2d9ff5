"""Readable texts of aiohttp's errors."""

import os

import aiohttp


def text_of_fault(error: BaseException) -> str:
    """For an unreachable server only the reason, since the caller names the server."""
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno or 0  # below 0 for a name that is not found
        return os.strerror(number) if number > 0 else str(error.os_error.strerror)
    return str(error) or type(error).__name__
