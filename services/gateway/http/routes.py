"""The route of a request and its observer, and the load of each route."""

from enum import Enum

from aiohttp import web

from services.gateway.mesh.observer import UNOBSERVED, RequestObserver


class Load(Enum):
    """The kind of a route's work, which decides about keys and their limits."""

    OPEN = "open"  # to monitoring, which has no key, and to the page, which asks for one
    CHEAP = "cheap"  # shows existing data, or makes room
    WORK = "work"
    GENERATION = "generation"  # by the mesh: its tokens count


UNKNOWN = "unknown"


def route_of(request: web.Request) -> str:
    """The path as written in the code, or ``UNKNOWN``."""
    resource = request.match_info.route.resource
    return resource.canonical if resource else UNKNOWN


OBSERVER = web.RequestKey("observer", RequestObserver)


def observer_of(request: web.Request) -> RequestObserver:
    return request.get(OBSERVER) or UNOBSERVED
