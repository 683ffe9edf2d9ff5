"""The seams between a service and its optional parts: their messages, and the requests that not
every peer can have."""

from collections.abc import Callable, Iterable, Sequence

from shared.errors import RequestError
from shared.link.peer import Peer
from shared.wire.codec import Array
from shared.wire.envelope import RequestOptions
from shared.wire.messages import Message

Objection = Callable[[Peer, RequestOptions], RequestError | None]
"""The reason against sending a request with these options to a peer, or None."""


class Extension:
    """The end of an optional part of a service on the links of that service. Nothing here may
    block."""

    def on_up(self, peer: Peer) -> None:
        """A peer has come; the service knows it already."""

    def on_down(self, peer: Peer) -> None:
        """A peer is gone; the service has forgotten it."""

    def takes(self, peer: Peer, message: Message, arrays: Sequence[Array] = ()) -> bool:
        """Handles ``message`` with its buffers, or returns False if it is of another part. Raises
        CodecError for a message that does not fit."""
        return False


def is_taken(
    extensions: Iterable[Extension], peer: Peer, message: Message, arrays: Sequence[Array] = ()
) -> bool:
    """Gives ``message`` to the first extension that takes it; False if none does."""
    return any(each.takes(peer, message, arrays) for each in extensions)


def able(
    peers: Sequence[Peer], options: RequestOptions, objections: Iterable[Objection]
) -> list[Peer]:
    """Returns the ``peers`` that can have the request. Raises the error of an objection if it is
    against all of them."""
    left = list(peers)
    for objection in objections:
        errors = [objection(peer, options) for peer in left]
        left = [peer for peer, error in zip(left, errors, strict=True) if error is None]
        if errors and not left and errors[0] is not None:
            raise errors[0]
    return left
