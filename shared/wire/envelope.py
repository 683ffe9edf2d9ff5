"""The options of a request: made once by the gateway, passed unchanged to every service.

Messages carry them as the bytes of one row. Services pass the bytes on without decoding them, so an
option of a newer release passes through older services. The reader checks them.
"""

from hashlib import blake2b
from typing import Annotated

from msgspec import Meta, MsgspecError, Raw
from msgspec.msgpack import Decoder, Encoder

from shared.errors import CodecError
from shared.wire.messages import MAX_TRACED, AdapterDigest, Int32, Name, Priority, Row

MAX_OPTION_BYTES = 64 << 10  # a plan admits many sequences, each with its options
ROOT_FORMAT = 1
ROOT_BYTES = 16
MAX_PROMISE_MS = 86_400_000.0
MAX_RETENTION_S = 86_400

PromiseMs = Annotated[float, Meta(gt=0, le=MAX_PROMISE_MS)]
RetentionS = Annotated[int, Meta(ge=0, le=MAX_RETENTION_S)]


class Promise(Row, frozen=True, kw_only=True):
    """The milliseconds until the first token, and from each token to the next, that a client may
    expect; None: no promise."""

    ttft_ms: PromiseMs | None = None
    tpot_ms: PromiseMs | None = None


class RequestOptions(Row, frozen=True, kw_only=True):
    """``priority``: waiting sequences with a lower number come first. Only requests with the same
    ``salt`` share cached prefixes; the gateway derives it from the API key and the client's salt.

    ``owner`` names the API key; empty: there are no keys. If a request ``is_traced``, each service
    sends a SpanReport. ``num_worker_deaths`` counts workers of other cells that died while they
    computed it, before it got a token. ``left_scheduler`` handed it over, and gets it again only if
    there is no other. Without a ``promise`` the scheduler's defaults apply. ``adapter`` is the
    digest of the adapter that computes the request; only equal ones share cached prefixes. What it
    has computed stays in the prefix cache for ``retention_s`` seconds after its end, if possible.
    """

    priority: Priority = 0
    salt: Name = ""
    owner: Name = ""
    is_traced: bool = False
    num_worker_deaths: Int32 = 0
    left_scheduler: Name = ""
    promise: Promise | None = None
    adapter: AdapterDigest = ""
    retention_s: RetentionS = 0

    def traces(self, choice: int) -> bool:
        """True for the first choices of a traced prompt."""
        return self.is_traced and choice < MAX_TRACED


_encoder = Encoder()
_decoder = Decoder(RequestOptions)


def write_options(options: RequestOptions) -> Raw:
    return Raw(_encoder.encode(options))


def read_options(row: Raw) -> RequestOptions:
    """Raises CodecError."""
    if (num_bytes := len(memoryview(row))) > MAX_OPTION_BYTES:
        raise CodecError(f"options of {num_bytes} bytes; the limit is {MAX_OPTION_BYTES}")
    try:
        return _decoder.decode(row)
    except (MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CodecError(f"no options: {error}") from None


def hash_root(options: RequestOptions) -> bytes:
    """The 16-byte start of all block-hash chains of a sequence."""
    root = _encoder.encode((ROOT_FORMAT, options.salt, options.adapter or None))
    return blake2b(root, digest_size=ROOT_BYTES).digest()
