"""The setting ``speculative-config``: the drafter and the number of drafts."""

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_settings import NoDecode

from shared.settings.json_object import reader_of
from shared.settings.known import NAMES
from shared.wire.messages import MAX_SPECULATIVE_TOKENS


class SpeculativeConfig(BaseModel):
    """A worker's drafting; keys are vLLM's, ``adaptive`` and ``draft_vocab_…``. ``model`` is the
    folder or name of an EAGLE-3 head or, for MTP, of a Gemma 4's assistant model."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    method: Literal["mtp", "eagle3", "ngram", "none"] | None = None
    num_speculative_tokens: int | None = Field(default=None, ge=1, le=MAX_SPECULATIVE_TOKENS)
    adaptive: bool = True
    prompt_lookup_min: int | None = Field(default=None, ge=1, le=64)
    prompt_lookup_max: int | None = Field(default=None, ge=1, le=64)
    draft_vocab_size: int | None = Field(default=None, ge=1)
    draft_vocab_file: str | None = Field(default=None, min_length=1)
    model: str | None = Field(default=None, min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _read_foreign(cls, given: dict[str, Any]) -> dict[str, Any]:
        return NAMES.speculation(given)

    @model_validator(mode="after")
    def _check_lookup(self) -> Self:
        low, high = self.lookup_lens
        if low > high:
            raise ValueError(f"prompt_lookup_min {low} is above prompt_lookup_max {high}")
        return self

    @model_validator(mode="after")
    def _check_draft_vocab(self) -> Self:
        if self.method not in ("mtp", None) and self.limits_vocab:
            raise ValueError(f"draft_vocab_… is for method mtp; method is {self.method}")
        return self

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        if self.method == "eagle3" and self.model is None:
            raise ValueError("model: method eagle3 needs the folder or name of its draft model")
        return self

    def __str__(self) -> str:
        return self.model_dump_json(exclude_unset=True)

    @property
    def limits_vocab(self) -> bool:
        """True if an MTP head drafts only some tokens of the vocabulary."""
        return self.draft_vocab_size is not None or self.draft_vocab_file is not None

    @property
    def lookup_lens(self) -> tuple[int, int]:
        """The lengths of the shortest and the longest n-gram to look up; a missing one follows the
        other."""
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        return low or min(2, high or 2), high or max(4, low or 4)


_read = reader_of(SpeculativeConfig, '{"method": "ngram"}')

if TYPE_CHECKING:
    Speculative = SpeculativeConfig
else:  # a model class would add its keys as flags, and one of these would hide all keys of a file
    Speculative = Annotated[Any, NoDecode, BeforeValidator(_read)]
