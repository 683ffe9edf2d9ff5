"""Commands at the admin port, and refused requests."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from shared.process.admin import AdminServer
from shared.settings.scheduler import SchedulerConfig
from shared.wire.messages import Heartbeat, State

HEADER = {"X-Shoal-Admin": "1"}


class Counting(Any):
    num = 0

    def status(self) -> Heartbeat:
        return Heartbeat(State.READY, "", 0, 0)

    def commands(self):
        return {"count": self.count}

    def count(self) -> None:
        self.num += 1


@pytest.mark.parametrize(
    ("token", "headers", "status"),
    [
        (None, HEADER, 200),
        (None, {}, 403),
        (None, {"X-Shoal-Admin": "yes"}, 403),
        ("secret", HEADER | {"Authorization": "Bearer secret"}, 200),
        ("secret", HEADER, 401),
        ("secret", HEADER | {"Authorization": "Bearer secreT"}, 401),
        ("secret", HEADER | {"Authorization": "Bearer \udcff"}, 401),
        ("secret", {"Authorization": "Bearer secret"}, 403),
    ],
)
async def test_a_command_needs_its_header_and_the_token_where_there_is_one(
    tmp_path: Path, unused_tcp_port: int, token: str | None, headers, status: int
):
    service = Counting()
    port = unused_tcp_port
    config = SchedulerConfig(mesh_dir=tmp_path, admin_port=port, admin_token=token)
    url = f"http://127.0.0.1:{port}"
    async with AdminServer(service, "scheduler", config), aiohttp.ClientSession(url) as session:
        async with session.post("/count", headers=headers) as response:
            assert response.status == status
        assert service.num == (status == 200)
        async with session.get("/metrics") as response:
            assert response.status == 200


def test_the_token_is_not_shown(tmp_path: Path):
    config = SchedulerConfig(mesh_dir=tmp_path, admin_token="secret")
    assert "secret" not in config.describe()
