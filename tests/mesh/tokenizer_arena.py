"""A tokenizer by itself, between a gateway and a scheduler."""

import asyncio
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from PIL import Image

from services.scheduler.intake import check_generate
from services.scheduler.sequence import Arrival
from services.tokenizer.requests import Requests
from services.tokenizer.service import GUIDES, TokenizerService
from shared.errors import CodecError, InvalidRequest
from shared.link.link import Link
from shared.model_folder import EMBEDDED_MODEL
from shared.settings.tokenizer import TokenizerConfig
from shared.wire.codec import Array
from shared.wire.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Abort,
    Accepted,
    Adapters,
    Cancel,
    ChatOptions,
    ChoiceStart,
    Convert,
    Credit,
    Deltas,
    Failed,
    Finished,
    Generate,
    Grant,
    Hello,
    Inquire,
    LoadAdapter,
    Lost,
    Medium,
    Message,
    OutputFormat,
    RequestKey,
    RunKind,
    ServiceReport,
    SpanReport,
    State,
    Submit,
    TextOptions,
    TokenRow,
    TokenRun,
    Tokens,
    ToolChoice,
    UnloadAdapter,
)
from tests.mesh.arena_parts import (
    ADAPTER,
    LONG_ROW,
    NO_ARRAYS,
    NO_IDS,
    NO_ROW,
    NO_TIME_ROW,
    PARAMS,
    PLAIN,
    PROMPT,
    REFUSED,
    SALTED,
    SPANS,
    TRACED,
    Example,
    FakePeer,
    Lies,
    connect,
)
from tests.services.tokenizer.one_scheduler import OneScheduler

TOOLS = '[{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]'
DOCUMENTS = '[{"title": "Fish", "text": "They swim."}]'
CHAT = ChatOptions(TOOLS, DOCUMENTS, '{"enable_thinking": false}')
TEMPLATE = ChatOptions(template="{{ messages[0].content }}")
FORMAT = OutputFormat("json_schema", "response_format", '{"type": "integer"}', True, "[ ]?")
OTHER = Submit("other~1/0", 1, "ids", PLAIN, TextOptions(), [ChoiceStart(0)])
OTHER_IDS = np.array([70, 71, 72], np.int32)
FROM_SCHEDULER = (Accepted, Tokens, Failed, ServiceReport, Lost, Adapters)
IDS, TOKENS = 4, 12  # the examples' values


