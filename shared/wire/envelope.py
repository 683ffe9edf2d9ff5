"""The options of a request: the gateway makes them once, and every service gets them whole.

Messages carry them as the bytes of one row. A service that passes them on does not decode them, so
an option of a newer release passes through older services; the reader checks them.
"""

from hashlib import blake2b

from msgspec import MsgspecError, Raw
from msgspec.msgpack import Decoder, Encoder

from shared.errors import CodecError
from shared.wire.messages import MAX_TRACED, Int32, Name, Priority, Row

MAX_OPTION_BYTES = 64 << 10  # a plan admits many sequences, each with its options
ROOT_FORMAT = 1
ROOT_BYTES = 16


class RequestOptions(Row, frozen=True, kw_only=True):
    """``priority``: of two sequences that wait the lower number comes first. Only requests with the
    same ``salt`` share cached prefixes; the gateway makes it of the API key and the client's salt.

    ``owner`` names the API key; empty: there are no keys. If a request ``is_traced``, each service
    sends a SpanReport. ``num_worker_deaths`` counts workers of other cells that died while they
    computed it and no token came. ``left_scheduler`` handed it over, and gets it again only if
    there is no other.
    """

    priority: Priority = 0
    salt: Name = ""
    owner: Name = ""
    is_traced: bool = False
    num_worker_deaths: Int32 = 0
    left_scheduler: Name = ""

    def traces(self, choice: int) -> bool:
        """Only the first choices of a prompt are traced."""
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
    """The hash that all block hashes of a sequence begin with: 16 bytes."""
    root = _encoder.encode((ROOT_FORMAT, options.salt, None))  # nil: no adapter
    return blake2b(root, digest_size=ROOT_BYTES).digest()
