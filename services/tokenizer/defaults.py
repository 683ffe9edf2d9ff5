"""What a model's authors recommend for sampling: generation_config.json."""

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from shared.errors import ConfigError
from shared.messages import SamplingDefaults
from shared.model_folder import decode_json

FILE = "generation_config.json"
AUTO, NONE = "auto", "none"


class _GenerationConfig(Struct):
    """The keys that we read; null means OpenAI's default."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None


def read_defaults(model: Path, setting: str) -> tuple[SamplingDefaults, int | None]:
    """What clients may leave out, and of how many tokens a text is then at most (None: no limit).

    ``setting`` is ``auto`` for the model's own folder, ``none``, or another folder.

    Raises ConfigError for a folder without the file, and for values that no client may send either.
    """
    folder = model if setting == AUTO else Path(setting)
    path = folder / FILE
    if setting == NONE or (setting == AUTO and not path.is_file()):
        return SamplingDefaults(), None
    if not path.is_file():
        raise ConfigError(f"generation-config: {setting} is auto, none, or a folder with {FILE}")
    config = decode_json(path, _GenerationConfig)
    plain = SamplingDefaults()
    defaults = SamplingDefaults(
        plain.temperature if config.temperature is None else config.temperature,
        max(config.top_k or 0, 0),
        config.top_p or plain.top_p,
        config.min_p or 0.0,
        config.repetition_penalty or plain.repetition_penalty,
    )
    return defaults, config.max_new_tokens
