from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import pytest_asyncio

from services.tokenizer.media.pixel_cache import PixelCache
from services.tokenizer.media.readers import Readers
from services.tokenizer.media.reading import MediaReading
from services.tokenizer.text_model import TextModel
from shared.media.families import read_family
from shared.media.family import limits_of
from tests.media.checkpoints import MAX_LEN, MEDIA, save_checkpoint
from tests.media.references import Reference, reference

MAX_IMAGE_PIXELS = 1 << 20

MakeReading = Callable[..., MediaReading]

on_loop_of_module = pytest.mark.asyncio(loop_scope="module")  # that of ``readers``


@pytest.fixture(scope="session")
def checkpoint(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Qwen2.5-VL, or a module's families."""
    with TemporaryDirectory(prefix="shoal-") as folder:
        save_checkpoint(Path(folder), family=getattr(request, "param", "qwen2.5-vl"))
        yield Path(folder)


@pytest.fixture(scope="session")
def transformers(checkpoint: Path) -> Reference:
    return reference(checkpoint)


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> TextModel:
    return TextModel(checkpoint, MAX_LEN, 263)


class LastingReaders(Readers):
    """Its children outlive the readings of a test."""

    async def close(self) -> None:
        pass


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def readers() -> AsyncIterator[Readers]:
    readers = LastingReaders(2, MAX_IMAGE_PIXELS)
    yield readers
    await Readers.close(readers)


@pytest.fixture
def make_reading(checkpoint: Path, model: TextModel, readers: Readers) -> MakeReading:
    """For tests ``on_loop_of_module``."""

    def make(cache_bytes: int = 1 << 24) -> MediaReading:
        family = read_family(checkpoint)
        assert family is not None
        return MediaReading(
            family,
            dict(zip(family.kinds, MEDIA[2:], strict=False)),
            MAX_LEN,
            limits_of(family),
            4 * MAX_IMAGE_PIXELS,
            readers,
            PixelCache(cache_bytes),
            lambda text: model.encode(text, False),
        )

    return make