class TokenizerArena:
    """Its output must stay right for every input; another gateway has a prompt there, too."""

    def __init__(self, directory: Path, model: Path = EMBEDDED_MODEL) -> None:
        config = TokenizerConfig(
            mesh_dir=directory,
            instance="t",
            model=str(model),
            trust_request_chat_template=True,
        )
        self._service = TokenizerService(config)
        self._model = self._service._load()
        hello = Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "tokenizer", "t", self._model)
        self._service._link = Link(hello, self._service)
        self._guides = GUIDES[0](self._service._text, self._service._lanes)
        self._other_text = self._service._text.decode(OTHER_IDS.tolist())
        text = np.frombuffer(b"Who leads the shoal?", np.uint8)
        chat = np.frombuffer(b'[{"role": "user", "content": "Hi"}]', np.uint8)
        options = TextOptions(["end"], ["bad"], max_prompt_tokens=3)
        starts = [ChoiceStart(0, 2, 3, 1), ChoiceStart(1)]
        self.submit = Submit("r~1/0", 1, "text", PARAMS, options, starts, options=TRACED)
        two, name = np.array([5, 6], np.int32), "r~1/0/1"
        rows = [
            TokenRow(name, 1, 0, TokenRun(2, 2, 1, kind=RunKind.PROMPT), 1),
            TokenRow(name, 1, 0, TokenRun(1, 1, kind=RunKind.DRAFTS)),
            TokenRow(name, 1, 0, TokenRun(1, 2, 1, num_drafts=1)),
        ]
        reports = [SpanReport(name, 1, "scheduler", "s", SPANS)]
        buffers = [
            np.array([5, 6, 7, 7], np.int32),
            np.zeros(7, np.float32),
            np.ones(3, np.int32),
            np.ones(4, np.int32),
        ]
        self.examples: list[Example] = [
            (self.submit, [text, two]),
            (self._chat(chat=CHAT, tool_choice=ToolChoice("auto", ["find"])), [chat, NO_IDS]),
            (self._chat(chat=TEMPLATE), [chat, NO_IDS]),
            (self._chat(format=FORMAT), [chat, NO_IDS]),
            (Submit("s~1/0", 1, "ids", PLAIN, TextOptions(), [ChoiceStart(0)]), [PROMPT, NO_IDS]),
            (Convert("c", "text", True), [text]),
            (Convert("c", "chat", True, CHAT), [chat]),
            (Convert("c", "text", True, None, "offsets", 3, True), [text]),
            (Convert("c", "ids", True, to="text"), [two]),
            (Cancel([RequestKey("r~1/0", 1)]), []),
            (Credit([Grant(name, 1, 300, 1 << 22)]), []),
            (Abort(["r"], "me"), []),
            (Accepted("r~1/0", 1), [NO_IDS]),
            (Tokens(rows, [Finished(name, 1, 1, "length", 1)], reports), buffers),
            (Failed(name, 1, 400, "t", "c", "m", "prompt", 1.0), []),
            (Inquire(), []),
            (ServiceReport("worker", "w", State.READY, "", True, 5.0, [], {}), []),
            (Lost([RequestKey("r~1/0", 1)], True, "s", 1), []),
            (Adapters([ADAPTER, REFUSED]), []),
            (LoadAdapter("l1", "sql", "sql"), []),
            (UnloadAdapter("sql", "u1"), []),
        ]
        drafts = TokenRow(name, 1, 0, TokenRun(1, 1, kind=RunKind.DRAFTS))
        one = np.ones(1, np.int32)
        again = [ChoiceStart(0), ChoiceStart(0)]
        self.lies: Lies = {
            "drafts without tokens": (
                TOKENS,
                Tokens([drafts], []),
                [one, one.astype(np.float32), NO_IDS, one],
            ),
            "a stop without a token": (
                TOKENS,
                Tokens([TokenRow(name, 1, 0, TokenRun(0))], [Finished(name, 1, 1, "stop", 0)]),
                NO_ARRAYS,
            ),
            "a choice twice": (
                IDS,
                Submit("s~1/0", 1, "ids", PLAIN, TextOptions(), again),
                [PROMPT, NO_IDS],
            ),
            "options that are no row": (0, replace(self.submit, options=NO_ROW), [text, two]),
            "a promise of no time": (
                0,
                replace(self.submit, options=NO_TIME_ROW),
                [text, two],
            ),
            "long options": (0, replace(self.submit, options=LONG_ROW), [text, two]),
            "resumed ids that the model does not have": (
                0,
                self.submit,
                [text, np.array([99_999_999, 5], np.int32)],
            ),
        }

    def _chat(self, **options: Any) -> Submit:
        starts = [ChoiceStart(0)]
        return Submit("s~1/0", 1, "chat", PLAIN, TextOptions(), starts, options=SALTED, **options)

    async def take(self, index: int, message: Message, arrays: list[Array]) -> bool:
        gateway, beside = connect("gateway", None), connect("gateway", None, name="beside")
        scheduler = connect("scheduler", None)
        kind = type(self.examples[index][0])
        sender, is_good = (
            scheduler if kind in FROM_SCHEDULER else gateway,
            True,
        )
        async with asyncio.TaskGroup() as tasks:
            requests = self._open_requests(tasks, scheduler)
            self._service.on_message(beside, OTHER, [PROMPT, NO_IDS])
            if index:
                self._service.on_message(gateway, *self.examples[0])
            await _until(lambda: len(scheduler.got) == 1 + (index > 0))
            try:
                self._service.on_message(sender, message, arrays)
            except CodecError:
                is_good = False
                requests.lose(sender)
        is_good = is_good and (kind is Failed or not gateway.take(Failed))
        for generate, (prompt, emitted, *pixels) in scheduler.take(Generate):
            Arrival(generate, prompt, emitted, 0, 0.0, pixels)
            try:
                check_generate(generate, prompt, emitted, self._model.vocab_size, 2048, 0)
            except InvalidRequest:
                assert kind is Submit, "a valid message was refused"
        if is_good or sender is gateway:
            self._check_other(beside, scheduler)
        else:
            self._check_other_is_lost(beside)
        for peer in (gateway, beside, scheduler):
            requests.lose(peer)
        assert len(requests) == 0
        return is_good

    def _open_requests(self, tasks: asyncio.TaskGroup, scheduler: FakePeer) -> Requests:
        """New ones, except for the process that tries grammars."""
        text, lanes = self._service._text, self._service._lanes
        requests = self._service._requests = Requests(
            text,
            None,
            10,
            lanes,
            tasks,
            OneScheduler(scheduler),
            guides=self._guides,
            media=self._service._media,
        )
        return requests

    async def close(self) -> None:
        await self._guides.close()
        await self._service._media.close()
        self._service._lanes.close()
        if self._service._link is not None:
            await self._service._link.close("the end")

    def _check_other(self, beside: FakePeer, scheduler: FakePeer) -> None:
        """Its prompt is accepted, and its tokens have their text."""
        finished = Finished("other~1/0/0", 1, 0, "length", 3)
        self._service.on_message(scheduler, Accepted("other~1/0", 1), [NO_IDS])
        tokens = Tokens([TokenRow("other~1/0/0", 1, 0, TokenRun(3))], [finished])
        self._service.on_message(scheduler, tokens, [OTHER_IDS, *NO_ARRAYS[1:]])
        assert [prompt.tolist() for _, (prompt,) in beside.take(Accepted)] == [PROMPT.tolist()]
        ((deltas, (received, *_)),) = beside.take(Deltas)
        assert "".join(row.text for row in deltas.rows) == self._other_text
        assert received.tolist() == OTHER_IDS.tolist()
        assert [each.request for each in deltas.finished] == ["other~1/0"]
        assert not beside.got

    def _check_other_is_lost(self, beside: FakePeer) -> None:
        assert [lost.keys for lost, _ in beside.take(Lost)] == [[RequestKey("other~1/0", 1)]]
        assert not beside.got


