"""Adapters (LoRA) as names of models, and their loading and unloading at run time."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from hmac import compare_digest
from http import HTTPStatus

from aiohttp import web
from msgspec.structs import replace

from services.gateway.api import Api, Core
from services.gateway.apis.adapters.known import KnownAdapters
from services.gateway.apis.adapters.orders import parse_load, parse_unload
from services.gateway.chat.replies.openai import Model
from services.gateway.http.api_keys import shown_keys
from services.gateway.http.body import BodyReader
from services.gateway.http.violations import show
from shared.adapters.listeners import knows_adapters
from shared.errors import (
    RETRY_AFTER_S,
    InvalidRequest,
    NotFound,
    RequestError,
    Unauthorized,
    Unavailable,
)
from shared.link.peer import Peer
from shared.wire.codec import Array
from shared.wire.messages import Adapters, LoadAdapter, Message, UnloadAdapter

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
MAX_BODY_BYTES = 1 << 20
TIMEOUT_S = 60.0
SETTING = "allow-runtime-lora-updating"


class AdapterApi(Api):
    """Orders go through all tokenizers to all workers; the lists of adapters have the answers."""

    open_routes = (LOAD, UNLOAD)  # they check the token themselves

    def __init__(self, core: Core) -> None:
        self._mesh = core.mesh
        self._may_change = core.config.allow_runtime_lora_updating
        self._token = core.config.admin_token
        self._has_keys = bool(core.config.api_key or core.config.api_key_file)
        self._bodies = BodyReader(MAX_BODY_BYTES)
        self._changed = asyncio.Event()
        self._known = KnownAdapters(core.mesh.tokenizers, self._note_change)
        self._changing: set[str] = set()
        self.timeout_s = TIMEOUT_S
        core.intake.variants.append(self._known)

    def routes(self) -> list[web.RouteDef]:
        return [web.post(LOAD, self._load), web.post(UNLOAD, self._unload)]

    def variants(self, model: Model) -> Sequence[Model]:
        if model.shoal.pooling:
            return ()
        return [
            replace(model, id=name, root=each.path.rpartition("/")[2] or name, parent=model.id)
            for name, each in sorted(self._known.by_name.items())
            if name not in self._mesh.tokenizers.model.names
        ]

    def on_down(self, peer: Peer) -> None:
        self._known.forget(peer)

    def takes(self, peer: Peer, message: Message, arrays: Sequence[Array] = ()) -> bool:
        if not isinstance(message, Adapters):
            return False
        self._known.note(peer, message.adapters)
        return True

    # --- orders ---------------------------------------------------------------------------------

    async def _load(self, request: web.Request) -> web.Response:
        """Answers when the mesh serves the adapter, or a worker has refused it."""
        self._check_allowed(request)
        model = await self._mesh.tokenizers.ready_model()
        body = await self._bodies.read(request)
        asked = parse_load(body, model.names, self._known.by_name)
        name, path = asked.lora_name, asked.lora_path or ""
        load = secrets.token_hex(16)
        order = LoadAdapter(load, name, path)
        await self._change(name, order, lambda: self._is_loaded(name, load))
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, request: web.Request) -> web.Response:
        """Answers when new requests are refused; open ones end with the adapter."""
        self._check_allowed(request)
        await self._mesh.tokenizers.ready_model()
        name = parse_unload(await self._bodies.read(request)).lora_name
        if name not in self._known.by_name:
            raise NotFound(f"the LoRA adapter {show(name)} is not loaded", param="lora_name")
        order = UnloadAdapter(name, secrets.token_hex(16))
        await self._change(name, order, lambda: name not in self._known.by_name)
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    def _check_allowed(self, request: web.Request) -> None:
        """A change is for all clients: an API key does not suffice."""
        if not self._may_change:
            raise _forbidden(f"adapters change at run time only with {SETTING}")
        if self._token is not None:
            token = self._token.get_secret_value().encode()
            if not any(compare_digest(key, token) for key in shown_keys(request)):
                raise Unauthorized("adapters change with the admin-token alone")
        elif self._has_keys:
            raise _forbidden("on a server with API keys adapters change only with an admin-token")

    def _is_loaded(self, name: str, load: str) -> bool:
        """Raises InvalidRequest with the reason of a worker that refused it."""
        rows = [each for each in self._known.all if each.load == load]
        for each in rows:
            if each.problem:
                raise InvalidRequest(each.problem, param="lora_path")
        found = self._known.by_name.get(name)
        return any(
            each.is_retired or (found is not None and each.digest == found.digest) for each in rows
        )

    async def _change(self, name: str, order: Message, is_done: Callable[[], bool]) -> None:
        """Sends ``order`` to all tokenizers, and returns once it ``is_done``."""
        if name in self._changing:
            text = f"the LoRA adapter {show(name)} is being loaded or unloaded"
            raise InvalidRequest(text, param="lora_name")
        peers = [each.peer for each in self._mesh.tokenizers if knows_adapters(each.peer)]
        if not peers:
            text = "no connected tokenizer knows of adapters"
            raise Unavailable(text, retry_after_s=RETRY_AFTER_S)
        self._changing.add(name)
        try:
            for peer in peers:
                peer.send(order)
            async with asyncio.timeout(self.timeout_s):
                while not is_done():
                    await self._changed.wait()
        except TimeoutError:
            text = f"no worker has answered for {show(name)} within {self.timeout_s:g} s"
            error = RequestError(text, code="timeout")
            error.status = HTTPStatus.GATEWAY_TIMEOUT
            raise error from None
        finally:
            self._changing.remove(name)

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _forbidden(text: str) -> RequestError:
    error = RequestError(text, code="forbidden")
    error.status, error.type = HTTPStatus.FORBIDDEN, "invalid_request_error"
    return error
