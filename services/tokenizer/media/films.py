"""Frames of videos, decoded by PyAV."""

import io
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from PIL import Image
from PIL.Image import Transpose

# Named, since PyAV would try formats that open other files.
CONTAINERS = (
    (slice(4, 8), {b"ftyp": "mp4", b"moov": "mp4", b"mdat": "mp4", b"wide": "mp4"}),
    (slice(0, 4), {b"\x1a\x45\xdf\xa3": "matroska", b"RIFF": "avi"}),
)
CODECS = "h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mjpeg"
# Opening a file tries decoders of all its streams. These are libraries for the same codecs.
LIBRARIES = "libdav1d", "libaom-av1", "libvpx", "libvpx-vp9"
DECODERS = {"codec_whitelist": ",".join([*CODECS, *LIBRARIES])}
TURNS = {90: Transpose.ROTATE_90, 180: Transpose.ROTATE_180, 270: Transpose.ROTATE_270}
QUARTERS = 90, 270


def _imported() -> Any:
    """None if the package is not installed."""
    try:
        return import_module("av")
    except ImportError:
        return None


av = _imported()


class Unwatchable(Exception):
    """Why a file gives no frames."""


class VideoFile:
    """A file that PyAV decodes on one thread. ``width`` and ``height`` are of its frames as
    stored."""

    def __init__(self, data: bytes | bytearray) -> None:
        """Raises Unwatchable and errors of PyAV."""
        if av is None:
            raise Unwatchable(
                "is a video, and this server has no package av to decode it; install"
                " shoal[video], or send frames as data:video/jpeg;base64,…,…"
            )
        names = [kinds.get(bytes(data[place])) for place, kinds in CONTAINERS]
        self._format = next(filter(None, names), None)
        if self._format is None:
            raise Unwatchable("is no video in MP4, WebM, Matroska or AVI")
        self._data = data
        container, stream = self._open()
        with container:
            codec = stream.codec_context
            if stream.codec.canonical_name not in CODECS:
                raise Unwatchable(f"has the codec {codec.name}; expected {', '.join(CODECS)}")
            self.width, self.height = codec.width, codec.height
            self.fps = float(stream.average_rate or 0)
            if min(self.width, self.height) < 1 or self.fps <= 0:
                raise Unwatchable(
                    f"is a video of {self.width} x {self.height} pixels with {self.fps:g} frames a"
                    " second; expected more than none"
                )
            are_hidden = [each.is_discard for each in container.demux(stream) if each.size]
            ends = [each.pos + each.size for each in stream.index_entries]
            if max(ends, default=0) > len(data):
                raise Unwatchable(f"is a video of {stream.frames} frames that ends before the last")
            self.num_frames = len(are_hidden) - sum(are_hidden)

    def frames(self, numbers: Sequence[int]) -> Iterator[tuple[Image.Image, bool]]:
        """The frames of ascending ``numbers`` in RGB and upright, and whether each was turned by a
        quarter. Raises Unwatchable and errors of PyAV."""
        container, stream = self._open()
        with container:
            wanted = iter(numbers)
            number = next(wanted, None)
            for count, frame in enumerate(container.decode(stream)):
                if (frame.width, frame.height) != (self.width, self.height):
                    raise Unwatchable("is a video whose frames differ in size")
                while count == number:
                    turn = frame.rotation % 360
                    image = Image.fromarray(frame.to_ndarray(format="rgb24"))
                    upright = image.transpose(TURNS[turn]) if turn in TURNS else image
                    yield upright, turn in QUARTERS
                    number = next(wanted, None)
                if number is None:
                    return
        raise Unwatchable(f"is a video of {self.num_frames} frames without frame {number}")

    def _open(self) -> tuple[Any, Any]:
        container = av.open(io.BytesIO(self._data), format=self._format, options=DECODERS)
        if not container.streams.video:
            container.close()
            raise Unwatchable("has no video stream")
        stream = container.streams.video[0]
        stream.thread_type = "NONE"
        stream.codec_context.thread_count = 1
        return container, stream
