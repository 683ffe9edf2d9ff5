"""The socket at which a gateway answers its own requests: those of batches, and those of responses
that are made in the background.

It lies in the mesh's directory, where no other user comes, and is not announced: who asks there may
say for whom.
"""

from pathlib import Path

from aiohttp import web

OWNER_HEADER = "X-Shoal-Owner"
"""The ``key_id`` of the API key for which it is asked."""
RESPONSE_HEADER = "X-Shoal-Response"
"""The id of the response that is made now, in the background."""


def is_own(request: web.BaseRequest, socket: Path) -> bool:
    """False for requests of clients."""
    return bool(request.get_extra_info("sockname") == str(socket))
