"""``limit-mm-per-prompt``, in vLLM's forms."""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator
from pydantic_settings import NoDecode

from shared.settings.json_object import reader_of
from shared.wire.messages import MAX_MEDIA


class Limit(BaseModel):
    """The most files of each kind in a prompt."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    image: int = Field(32, ge=0, le=MAX_MEDIA)
    video: int = Field(4, ge=0, le=MAX_MEDIA)

    @field_validator("image", "video", mode="before")
    @classmethod
    def _read_count(cls, value: Any) -> Any:
        """Reads {"count": 4} as 4."""
        return value["count"] if isinstance(value, dict) and {*value} == {"count"} else value

    def __str__(self) -> str:
        return self.model_dump_json()


if TYPE_CHECKING:
    MediaLimit = Limit
else:  # a model class would add its keys as flags
    MediaLimit = Annotated[Any, NoDecode, BeforeValidator(reader_of(Limit, '{"image": 4}'))]
