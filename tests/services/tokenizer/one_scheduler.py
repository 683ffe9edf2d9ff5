"""A tokenizer's schedulers when there is one, in any state."""

from typing import Any

from services.tokenizer.schedulers import Schedulers


class OneScheduler(Schedulers):
    """It may be None, for no scheduler."""

    def __init__(self, peer: Any) -> None:
        self._peer = peer

    def choose(self, generate: Any, options: Any, ids: Any) -> Any:
        return self._peer

    def note_end(self, peer: Any, num: int) -> None:
        pass
