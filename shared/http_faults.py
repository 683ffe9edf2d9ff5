"""Faults of HTTP as aiohttp raises them, in a person's words."""

import os

import aiohttp


def text_of_fault(error: BaseException) -> str:
    """Of a server that is not reached only why, since whoever shows it knows where."""
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno or 0  # of a name that is not found it is below 0
        return os.strerror(number) if number > 0 else str(error.os_error.strerror)
    return str(error) or type(error).__name__
