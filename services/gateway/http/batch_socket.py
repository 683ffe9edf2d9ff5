"""The socket at which a gateway answers the requests of its batches.

It lies in the mesh's directory, where no other user comes, and is not announced: a request that
comes there is a batch's, and says whose.
"""

from pathlib import Path

from aiohttp import web

OWNER_HEADER = "X-Shoal-Batch-Owner"
"""The ``key_id`` of the API key that the batch came with."""


def batch_owner(request: web.BaseRequest, socket: Path | None) -> str | None:
    """Whose batch the request is of; None for requests of clients."""
    if socket is None or request.get_extra_info("sockname") != str(socket):
        return None
    return request.headers.get(OWNER_HEADER, "")
