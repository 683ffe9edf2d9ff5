"""``/v1/files`` and ``/v1/batches`` with OpenAI's own client, against gateways with a scripted
tokenizer."""

import asyncio
import gc
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from services.gateway.apis.batches import files
from services.gateway.apis.batches.endpoint import BatchesApi
from services.gateway.apis.batches.folder import BatchFolder, BatchKey
from services.gateway.apis.batches.objects import StoredBatch
from services.gateway.apis.batches.runner import BatchRunner
from services.gateway.service import GatewayService
from shared.batch.results import NotWritten
from shared.batch.run import BatchRun
from shared.wire.envelope import read_options
from tests.services.gateway.client import Client, raw_answer, with_settings
from tests.services.gateway.fakes import FakeTokenizer, until
from tests.services.gateway.openai_client import client_of, clients, gateway_of

KEYS = ["key-of-ann", "key-of-bob"]
ASKED: Any = {"endpoint": "/v1/completions", "completion_window": "24h"}
FILE_CALLS = ("retrieve", "content", "delete")


def runner_of(gateway: GatewayService) -> BatchRunner:
    (api,) = (api for api in gateway._apis if isinstance(api, BatchesApi))
    assert api._runner is not None
    return api._runner


def body(prompt: str = "hello") -> dict[str, Any]:
    return {"model": "fish", "prompt": prompt, "max_tokens": 2}


def batch_file(num: int, **fields: Any) -> bytes:
    whole = {"method": "POST", "url": "/v1/completions", "body": body()} | fields
    return b"".join(
        json.dumps({"custom_id": f"line-{number}"} | whole).encode() + b"\n"
        for number in range(num)
    )


@asynccontextmanager
async def answering(tokenizer: FakeTokenizer, pause_s: float = 0) -> AsyncIterator[list[Any]]:
    """Answers all requests, each after ``pause_s``; yields the submitted ones."""
    seen: list[Any] = []

    async def answer() -> None:
        while True:
            seen.append((await tokenizer.answer("a", " b")).submit)
            await asyncio.sleep(pause_s)

    task = asyncio.create_task(answer())
    try:
        yield seen
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def start(client: AsyncOpenAI, data: bytes, window: str = "24h") -> openai.types.Batch:
    file = await client.files.create(file=("in.jsonl", data), purpose="batch")
    assert (file.object, file.bytes, file.purpose) == ("file", len(data), "batch")
    asked = ASKED | {"completion_window": window, "metadata": {"night": "1"}}
    return await client.batches.create(**asked, input_file_id=file.id)


async def ended(client: AsyncOpenAI, batch_id: str) -> openai.types.Batch:
    async with asyncio.timeout(30):
        while True:
            batch = await client.batches.retrieve(batch_id)
            if batch.status in ("completed", "failed", "expired", "cancelled"):
                return batch
            await asyncio.sleep(0.05)


