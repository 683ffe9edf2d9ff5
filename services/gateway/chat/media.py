"""The seam between chats and the files in them."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path

from msgspec import Raw

from services.gateway.chat.requests.json_body import plain
from services.gateway.chat.requests.unsupported import refuse_unsupported
from services.gateway.http.admission import Reservation
from services.gateway.mesh.job import Attachment, Prompt
from shared.settings.gateway import GatewayConfig
from shared.wire.messages import ModelInfo

OPTIONS = "mm_processor_kwargs"
IMAGE_URL = "image_url"


class Media:
    """The files in a gateway's chats; here there are none. Each method raises InvalidRequest.
    ``kinds`` are the types of parts with files."""

    kinds: Collection[str] = ()
    find: Callable[[str, str], Awaitable[Path | None]] | None = None
    """Finds the uploaded image with an id, of an owner."""

    def check(self, kind: str, param: str, model: ModelInfo) -> None:
        """Refuses the part ``param`` of type ``kind`` where the model takes none."""

    def attachment(
        self, part: Raw, param: str, role: str, files: Sequence[Attachment], model: ModelInfo
    ) -> Attachment:
        """The file of a part of one of ``kinds``, behind other ``files``."""
        raise NotImplementedError(param)

    def options(self, raw: Raw, has_files: bool) -> str:
        """``OPTIONS`` of a request as JSON text; empty: none. Without files it must be empty."""
        refuse_unsupported({OPTIONS: plain(raw)}, {OPTIONS: ({},)})
        return ""

    async def loaded(
        self, prompts: list[Prompt], owner: str, reservation: Reservation
    ) -> list[Prompt]:
        """The prompts with all bytes of their files."""
        return prompts


NO_MEDIA = Media()


def no_media(config: GatewayConfig) -> Media:
    return Media()
