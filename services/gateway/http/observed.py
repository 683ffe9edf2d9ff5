"""The observer of an HTTP request."""

from aiohttp import web

from services.gateway.mesh.observer import UNOBSERVED, RequestObserver

OBSERVER = web.RequestKey("observer", RequestObserver)


def observer_of(request: web.Request) -> RequestObserver:
    return request.get(OBSERVER) or UNOBSERVED
