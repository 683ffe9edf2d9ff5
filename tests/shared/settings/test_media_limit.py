"""The forms of limit-mm-per-prompt."""

from typing import Any

import pytest
from pydantic import ValidationError

from shared.settings.gateway import GatewayConfig


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({}, 32),
        ('{"image": 4}', 4),
        ({"image": 0, "video": 0}, 0),
        ('{"image": 100, "video": 100}', 100),
        ('{"image": {"count": 5}}', 5),
    ],
)
def test_the_forms(value: Any, expected: int) -> None:
    assert GatewayConfig(limit_mm_per_prompt=value).limit_mm_per_prompt.image == expected


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("image=4", 'such as {"image": 4}'),
        ({"image": -1}, "image: must be greater than or equal to 0"),
        ({"image": 1025}, "image: must be less than or equal to 1024"),
        ({"image": {"count": 5, "width": 9}}, "image: must be a valid integer"),
        ({"video": 1025}, "video: must be less than or equal to 1024"),
        ({"audio": 1}, "audio: must be less than or equal to 0"),
        ({"sound": 1}, "sound: no such key; known keys: image, video, audio"),
    ],
)
def test_others_are_refused(value: Any, text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        GatewayConfig(limit_mm_per_prompt=value)
    assert text in str(caught.value)
