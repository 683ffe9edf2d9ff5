"""Settings of images, videos and other files in prompts."""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator
from pydantic_settings import NoDecode

from shared.settings.base import Settings
from shared.settings.fields import JsonObject, Names
from shared.settings.json_object import reader_of
from shared.wire.messages import MAX_MEDIA


class Limit(BaseModel):
    """The most files of each kind in a prompt, in the forms of vLLM's ``limit-mm-per-prompt``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    image: int = Field(32, ge=0, le=MAX_MEDIA)
    video: int = Field(4, ge=0, le=MAX_MEDIA)
    audio: int = Field(0, ge=0, le=0)  # not supported

    @field_validator("image", "video", "audio", mode="before")
    @classmethod
    def _read_count(cls, value: Any) -> Any:
        """Reads {"count": 4} as 4."""
        return value["count"] if isinstance(value, dict) and {*value} == {"count"} else value

    def __str__(self) -> str:
        return self.model_dump_json(exclude={"audio"})


if TYPE_CHECKING:
    MediaLimit = Limit
else:  # a model class would add its keys as flags
    MediaLimit = Annotated[Any, NoDecode, BeforeValidator(reader_of(Limit, '{"image": 4}'))]


class MediaRequests(Settings):
    """Of a gateway."""

    limit_mm_per_prompt: MediaLimit = Field(
        Limit(), description='most files of a request, such as {"image": 4, "video": 1}'
    )
    allowed_media_domains: Names = Field(
        [], description="hosts of fetched files, such as a.example,minio:9000; *: any public one"
    )


class MediaReading(Settings):
    """Of a tokenizer."""

    mm_processor_kwargs: JsonObject = Field(
        {},
        description="limits of images within the model's, and a request's within these in its"
        " mm_processor_kwargs: min_pixels, max_pixels, or size, for example"
        ' {"max_pixels": 1003520}',
    )
    mm_processor_cache_gb: float = Field(
        1.0, ge=0, le=1024, description="GiB of memory for the pixels of images that were read"
    )
    max_image_pixels: int = Field(
        64 << 20,
        gt=0,
        le=1 << 30,
        description="most pixels of an image in its file; above 400",
    )
    media_readers: int = Field(
        2, gt=0, le=64, description="processes that read images; they start with the first one"
    )


class MediaMemory(Settings):
    """Of a scheduler."""

    max_media_bytes: int = Field(
        2 << 30, gt=0, description="pixels of images in open requests; above it 503"
    )
