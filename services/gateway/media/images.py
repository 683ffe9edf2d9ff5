"""Images in the parts of chats."""

from collections.abc import Collection
from typing import get_args

import msgspec
from msgspec import Raw, Struct

from services.gateway.chat.media import IMAGE_URL, OPTIONS, Media
from services.gateway.chat.requests.json_body import json_errors
from services.gateway.chat.requests.json_list import is_text, typed
from services.gateway.chat.requests.raw_json import NULL, check_chars, json_text
from services.gateway.http.violations import show, violation
from services.gateway.media.data_url import EXPECTED, read_data_url
from services.gateway.mesh.job import Attachment
from shared.errors import InvalidRequest
from shared.settings.gateway import GatewayConfig
from shared.wire.messages import Detail, Medium, ModelInfo

INPUT_IMAGE = "input_image"
ROLES = ("user", "system", "developer", "tool")
DETAILS: tuple[Detail, ...] = get_args(Detail)
DETAIL_OF: dict[str | None, Detail] = {None: "auto", **{each: each for each in DETAILS}}


class _Part(Struct):
    type: str
    image_url: Raw = NULL
    detail: str | None = None
    file_id: Raw = NULL


class _Url(Struct):
    url: Raw = NULL
    detail: str | None = None


class Images(Media):
    """Media with images as ``data:`` URLs, in OpenAI's parts of both APIs."""

    kinds: Collection[str] = (IMAGE_URL, INPUT_IMAGE)

    def __init__(self, config: GatewayConfig) -> None:
        self._most = config.limit_mm_per_prompt.image

    def check(self, kind: str, param: str, model: ModelInfo) -> None:
        if "image" not in model.media:
            raise InvalidRequest(
                f"{param}.type is {show(kind)}; the model {model.names[0]} takes no images",
                param=f"{param}.type",
                code="unsupported_parameter",
            )

    def attachment(
        self, part: Raw, param: str, role: str, number: int, model: ModelInfo
    ) -> Attachment:
        found: _Part = typed(part, _Part, param)
        self.check(found.type, param, model)
        if role not in ROLES:
            text = f"{param} is an image of role {role}; expected one of {', '.join(ROLES)}"
            raise InvalidRequest(text, param=param)
        if number >= self._most:
            raise InvalidRequest(
                f"{param} is image {number + 1} of the request; the limit is"
                f' limit-mm-per-prompt = {{"image": {self._most}}}',
                param=param,
            )
        holder, where = param, f"{param}.{IMAGE_URL}"
        url, detail = found.image_url, found.detail
        if url != NULL and not is_text(url):
            given: _Url = typed(url, _Url, where)
            holder, where, url, detail = where, f"{where}.url", given.url, given.detail
        if detail not in DETAIL_OF:
            field = f"{holder}.detail"
            text = f"{field} is {show(detail)}; expected one of {', '.join(DETAILS)}"
            raise InvalidRequest(text, param=field)
        if found.file_id != NULL:
            field = f"{param}.file_id"
            text = f"{field} is {show(found.file_id)}; no images are kept, expected {EXPECTED}"
            raise InvalidRequest(text, param=field)
        if url == NULL:
            raise InvalidRequest(f"{where} is required", param=where)
        if not is_text(url):
            raise InvalidRequest(f"{where} is {show(url)}; expected {EXPECTED}", param=where)
        file = read_data_url(url, where)
        return Attachment(Medium(param=where, detail=DETAIL_OF[detail]), file)

    @json_errors()
    def options(self, raw: Raw, has_files: bool) -> str:
        if not has_files:
            return super().options(raw, has_files)
        if raw == NULL:
            return ""
        text = json_text(raw, OPTIONS)
        try:
            fields = msgspec.json.decode(text, type=dict[str, Raw])
        except msgspec.ValidationError as error:
            raise violation(error, OPTIONS, msgspec.json.decode(text)) from None
        return check_chars(text, OPTIONS) if fields else ""
