"""The setting ``pooler-config``: the pooling of a model's hidden states."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt
from pydantic_settings import NoDecode

from shared.settings.json_object import reader_of

Text = Annotated[str, Field(min_length=1)]
RunnerSetting = Literal["auto", "generate", "pooling"]


class PoolerConfig(BaseModel):
    """Keys are vLLM's, of its pooler-config and, the last three, of its hf-overrides. The model's
    folder gives the defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    pooling_type: Literal["LAST", "MEAN", "CLS"] | None = None
    use_activation: bool | None = None
    classifier_from_token: Annotated[list[Text], Field(min_length=2, max_length=2)] | None = None
    is_matryoshka: bool | None = None
    matryoshka_dimensions: Annotated[list[PositiveInt], Field(min_length=1)] | None = None

    def __str__(self) -> str:
        return self.model_dump_json(exclude_none=True)

    def __bool__(self) -> bool:
        """True if anything is set."""
        return any(value is not None for _, value in self)


_read = reader_of(PoolerConfig, '{"pooling_type": "MEAN"}')

if TYPE_CHECKING:
    Pooler = PoolerConfig
else:  # a model class would add its keys as flags, and one of these would hide all keys of a file
    Pooler = Annotated[Any, NoDecode, BeforeValidator(_read)]

RUNNER: RunnerSetting = Field(
    "auto",
    description="generate: the model generates text; pooling: it returns embeddings or scores;"
    " auto: pooling if the model's folder or pooler-config asks for it",
)
POOLER_CONFIG: Pooler = Field(
    PoolerConfig(),
    description="pooling instead of the one in the model's folder, for example"
    ' {"pooling_type": "MEAN"}',
)
