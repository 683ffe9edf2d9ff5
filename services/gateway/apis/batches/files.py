"""``/v1/files``: inputs of batches and images uploaded by clients, and results of batches. A file
belongs to the API key of its request; to other keys it does not exist."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

from aiohttp import BodyPartReader, hdrs, web

from services.gateway.apis.batches.folder import BatchFolder, new_file_id, no_room
from services.gateway.apis.batches.listing import enabled, page
from services.gateway.apis.batches.objects import DeletedFile, FileObject, StoredFile
from services.gateway.apis.batches.runner import BatchRunner
from services.gateway.http.account import owner_of
from services.gateway.http.admission import Admission
from services.gateway.http.body import READ_TIMEOUT_S, check_coding
from services.gateway.http.client import Client
from services.gateway.http.head_parser import let_continue
from services.gateway.http.json_reply import json_response
from services.gateway.http.violations import show
from shared.errors import BodyTooLarge, InvalidRequest, NotFound
from shared.settings.gateway import GatewayConfig

Result = TypeVar("Result")

CHUNK_BYTES = 256 << 10
MAX_NAME_CHARS = 256
MAX_FIELD_BYTES = 1024
MAX_LISTED = 10_000
BATCH, VISION = PURPOSES = "batch", "vision"
FORM = "multipart/form-data"
OCTETS = "application/octet-stream"
MIN_BYTES_PER_S = 16 << 10
"""The lowest rate of an upload, apart from pauses of READ_TIMEOUT_S in all."""


class Files:
    """Without a folder every route returns an error with the setting's name."""

    def __init__(
        self, batches: BatchRunner | None, admission: Admission, config: GatewayConfig
    ) -> None:
        self._batches = batches
        self._admission = admission
        self._max_bytes = config.max_file_bytes

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/files", self._upload),
            web.get("/v1/files", self._list),
            web.get("/v1/files/{file_id}", self._get),
            web.delete("/v1/files/{file_id}", self._delete),
            web.get("/v1/files/{file_id}/content", self._content),
        ]

    @property
    def _folder(self) -> BatchFolder:
        return enabled(self._batches).folder

    async def image(self, file_id: str, owner: str) -> Path | None:
        try:
            stored = await self._run(owner, self._folder.file, file_id, owner)
        except NotFound:
            return None
        return self._folder.data_path(file_id, owner) if stored.file.purpose == VISION else None

    async def _run(self, owner: str, call: Callable[..., Result], *arguments: object) -> Result:
        return await enabled(self._batches).threads.run(owner, call, *arguments)

    async def _upload(self, request: web.Request) -> web.Response:
        folder = self._folder
        if request.content_type != FORM:
            given = show(request.content_type)
            raise web.HTTPUnsupportedMediaType(
                reason=f"Content-Type is {given}; expected {FORM}",
                headers={hdrs.ACCEPT: FORM},
            )
        check_coding(request)
        file_id, owner = new_file_id(), owner_of(request)
        with self._admission.admit():
            try:
                await self._run(owner, folder.check_part, owner, request.content_length or 0)
                async with asyncio.timeout(READ_TIMEOUT_S) as limit:
                    file = await self._received(request, folder, file_id, limit)
                await self._run(owner, folder.save_file, StoredFile(owner, file))
            except BaseException as error:
                folder.drop_data(file_id, owner)
                if isinstance(error, TimeoutError):
                    text = f"the file came with less than {MIN_BYTES_PER_S} bytes per second"
                    raise web.HTTPRequestTimeout(reason=text) from None
                if isinstance(error, OSError) and not isinstance(error, ConnectionError):
                    raise no_room(error) from None
                raise
        return json_response(file)

    async def _received(
        self, request: web.Request, folder: BatchFolder, file_id: str, limit: asyncio.Timeout
    ) -> FileObject:
        """The parts may come in any order; ``limit`` moves on with the received bytes. Raises
        OSError."""
        if (request.content_length or 0) > self._max_bytes + MAX_NAME_CHARS + MAX_FIELD_BYTES:
            raise self._too_large(str(request.content_length))
        purpose, name, num_bytes = "", "", -1
        owner = owner_of(request)
        await let_continue(request)
        try:
            async for part in await request.multipart():
                if not isinstance(part, BodyPartReader):
                    raise InvalidRequest("the form holds another multipart body")
                if part.name == "purpose":
                    purpose = await _text(part)
                elif part.name == "file" and num_bytes < 0:
                    name = _whole(part.filename or "")[:MAX_NAME_CHARS]
                    with await self._run(owner, folder.create_data, file_id, owner) as data:
                        num_bytes = await self._receive(part, data, owner, limit)
                else:
                    raise InvalidRequest(
                        f"{show(part.name or '')} is not supported; allowed: file, purpose",
                        param=_whole(part.name or "")[:60],
                        code="unsupported_parameter",
                    )
        except ValueError as error:
            raise InvalidRequest(f"the body is no multipart form: {error}") from None
        if num_bytes < 0:
            raise InvalidRequest("file is required", param="file")
        if purpose not in PURPOSES:
            raise InvalidRequest(
                f"purpose is {show(purpose)}; expected one of {', '.join(PURPOSES)}",
                param="purpose",
            )
        return FileObject(
            id=file_id,
            bytes=num_bytes,
            created_at=int(time.time()),
            filename=name or (f"{file_id}.jsonl" if purpose == BATCH else file_id),
            purpose=purpose,
        )

    async def _receive(
        self, part: BodyPartReader, data: BinaryIO, owner: str, limit: asyncio.Timeout
    ) -> int:
        num_bytes = 0
        while chunk := await part.read_chunk(CHUNK_BYTES):
            num_bytes += len(chunk)
            if num_bytes > self._max_bytes:
                raise self._too_large("more")
            await self._run(owner, data.write, chunk)
            _extend(limit, len(chunk))
        await self._run(owner, data.flush)
        return num_bytes

    def _too_large(self, size: str) -> BodyTooLarge:
        return BodyTooLarge(
            f"the file has {size} bytes; the limit is max-file-bytes = {self._max_bytes}",
            param="file",
        )

    async def _list(self, request: web.Request) -> web.Response:
        owner = owner_of(request)
        stored = await self._run(owner, self._folder.files, owner)
        purpose = request.query.get("purpose")
        files = [each.file for each in stored if purpose in (None, each.file.purpose)]
        return json_response(page(request, files, MAX_LISTED, MAX_LISTED))

    async def _get(self, request: web.Request) -> web.Response:
        return json_response(await self._file(request))

    async def _file(self, request: web.Request) -> FileObject:
        file_id, owner = request.match_info["file_id"], owner_of(request)
        return (await self._run(owner, self._folder.file, file_id, owner)).file

    async def _delete(self, request: web.Request) -> web.Response:
        file, owner = await self._file(request), owner_of(request)
        for stored in await self._run(owner, self._folder.open_batches, owner):
            batch = stored.batch
            if batch.input_file_id == file.id and not batch.has_ended:
                raise InvalidRequest(
                    f"{file.id} is the input of {batch.id}, which is {batch.status}; cancel it"
                    " first",
                    param="file_id",
                    code="file_in_use",
                )
        await self._run(owner, self._folder.delete_file, file.id, owner)
        return json_response(DeletedFile(file.id))

    async def _content(self, request: web.Request) -> web.StreamResponse:
        file, owner = await self._file(request), owner_of(request)
        client = Client(request)
        with self._folder.data_path(file.id, owner).open("rb") as data:
            length = str(file.bytes)
            await client.begin({"Content-Type": OCTETS, "Content-Length": length})
            while client.takes_body and (chunk := await self._run(owner, data.read, CHUNK_BYTES)):
                await client.write(chunk)
            return await client.end()


def _extend(limit: asyncio.Timeout, num_bytes: int) -> None:
    """Extends ``limit`` by the longest time for ``num_bytes``, at most to READ_TIMEOUT_S ahead."""
    latest = asyncio.get_running_loop().time() + READ_TIMEOUT_S
    limit.reschedule(min((limit.when() or latest) + num_bytes / MIN_BYTES_PER_S, latest))


def _whole(text: str) -> str:
    """Without incomplete characters, which bytes that are not UTF-8 become."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


async def _text(part: BodyPartReader) -> str:
    data = b""
    while chunk := await part.read_chunk(MAX_FIELD_BYTES):
        data += chunk
        if len(data) > MAX_FIELD_BYTES:
            raise InvalidRequest(
                f"{part.name} has more than {MAX_FIELD_BYTES} bytes", param=part.name
            )
    return data.decode(errors="replace")