async def results(client: AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    text = (await client.files.content(file_id)).text
    return [json.loads(line) for line in text.splitlines()]


async def test_a_batch_is_answered_as_openais_client_knows_it(
    tmp_path: Path, tokenizer: FakeTokenizer
):
    async with clients(tmp_path) as client:
        bad = batch_file(1, custom_id="bad", body={"model": "whale", "prompt": "x"})
        async with answering(tokenizer) as seen:
            created = await start(client, batch_file(20) + bad)
            assert created.status == "validating"
            batch = await ended(client, created.id)
        assert batch.status == "completed", batch
        assert batch.metadata == {"night": "1"}
        assert batch.expires_at == batch.created_at + 86400
        assert None not in (batch.in_progress_at, batch.finalizing_at, batch.completed_at)
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (21, 20, 1)
        good = await results(client, batch.output_file_id)
        assert sorted(each["custom_id"] for each in good) == sorted(
            f"line-{number}" for number in range(20)
        )
        for each in good:
            assert each["error"] is None
            assert each["response"]["status_code"] == 200
            assert each["response"]["request_id"]
            assert each["response"]["body"]["choices"][0]["text"] == "a b"
        (failed,) = await results(client, batch.error_file_id)
        assert failed["custom_id"] == "bad"
        assert failed["response"]["status_code"] == 404
        assert failed["response"]["body"]["error"]["code"] == "model_not_found"
        assert {read_options(submit.options).priority for submit in seen} == {100}, (
            "behind those of interactive clients"
        )
        files = [each async for each in client.files.list()]
        assert {each.id for each in files} == {
            batch.input_file_id,
            batch.output_file_id,
            batch.error_file_id,
        }
        deleted = await client.files.delete(batch.input_file_id)
        assert deleted.deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(batch.input_file_id)


async def test_lists_have_pages(tmp_path: Path, tokenizer: FakeTokenizer):
    async with clients(tmp_path) as client:
        async with answering(tokenizer):
            ids = {(await start(client, batch_file(1))).id for _ in range(5)}
            for batch_id in ids:
                await ended(client, batch_id)
        pages = await client.batches.list(limit=2)
        assert len(pages.data) == 2
        assert pages.has_more
        assert {batch.id async for batch in client.batches.list(limit=2)} == ids
        assert len([file async for file in client.files.list(purpose="batch_output")]) == 5
        with pytest.raises(openai.BadRequestError, match="limit is"):
            await client.batches.list(limit=101)
        with pytest.raises(openai.BadRequestError, match="after is"):
            await client.batches.list(after="batch_x")


@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        (b"\n", "empty_file", "no line"),
        (batch_file(6), "too_many_requests", "max-batch-requests = 5"),
        (batch_file(1) + b"{\n", "invalid_json_line", "line 2"),
        (batch_file(2, custom_id="a"), "duplicate_custom_id", "in line 1 and in line 2"),
        (batch_file(1, url="/v1/embeddings"), "mismatched_url", "/v1/completions"),
        (batch_file(1, body={"prompt": "x" * 2000}), "line_too_long", "1500 bytes"),
    ],
)
async def test_a_wrong_file_fails_before_anything_is_sent(
    tmp_path: Path, tokenizer: FakeTokenizer, data: bytes, code: str, words: str
):
    limits = {"max_batch_requests": 5, "max_body_bytes": 1500}
    async with clients(tmp_path, **limits) as client:
        batch = await ended(client, (await start(client, data)).id)
    assert batch.status == "failed"
    assert batch.failed_at
    assert [error.code for error in batch.errors.data] == [code]
    assert words in batch.errors.data[0].message
    assert tokenizer.submitted.empty()


async def test_files_and_batches_belong_to_their_key(tmp_path: Path, tokenizer: FakeTokenizer):
    async with gateway_of(tmp_path, api_key=KEYS) as gateway:
        ann, bob = (client_of(gateway, key) for key in KEYS)
        async with ann, bob, answering(tokenizer) as seen:
            batch = await ended(ann, (await start(ann, batch_file(3))).id)
            assert batch.request_counts.completed == 3
            assert len({read_options(submit.options).owner for submit in seen}) == 1
            for asked in (
                *(ask(batch.id) for ask in (bob.batches.retrieve, bob.batches.cancel)),
                *(getattr(bob.files, ask)(batch.output_file_id) for ask in FILE_CALLS),
                bob.batches.create(**ASKED, input_file_id=batch.input_file_id),
            ):
                with pytest.raises(openai.NotFoundError):
                    await asked
            assert [each async for each in bob.files.list()] == []
            assert [each async for each in bob.batches.list()] == []
        async with client_of(gateway, "key-of-none") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.files.list()


async def test_a_key_with_many_batches_leaves_others_their_turn(
    tmp_path: Path, tokenizer: FakeTokenizer
):
    async with (
        clients(tmp_path, *KEYS, max_open_batch_requests=4) as (ann, bob),
        answering(tokenizer, pause_s=0.01) as seen,
    ):
        large = [await start(ann, batch_file(300)) for _ in range(6)]
        await until(lambda: len(seen) >= 4)
        num_seen = len(seen)
        small = await ended(bob, (await start(bob, batch_file(1))).id)
        assert small.status == "completed"
        assert len(seen) < num_seen + 300
        found = [await ann.batches.retrieve(each.id) for each in large]
        assert {each.status for each in found} <= {"validating", "in_progress"}


async def test_a_key_that_has_used_up_its_tokens_holds_no_place(
    tmp_path: Path, tokenizer: FakeTokenizer
):
    keys = tmp_path / "keys"
    keys.write_text(f"{KEYS[0]} max-tokens-per-minute=1\n{KEYS[1]}\n")
    async with gateway_of(tmp_path, api_key_file=keys, max_open_batch_requests=1) as gateway:
        ann, bob = (client_of(gateway, key) for key in KEYS)
        async with ann, bob, answering(tokenizer) as seen:
            await start(ann, batch_file(3))
            await until(lambda: seen)
            small = await ended(bob, (await start(bob, batch_file(3))).id)
            assert small.request_counts.completed == 3


