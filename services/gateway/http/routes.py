"""Which of our routes a request goes to."""

from aiohttp import web


def route_of(request: web.Request) -> str:
    """The path as it stands in the code, or ``unknown``."""
    resource = request.match_info.route.resource
    return resource.canonical if resource else "unknown"
