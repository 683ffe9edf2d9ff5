"""What a model's authors recommend for sampling: generation_config.json."""

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from shared.errors import ConfigError
from shared.model_folder import decode_json
from shared.wire.messages import SamplingDefaults
from shared.wire.sampling_fields import SamplingFields, with_fields

FILE = "generation_config.json"
AUTO, NONE = "auto", "none"


class _GenerationConfig(SamplingFields):
    """The keys that we read."""

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
    return with_fields(SamplingDefaults(), config), config.max_new_tokens