async def test_batches_of_a_key_have_a_limit(tmp_path: Path, tokenizer: FakeTokenizer):
    async with clients(tmp_path, *KEYS, max_batches_per_key=2) as (ann, bob):
        created = [await start(ann, batch_file(1)) for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match="max-batches-per-key = 2"):
            await start(ann, batch_file(1))
        await start(bob, batch_file(1))
        await ann.batches.cancel(created[0].id)
        await ended(ann, created[0].id)
        await start(ann, batch_file(1))


async def test_a_start_reads_no_batch_that_has_ended(
    tmp_path: Path, tokenizer: FakeTokenizer, monkeypatch: pytest.MonkeyPatch
):
    async with gateway_of(tmp_path) as gateway, client_of(gateway) as client, answering(tokenizer):
        ids = {(await start(client, batch_file(1))).id for _ in range(3)}
        for batch_id in ids:
            await ended(client, batch_id)
    read: list[BatchKey] = []
    open_batch = BatchFolder.open_batch

    def noted(self: BatchFolder, key: BatchKey) -> StoredBatch | None:
        read.append(key)
        return open_batch(self, key)

    monkeypatch.setattr(BatchFolder, "open_batch", noted)
    async with gateway_of(tmp_path) as gateway, client_of(gateway) as client:
        async with answering(tokenizer):
            created = await start(client, batch_file(1))
            until_ended = runner_of(gateway).folder.batch  # not a request, which would read it
            await until(lambda: until_ended(BatchKey("", created.id)).batch.has_ended)
        assert {key.id for key in read} == {created.id}
        assert {each.id async for each in client.batches.list()} == ids | {created.id}


async def test_a_batch_that_cannot_be_read_stops_no_other(
    tmp_path: Path, tokenizer: FakeTokenizer, caplog: pytest.LogCaptureFixture
):
    folder = tmp_path / "store" / "batches" / "none"
    folder.mkdir(parents=True)
    broken = BatchKey("", f"batch_{0:024}")
    (folder / f"{broken.id}.json").write_text("{")
    async with clients(tmp_path) as client, answering(tokenizer):
        await until(lambda: f"batch {broken.id} has to wait" in caplog.text)
        assert (await ended(client, (await start(client, batch_file(1))).id)).status == "completed"


async def test_clients_that_take_all_threads_for_files_stop_no_batch(
    tmp_path: Path, tokenizer: FakeTokenizer
):
    release = threading.Event()
    async with gateway_of(tmp_path) as gateway, client_of(gateway) as client:
        created = await start(client, batch_file(3))
        runner = runner_of(gateway)
        slow = [asyncio.create_task(runner.threads.run("", release.wait)) for _ in range(40)]
        await asyncio.sleep(0)
        async with answering(tokenizer):
            key = BatchKey("", created.id)
            await until(lambda: runner.folder.batch(key).batch.status == "completed")
        release.set()
        await asyncio.gather(*slow)


@with_settings(batch_dir=Path("store"), instance="g1", api_key=KEYS)
async def test_clients_cannot_say_that_they_are_a_batch(client: Client):
    assert (await client.get("/v1/files", X_Shoal_Owner="")).status == 401


async def test_a_batch_whose_key_is_gone_fails(tmp_path: Path, tokenizer: FakeTokenizer):
    async with gateway_of(tmp_path, api_key=KEYS) as gateway, client_of(gateway, KEYS[0]) as ann:
        created = await start(ann, batch_file(3))
        await tokenizer.accepted()
    ended_folder = tmp_path / "store" / "ended"
    async with gateway_of(tmp_path, api_key=KEYS[1:]):
        await until(lambda: [*ended_folder.glob(f"*/{created.id}.json")])
    [store] = ended_folder.glob(f"*/{created.id}.json")
    batch = json.loads(store.read_bytes())["batch"]
    assert batch["status"] == "failed"
    assert [error["code"] for error in batch["errors"]["data"]] == ["invalid_api_key"]


