"""A tokenizer says what its model takes, and checks its settings."""

from pathlib import Path

import pytest

from services.tokenizer.media.reading import MediaReading, media_for
from services.tokenizer.service import TokenizerService
from services.tokenizer.text_model import TextModel
from shared.errors import ConfigError, InvalidRequest
from shared.model_folder import EMBEDDED_MODEL
from shared.settings.tokenizer import TokenizerConfig
from shared.wire.messages import Convert, Medium


def test_a_tokenizer_tells_the_media_of_its_model(checkpoint: Path):
    for folder, kinds in ((checkpoint, (["image"], ["video"])), (EMBEDDED_MODEL, ([], []))):
        service = TokenizerService(TokenizerConfig(model=str(folder)))
        found = service._load()
        assert (found.media, found.more_media) == kinds
        service._lanes.close()


@pytest.mark.parametrize(
    ("kwargs", "problem"),
    [
        ({"frames": 2}, "frames"),
        ({"fps": 0}, "fps"),
        ({"fps": 1, "num_frames": 4}, "num_frames is given in addition to fps"),
        ({"max_pixels": 78401}, "78401 pixels; the limit is 78400"),
    ],
)
def test_settings_of_images_are_checked_at_the_start(
    checkpoint: Path, model: TextModel, kwargs: dict[str, int], problem: str
):
    config = TokenizerConfig(model=str(checkpoint), mm_processor_kwargs=kwargs)
    with pytest.raises(ConfigError, match=f"mm-processor-kwargs: .*{problem}"):
        media_for(model, checkpoint, config)


def test_settings_are_limits_of_requests_without_their_own(checkpoint: Path, model: TextModel):
    config = TokenizerConfig(model=str(checkpoint), mm_processor_kwargs={"max_pixels": 5000})
    reading = media_for(model, checkpoint, config)
    assert isinstance(reading, MediaReading)
    assert all(limits[:2] == (3136, 5000) for limits in reading._limits.values())
    options, media = '{"max_pixels": 5001}', [Medium(), Medium(kind="video")]
    for medium in media:
        large = Convert("c", "chat", False, media=[medium], media_options=options)
        with pytest.raises(InvalidRequest, match="5001 pixels; the limit is 5000"):
            reading._limits_of(large)
