"""The options of a request: the gateway makes them once, for all services."""

from shared.wire.messages import Int32, Name, Priority, Row


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