async def test_a_cancelled_batch_keeps_its_results(tmp_path: Path, tokenizer: FakeTokenizer):
    async with clients(tmp_path, max_open_batch_requests=2) as client:
        created = await start(client, batch_file(10))
        for _ in range(2):
            await tokenizer.answer("a", " b")
        await tokenizer.accepted()
        with pytest.raises(openai.BadRequestError, match="cancel it first"):
            await client.files.delete(created.input_file_id)
        assert (await client.batches.cancel(created.id)).status == "cancelling"
        batch = await ended(client, created.id)
        assert batch.status == "cancelled"
        assert None not in (batch.cancelling_at, batch.cancelled_at)
        assert len(await results(client, batch.output_file_id)) == 2
        await asyncio.wait_for(tokenizer.cancelled.get(), 10)
        with pytest.raises(openai.BadRequestError, match="is cancelled"):
            await client.batches.cancel(created.id)


async def test_an_error_in_the_moment_of_a_cancellation_ends_nothing(
    tmp_path: Path, tokenizer: FakeTokenizer, monkeypatch: pytest.MonkeyPatch
):
    unretrieved: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, found: unretrieved.append(found))

    async def run(self: BatchRun, num_at_once: int) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise NotWritten("the disk is full") from None

    monkeypatch.setattr(BatchRun, "run", run)
    async with clients(tmp_path) as client:
        created = await start(client, batch_file(1))
        await client.batches.cancel(created.id)
        assert (await ended(client, created.id)).status == "cancelled"
    gc.collect()
    assert not unretrieved


async def test_a_batch_that_expires_says_so_for_each_line_that_is_left(
    tmp_path: Path, tokenizer: FakeTokenizer
):
    async with clients(tmp_path, max_open_batch_requests=2) as client:
        created = await start(client, batch_file(10))
        await tokenizer.answer("a", " b")
        store = tmp_path / "store" / "batches" / "none" / f"{created.id}.json"
        await until(store.exists)
    stored = json.loads(store.read_bytes())
    stored["batch"]["expires_at"] = 1
    store.write_text(json.dumps(stored))
    async with clients(tmp_path) as client:
        batch = await ended(client, created.id)
        assert batch.status == "expired"
        assert batch.expired_at
        left = await results(client, batch.error_file_id)
        num_good = batch.request_counts.completed
    assert {each["error"]["code"] for each in left} == {"batch_expired"}
    assert len({each["custom_id"] for each in left}) == len(left) == 10 - num_good


async def test_another_gateway_goes_on_and_two_never_run_one_batch(
    tmp_path: Path, tokenizer: FakeTokenizer
):
    """The first gateway ends in the middle; the second has watched the batch all the while."""
    async with (
        answering(tokenizer, pause_s=0.01) as seen,
        gateway_of(tmp_path, instance="g2") as second,
        client_of(second) as client,
    ):
        async with gateway_of(tmp_path, max_open_batch_requests=2) as first:
            async with client_of(first) as other:
                created = await start(other, batch_file(150))
                async with asyncio.timeout(20):
                    while (await client.batches.retrieve(created.id)).request_counts.total == 0:
                        await asyncio.sleep(0.02)
            await until(lambda: len(seen) > 20)
        batch = await ended(client, created.id)
        good = await results(client, batch.output_file_id)
    assert batch.status == "completed"
    assert Counter(each["custom_id"] for each in good) == {f"line-{n}": 1 for n in range(150)}
    assert len(seen) <= 150 + 2 + 16, "only requests open at the first end are repeated"


async def test_without_a_folder_the_routes_name_the_setting(gateway: GatewayService):
    async with client_of(gateway) as client:
        for asked in (
            client.files.create(file=("in.jsonl", b"{}"), purpose="batch"),
            client.files.list(),
            client.batches.retrieve("batch_1"),
            client.batches.create(**ASKED, input_file_id="f"),
        ):
            with pytest.raises(openai.NotFoundError, match="batch-dir"):
                await asked


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"purpose": "fine-tune"}, "purpose is"),
        ({"purpose": "p" * 3000}, "purpose has more than 1024 bytes"),
        (
            {"extra_body": {"expires_after": {"anchor": "created_at", "seconds": 9}}},
            "expires_after",
        ),
        ({"file": ("in.jsonl", b"x" * 5000)}, "max-file-bytes = 4000"),
    ],
)
async def test_uploads_that_are_refused_leave_nothing(
    tmp_path: Path, tokenizer: FakeTokenizer, fields: dict[str, Any], words: str
):
    async with clients(tmp_path, max_file_bytes=4000) as client:
        asked: dict[str, Any] = {"file": ("in.jsonl", b"{}"), "purpose": "batch"} | fields
        with pytest.raises(openai.APIStatusError, match=words) as caught:
            await client.files.create(**asked)
        assert caught.value.status_code in (400, 413)
        await until(lambda: not [*(tmp_path / "store" / "files").glob("*/*")])


