"""The socket for the gateway's own requests: batches, and responses made in the background.

It lies in the mesh's directory, closed to other users, and is not announced: a request on it may
name any owner.
"""

from pathlib import Path

from aiohttp import web

OWNER_HEADER = "X-Shoal-Owner"
"""The ``key_id`` of the request's API key."""
RESPONSE_HEADER = "X-Shoal-Response"
"""The id of the background response that the request makes."""


def is_own(request: web.BaseRequest, socket: Path) -> bool:
    """False for requests of clients."""
    return bool(request.get_extra_info("sockname") == str(socket))
