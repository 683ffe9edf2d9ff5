"""Images and videos in the parts of chats."""

import re
from collections.abc import Collection, Sequence
from typing import get_args

import msgspec
from msgspec import Raw, Struct
from yarl import URL

from services.gateway.chat.media import IMAGE_URL, OPTIONS, Media
from services.gateway.chat.requests.json_body import json_errors
from services.gateway.chat.requests.json_list import is_text, typed
from services.gateway.chat.requests.raw_json import NULL, check_chars, json_text
from services.gateway.http.admission import Reservation
from services.gateway.http.violations import show, violation
from services.gateway.media.allowed_hosts import AllowedHosts
from services.gateway.media.data_url import EXPECTED, read_data_url
from services.gateway.media.fetch import Fetcher
from services.gateway.media.loading import NO_BYTES, Elsewhere, Loader
from services.gateway.mesh.job import Attachment, Prompt
from shared.errors import InvalidRequest
from shared.media.family import WITH_ARTICLE
from shared.settings.gateway import GatewayConfig
from shared.wire.messages import MAX_NAME_CHARS, Detail, Medium, MediumKind, ModelInfo

INPUT_IMAGE = "input_image"
VIDEO_URL = "video_url"
ROLES = ("user", "system", "developer", "tool")
DETAILS: tuple[Detail, ...] = get_args(Detail)
DETAIL_OF: dict[str | None, Detail] = {None: "auto", **{each: each for each in DETAILS}}
MAX_URL_BYTES = 8192

_HTTP = re.compile(rb'"https?:', re.IGNORECASE)


class _Part(Struct):
    type: str
    image_url: Raw = NULL
    video_url: Raw = NULL
    detail: str | None = None
    file_id: Raw = NULL


class _Url(Struct):
    url: Raw = NULL
    detail: str | None = None


class Images(Media):
    """Media with images as ``data:`` URLs, as URLs of allowed hosts and as uploads, in OpenAI's
    parts of both APIs, and with videos by such URLs, in vLLM's part."""

    kinds: Collection[str] = (IMAGE_URL, INPUT_IMAGE, VIDEO_URL)

    def __init__(self, config: GatewayConfig) -> None:
        """Raises ConfigError."""
        limit = config.limit_mm_per_prompt
        self._most: dict[MediumKind, int] = {"image": limit.image, "video": limit.video}
        self._hosts = AllowedHosts(config.allowed_media_domains)
        more = "" if self._hosts.is_empty else ", http:// or https://"
        self._expected = {kind: text + more for kind, text in EXPECTED.items()}
        self._loader = Loader(Fetcher(self._hosts), config.max_body_bytes, config.accept_timeout_s)

    def check(self, kind: str, param: str, model: ModelInfo) -> None:
        medium = _kind(kind)
        if medium not in model.all_media:
            raise InvalidRequest(
                f"{param}.type is {show(kind)}; the model {model.names[0]} takes no {medium}s",
                param=f"{param}.type",
                code="unsupported_parameter",
            )

    def attachment(
        self, part: Raw, param: str, role: str, files: Sequence[Attachment], model: ModelInfo
    ) -> Attachment:
        found: _Part = typed(part, _Part, param)
        self.check(found.type, param, model)
        kind = _kind(found.type)
        if role not in ROLES:
            roles = ", ".join(ROLES)
            text = f"{param} is {WITH_ARTICLE[kind]} of role {role}; expected one of {roles}"
            raise InvalidRequest(text, param=param)
        number, most = sum(each.medium.kind == kind for each in files), self._most[kind]
        if number >= most:
            raise InvalidRequest(
                f"{param} is {kind} {number + 1} of the request; the limit is"
                f' limit-mm-per-prompt = {{"{kind}": {most}}}',
                param=param,
            )
        return self._image(found, param) if kind == "image" else self._video(found, param)

    def _image(self, found: _Part, param: str) -> Attachment:
        holder, where = param, f"{param}.{IMAGE_URL}"
        url, detail = found.image_url, found.detail
        if url != NULL and not is_text(url):
            given: _Url = typed(url, _Url, where)
            holder, where, url, detail = where, f"{where}.url", given.url, given.detail
        if detail not in DETAIL_OF:
            field = f"{holder}.detail"
            text = f"{field} is {show(detail)}; expected one of {', '.join(DETAILS)}"
            raise InvalidRequest(text, param=field)
        if (found.file_id == NULL) == (url == NULL):
            text = "is required" if url == NULL else f"is given in addition to {param}.file_id"
            raise InvalidRequest(f"{where} {text}", param=where)
        if url == NULL:
            return _upload(found.file_id, f"{param}.file_id", DETAIL_OF[detail])
        return self._file(url, Medium(param=where, detail=DETAIL_OF[detail]))

    def _video(self, found: _Part, param: str) -> Attachment:
        where, url = f"{param}.{VIDEO_URL}", found.video_url
        if url != NULL and not is_text(url):
            given: _Url = typed(url, _Url, where)
            where, url = f"{where}.url", given.url
        if url == NULL:
            raise InvalidRequest(f"{where} is required", param=where)
        return self._file(url, Medium(kind="video", param=where))

    def _file(self, url: Raw, medium: Medium) -> Attachment:
        where, expected = medium.param, self._expected[medium.kind]
        if not is_text(url):
            raise InvalidRequest(f"{where} is {show(url)}; expected {expected}", param=where)
        if not _HTTP.match(memoryview(url)):
            return Attachment(medium, read_data_url(url, where, medium.kind, expected))
        return Elsewhere(medium, NO_BYTES, self._allowed(url, medium), show(url))

    @json_errors()
    def _allowed(self, raw: Raw, medium: Medium) -> URL:
        """The URL of an allowed host."""
        refusal = f"it has more than {MAX_URL_BYTES} bytes"
        if self._hosts.is_empty:
            expected = EXPECTED[medium.kind]
            refusal = f"nothing is fetched (allowed-media-domains), expected {expected}"
        elif len(memoryview(raw)) <= MAX_URL_BYTES:
            try:
                url = URL(msgspec.json.decode(raw, type=str))
                refusal = self._hosts.refusal(url)
            except ValueError:
                refusal = "it is no URL"
        if refusal:
            text = f"{medium.param} is {show(raw)}; {refusal}"
            raise InvalidRequest(text, param=medium.param)
        return url

    async def loaded(
        self, prompts: list[Prompt], owner: str, reservation: Reservation
    ) -> list[Prompt]:
        return await self._loader.loaded(prompts, owner, reservation, self.find)

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


def _kind(part_type: str) -> MediumKind:
    return "video" if part_type == VIDEO_URL else "image"


def _upload(file_id: Raw, param: str, detail: Detail) -> Attachment:
    if not is_text(file_id) or len(memoryview(file_id)) > MAX_NAME_CHARS:
        text = f"{param} is {show(file_id)}; expected the id of a file"
        raise InvalidRequest(text, param=param)
    medium, shown = Medium(param=param, detail=detail), show(file_id)
    return Elsewhere(medium, NO_BYTES, msgspec.json.decode(file_id, type=str), shown)
