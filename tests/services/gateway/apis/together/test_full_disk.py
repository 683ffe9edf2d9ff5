"""Files, batches and stored responses on a full disk, a small one of its own."""

import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from services.gateway.apis.batches import runner
from services.gateway.apis.responses import background
from tests.services.gateway.apis.batches.test_batches import (
    ASKED,
    answering,
    batch_file,
    ended,
    results,
    start,
)
from tests.services.gateway.apis.responses.test_background import until_status
from tests.services.gateway.fakes import FakeTokenizer, until
from tests.services.gateway.openai_client import client_of, clients, gateway_of

DISK_BYTES = 1 << 20


class SmallDisk:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def fill(self) -> None:
        with self._filler.open("wb", buffering=0) as file:
            for num_bytes in (1 << 16, 1 << 10, 1):
                try:
                    while file.write(b"x" * num_bytes):
                        pass
                except OSError:
                    continue

    def empty(self) -> None:
        self._filler.unlink()

    def paths(self) -> set[Path]:
        return {path for path in self.path.rglob("*") if path.is_file()}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    (path := tmp_path / "disk").mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=700", "none", str(path)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


async def test_a_file_that_finds_no_room_is_named_and_harms_nobody(
    tmp_path: Path, tokenizer: FakeTokenizer, disk: SmallDisk
):
    async with clients(tmp_path, batch_dir=disk.path / "batches") as client, answering(tokenizer):
        small = await client.files.create(file=("a.jsonl", batch_file(3)), purpose="batch")
        before = disk.paths()
        large = ("b.jsonl", b"x" * (2 * DISK_BYTES))
        with pytest.raises(openai.InternalServerError, match=r"batch-dir.*[Nn]o space") as refused:
            await client.files.create(file=large, purpose="batch")
        assert (refused.value.status_code, refused.value.code) == (507, "storage_error")
        assert disk.paths() == before, "its part is removed"
        assert [each.id async for each in client.files.list()] == [small.id]
        batch = await client.batches.create(**ASKED, input_file_id=small.id)
        assert (await ended(client, batch.id)).status == "completed"


async def test_a_batch_waits_for_room_and_loses_no_line(
    tmp_path: Path,
    tokenizer: FakeTokenizer,
    disk: SmallDisk,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setattr(runner, "PAUSE_S", 0.2)
    folder = disk.path / "batches"
    async with (
        clients(tmp_path, batch_dir=folder) as client,
        answering(tokenizer, pause_s=0.002) as seen,
    ):
        created = await start(client, batch_file(300))
        await until(lambda: len(seen) >= 20)
        disk.fill()
        await until(lambda: "has to wait: " in caplog.text)
        with pytest.raises(openai.InternalServerError, match="batch-dir") as refused:
            await client.batches.create(**ASKED, input_file_id=created.input_file_id)
        assert refused.value.status_code == 507
        chat = await client.completions.create(model="fish", prompt="Hi", max_tokens=2)
        assert chat.choices[0].text == "a b"
        assert (await client.batches.retrieve(created.id)).status == "in_progress"
        disk.empty()
        batch = await ended(client, created.id)
        found = await results(client, batch.output_file_id)
    assert batch.status == "completed"
    assert Counter(each["custom_id"] for each in found) == {f"line-{n}": 1 for n in range(300)}


async def test_a_response_that_cannot_be_kept_fails_and_no_other_does(
    tmp_path: Path, tokenizer: FakeTokenizer, disk: SmallDisk
):
    async with (
        clients(tmp_path, response_store=disk.path / "store.db") as client,
        answering(tokenizer),
    ):
        before = await client.responses.create(model="fish", input="Hi")
        disk.fill()
        with pytest.raises(openai.InternalServerError) as refused:
            await client.responses.create(model="fish", input="x" * 100_000, store=True)
        assert (refused.value.status_code, refused.value.code) == (507, "response_store_failed")
        unkept = await client.responses.create(model="fish", input="Hi", store=False)
        assert unkept.output_text == "a b"
        assert (await client.responses.retrieve(before.id)).to_dict() == before.to_dict()
        disk.empty()
        after = await client.responses.create(model="fish", input="x" * 100_000)
        assert (await client.responses.retrieve(after.id)).output_text == "a b"


async def test_one_in_the_background_fails_when_there_is_room_to_say_so(
    tmp_path: Path, tokenizer: FakeTokenizer, disk: SmallDisk, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(background, "PAUSE_S", 0.1)
    async with (
        gateway_of(tmp_path, response_store=disk.path / "store.db") as gateway,
        client_of(gateway) as client,
    ):
        created = await client.responses.create(model="fish", input="x" * 100_000, background=True)
        submitted = await tokenizer.accepted()
        disk.fill()
        submitted.text("Hello")
        submitted.finish()
        await until(lambda: gateway.status().load == 0)
        assert (await client.responses.retrieve(created.id)).status in ("queued", "in_progress")
        disk.empty()
        found = await until_status(client, created.id, "failed")
        assert found.error.code == "response_store_failed"


async def test_two_gateways_find_each_others_responses_on_a_full_disk(
    tmp_path: Path, tokenizer: FakeTokenizer, disk: SmallDisk
):
    store = disk.path / "store.db"
    async with (
        gateway_of(tmp_path, response_store=store) as first,
        gateway_of(tmp_path, response_store=store, instance="g2") as second,
        client_of(first) as client,
        client_of(second) as other,
        answering(tokenizer),
    ):
        kept = await client.responses.create(model="fish", input="Hi")
        disk.fill()
        assert (await other.responses.retrieve(kept.id)).to_dict() == kept.to_dict()
