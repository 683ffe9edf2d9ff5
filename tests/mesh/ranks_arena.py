"""A worker's first rank by itself: other ranks' connections and their descriptions."""

from pathlib import Path

from services.worker.ranks.followers import Followers
from services.worker.ranks.rank_settings import SERVICE
from shared.link.link import Link
from shared.settings.worker import WorkerConfig
from shared.wire.codec import Array
from shared.wire.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR, Hello, Message, RankInfo
from tests.mesh.arena_parts import Example, FakePeer, Lies


class RanksArena:
    """Another rank connects, while a third is missing, and is lost again."""

    def __init__(self, directory: Path) -> None:
        config = WorkerConfig(mesh_dir=directory, instance="w", tensor_parallel_size=3)
        ours = RankInfo(0, {"dtype": "float32"})
        self._followers = Followers(config)
        self._followers._info = ours
        self._link = Link(self._hello("w", ours), self._followers, None)
        self._followers._link = self._link
        self.examples: list[Example] = [(self._hello("w.1", RankInfo(1, ours.settings)), [])]
        self.lies: Lies = {
            "a rank too many, with other settings": (0, self._hello("w.3", RankInfo(3, {})), []),
        }

    def _hello(self, instance: str, rank: RankInfo) -> Hello:
        return Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, SERVICE, instance, rank=rank)

    async def close(self) -> None:
        await self._link.close("the end")

    async def take(self, index: int, message: Message, arrays: list[Array]) -> bool:
        if self._link.refusal(message, SERVICE) is not None or not isinstance(message, Hello):
            return False
        peer = FakePeer(message)
        self._link.up(peer)
        assert len(self._followers._awaited) == 1
        self._link.down(peer, "the end", is_lost=True)
        assert self._followers._awaited == {1, 2}
        return True