PURPOSE = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n{}\r\n--b--\r\n'


@pytest.mark.parametrize("cut", [10, len(PURPOSE) - 6, len(PURPOSE) - 1, len(PURPOSE) + 20])
async def test_an_upload_may_come_in_pieces(tmp_path: Path, tokenizer: FakeTokenizer, cut: int):
    form = PURPOSE + FILE
    async with gateway_of(tmp_path) as gateway:
        assert "HTTP/1.1 200 OK" in await uploaded(gateway, form[:cut], form[cut:])


@pytest.mark.parametrize("sent", [b"", PURPOSE[:-9], PURPOSE, PURPOSE + FILE[:-9]])
async def test_an_upload_that_stalls_ends(
    tmp_path: Path, tokenizer: FakeTokenizer, monkeypatch: pytest.MonkeyPatch, sent: bytes
):
    monkeypatch.setattr(files, "READ_TIMEOUT_S", 0.2)
    async with gateway_of(tmp_path) as gateway:
        reply = await uploaded(gateway, sent)
        assert "HTTP/1.1 408 Request Timeout" in reply
        assert "less than 16384 bytes per second" in reply
        await until(lambda: not [*(tmp_path / "store" / "files").glob("*/*")])


async def uploaded(gateway: GatewayService, *pieces: bytes) -> str:
    """Returns the reply to an upload in pieces."""
    head = b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\n"
    head += b"Content-Type: multipart/form-data; boundary=b\r\n"
    head += b"Content-Length: %d\r\n\r\n" % len(PURPOSE + FILE)
    return (await raw_answer(gateway, head, *pieces, end=b"}", pause_s=0.05)).decode()


@pytest.mark.parametrize(
    ("type_", "file", "expected"),
    [
        (b"\xff/\xfe", FILE, b"415"),
        (b"multipart/form-data; boundary=b", FILE.replace(b'"f"', b'"\xff"'), b"200"),
        (b"multipart/form-data; boundary=b", FILE.replace(b'"file"', b'"\xff"'), b"400"),
    ],
)
async def test_bytes_that_are_no_text_break_no_upload(
    tmp_path: Path, tokenizer: FakeTokenizer, type_: bytes, file: bytes, expected: bytes
):
    form = PURPOSE + file
    async with gateway_of(tmp_path) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(
            b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
            b"Content-Type: %b\r\nContent-Length: %d\r\n\r\n" % (type_, len(form))
        )
        if expected != b"415":
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(form)
        assert (await reader.readline()).split()[1] == expected
        writer.close()


async def test_a_page_of_another_origin_uploads_nothing(tmp_path: Path, tokenizer: FakeTokenizer):
    async with gateway_of(tmp_path) as gateway, aiohttp.ClientSession() as session:
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", b"{}", filename="in.jsonl")
        url = f"http://127.0.0.1:{gateway.port}/v1/files"
        headers = {"Origin": "https://evil.example"}
        async with session.post(url, data=form, headers=headers) as response:
            assert response.status == 403


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"completion_window": "soon"}, "completion_window is"),
        ({"completion_window": "31d"}, "up to 30d"),
        ({"endpoint": "/v1/batches"}, "endpoint is"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"extra_body": {"output_expires_after": {}}}, "output_expires_after"),
    ],
)
async def test_wrong_batches_are_refused_by_name(
    tmp_path: Path, tokenizer: FakeTokenizer, fields: dict[str, Any], words: str
):
    async with clients(tmp_path) as client:
        file = await client.files.create(file=("in.jsonl", b"{}"), purpose="batch")
        asked = ASKED | {"input_file_id": file.id}
        with pytest.raises(openai.BadRequestError, match=words):
            await client.batches.create(**(asked | fields))
        with pytest.raises(openai.NotFoundError, match="no such file"):
            await client.batches.create(**(asked | {"input_file_id": "../../etc/passwd"}))
