"""The page at ``/``: a chat, the probabilities of its tokens, and a look at the mesh."""

import gzip
from functools import cached_property
from hashlib import sha256
from pathlib import Path

from aiohttp import ETag, hdrs, web

from services.gateway.api import Api, Core

FOLDER = Path(__file__).parent
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
"""Files of other types are not served."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Nothing from elsewhere, nothing inline, and no text that a script could make HTML of."""

HEADERS = {
    hdrs.CACHE_CONTROL: "no-cache",
    hdrs.VARY: hdrs.ACCEPT_ENCODING,
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Page(Api):
    open_routes = "/", "/page/{name}"

    def __init__(self, core: Core) -> None:
        self._is_on = core.config.page
        paths = [path for path in FOLDER.rglob("*") if path.suffix in TYPES]
        self._files = {path.relative_to(FOLDER).as_posix(): PageFile(path) for path in paths}

    def routes(self) -> list[web.RouteDef]:
        if not self._is_on:
            return []
        return [web.get("/", self._index), web.get("/page/{name:.+}", self._named)]

    async def _index(self, request: web.Request) -> web.Response:
        return self._files["index.html"].answer(request)

    async def _named(self, request: web.Request) -> web.Response:
        if (file := self._files.get(request.match_info["name"])) is None:
            raise web.HTTPNotFound
        return file.answer(request)


class PageFile:
    """Read when it is first asked for, and kept."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def answer(self, request: web.Request) -> web.Response:
        headers = {**HEADERS, hdrs.CONTENT_TYPE: TYPES[self._path.suffix]}
        if self._etag in (request.if_none_match or ()):
            response = web.Response(status=304, headers=HEADERS)
        elif "gzip" in request.headers.get(hdrs.ACCEPT_ENCODING, ""):
            headers[hdrs.CONTENT_ENCODING] = "gzip"
            response = web.Response(body=self._compressed, headers=headers)
        else:
            response = web.Response(body=self._content, headers=headers)
        response.etag = self._etag
        return response

    @cached_property
    def _content(self) -> bytes:
        return self._path.read_bytes()

    @cached_property
    def _compressed(self) -> bytes:
        return gzip.compress(self._content, mtime=0)

    @cached_property
    def _etag(self) -> ETag:
        return ETag(sha256(self._content).hexdigest()[:16], is_weak=True)
