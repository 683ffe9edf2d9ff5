"""OpenAI's two older endpoints, the API of the core."""

from aiohttp import web

from services.gateway.api import Api, Core
from services.gateway.chat.generation import CHAT, TEXT

CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"


class Chat(Api):
    generating_routes = CHATS, TEXTS
    id_prefixes = CHAT.id_prefix, TEXT.id_prefix

    def __init__(self, core: Core) -> None:
        self._completions = core.completions

    def routes(self) -> list[web.RouteDef]:
        return [web.post(CHATS, self._chat), web.post(TEXTS, self._text)]

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._completions.serve(request, CHAT)

    async def _text(self, request: web.Request) -> web.StreamResponse:
        return await self._completions.serve(request, TEXT)