class MediaTokenizerArena(TokenizerArena):
    """Its ``model`` takes images: in a chat, in the ids of a replay, and in a chat to count."""

    def __init__(self, directory: Path, model: Path) -> None:
        super().__init__(directory, model)
        one, other = png(56, 84), png(56, 112)
        parts = [
            {"type": "image", "media": 1},
            {"type": "text", "text": "Which?"},
            {"type": "image", "media": 0},
        ]
        chat = np.frombuffer(json.dumps([{"role": "user", "content": parts}]).encode(), np.uint8)
        param = "messages[0].content[0].image_url.url"
        media = [Medium(param=param, detail="low"), Medium(param=param, detail="high")]
        options = '{"max_pixels": 12000}'
        asked = self._chat(media=media, media_options=options)
        reading: Any = self._service._media
        ids = np.array([70, *6 * [reading._family.placeholder], 71], np.int32)
        replay = Submit("s~1/0", 1, "ids", PLAIN, TextOptions(), [ChoiceStart(0)], media=media[:1])
        counted = Convert("c", "chat", True, media=media, media_options=options)
        self.examples = [
            self.examples[0],
            (asked, [chat, NO_IDS, one, other]),
            (replay, [ids, NO_IDS, one]),
            (counted, [chat, one, other]),
            (Accepted("r~1/0", 1, media=[0]), [NO_IDS]),
        ]
        self.lies = {
            "a file too few": (1, asked, [chat, NO_IDS, one]),
            "a file that is none": (1, asked, [chat, NO_IDS, one, other[:40]]),
            "an image that no part names": (
                1,
                replace(asked, media=[*media, media[0]]),
                [chat, NO_IDS, one, other, one],
            ),
            "options that are none": (
                1,
                replace(asked, media_options='{"max_pixels": "many"}'),
                [chat, NO_IDS, one, other],
            ),
            "ids of another image": (2, replay, [ids, NO_IDS, other]),
        }


def png(width: int, height: int) -> np.ndarray:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (200, 100, 50)).save(file, "PNG")
    return np.frombuffer(file.getvalue(), np.uint8)


async def _until(is_true: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not is_true():
            await asyncio.sleep(0)
