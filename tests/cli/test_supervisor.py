"""The rules of restarting, with processes that are only pretended."""

import asyncio
from pathlib import Path
from typing import ClassVar

import pytest

from cli import supervisor as module
from cli.run_directory import RunDirectory
from cli.supervisor import StartFailedError, Supervisor
from shared.config import ServeConfig


class FakeChild:
    """Ends as ``script`` says: for each start of its service (exit code, whether it was ready)."""

    script: ClassVar[dict[str, list[tuple[int, bool]]]] = {}
    starts: ClassVar[list[str]] = []

    def __init__(self, service: str, instance: str, directory: Path) -> None:
        self.service, self.instance = service, instance
        self.was_ready = False
        self.last_line = f"last words of {instance}"
        self.status: dict[str, str] = {}

    async def run(self, environment, on_line) -> int:
        self.starts.append(self.instance)
        assert environment["SHOAL_INSTANCE"] == self.instance
        script = self.script.get(self.service, [])
        if not script:
            await asyncio.Event().wait()
        code, self.was_ready = script.pop(0)
        return code

    async def ask_status(self) -> None:
        pass


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch) -> Supervisor:
    monkeypatch.setattr(module, "Child", FakeChild)
    monkeypatch.setattr(module, "FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr(FakeChild, "script", {})
    monkeypatch.setattr(FakeChild, "starts", [])
    config = ServeConfig(mesh_dir=tmp_path)
    return Supervisor(config, RunDirectory(tmp_path), lambda line: None)


async def run(supervisor: Supervisor) -> None:
    await asyncio.wait_for(supervisor.run(lambda: None), 10)


async def test_three_failures_before_it_was_ever_ready_end_everything(supervisor: Supervisor):
    FakeChild.script = {"worker": [(1, False), (-9, False), (1, False)]}
    with pytest.RaisesGroup(pytest.RaisesExc(StartFailedError, match=r"words of worker-0\.3")):
        await run(supervisor)


async def test_a_wrong_setting_ends_everything_at_once(supervisor: Supervisor):
    FakeChild.script = {"gateway": [(2, False)]}
    with pytest.RaisesGroup(pytest.RaisesExc(StartFailedError, match=r"words of gateway-0\.1")):
        await run(supervisor)


async def test_what_was_ready_is_started_again_however_often_it_dies(supervisor: Supervisor):
    FakeChild.script = {"worker": [(1, False), (-9, True)] * 4 + [(2, False)]}
    with pytest.RaisesGroup(StartFailedError):
        await run(supervisor)
    assert [each for each in FakeChild.starts if "worker" in each] == [
        f"worker-0.{number}" for number in range(1, 10)
    ]


def test_a_directory_of_the_dead_is_swept_and_one_of_the_living_is_not(tmp_path: Path):
    (tmp_path / "99999999").mkdir()
    (tmp_path / "99999999" / "worker-0.sock").touch()
    (tmp_path / "not-ours").mkdir()
    living = RunDirectory(tmp_path)
    living.path.rename(tmp_path / "88888888")
    again = RunDirectory(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"88888888", "not-ours", again.path.name}
    assert again.path.stat().st_mode & 0o777 == 0o700
