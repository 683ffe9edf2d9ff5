"""Prompts with images: their ids and pixels are those of transformers."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
from msgspec.structs import replace

from services.tokenizer.chat.templates import ChatTemplates
from services.tokenizer.lanes import Lanes
from services.tokenizer.media import reading as module
from services.tokenizer.media.pixel_memory import Hold, PixelMemory
from services.tokenizer.media.reading import MediaReading
from services.tokenizer.requests import Requests
from services.tokenizer.text_model import TextModel
from shared.errors import CodecError, Unavailable
from shared.wire.codec import Array
from shared.wire.envelope import RequestOptions, write_options
from shared.wire.messages import (
    Accepted,
    ChatOptions,
    ChoiceStart,
    Convert,
    Failed,
    Generate,
    Medium,
    PromptKind,
    RequestKey,
    SamplingParams,
    Submit,
    TextOptions,
)
from tests.media.checkpoints import MAX_LEN, MEDIA
from tests.media.pictures import picture
from tests.media.references import Reference
from tests.services.tokenizer.media.conftest import MakeReading, on_loop_of_module
from tests.services.tokenizer.media.files import file_of, png_of
from tests.services.tokenizer.one_scheduler import OneScheduler

pytestmark = on_loop_of_module

PAD = MEDIA[2]
NO_IDS = np.zeros(0, np.int32)
PICTURES = [picture(seed, 60 + 40 * seed, 100) for seed in range(3)]
FILES = [file_of(each) for each in PICTURES]

Message = dict[str, Any]


class Peer(Any):
    def __init__(self) -> None:
        self.sent: list[tuple[Any, list[Array]]] = []

    def send(self, message: Any, *arrays: Array) -> None:
        self.sent.append((message, list(arrays)))


def image(number: int) -> Message:
    return {"type": "image", "media": number}


def text(words: str) -> Message:
    return {"type": "text", "text": words}


def user(*parts: Message) -> Message:
    return {"role": "user", "content": list(parts)}


def chat(
    messages: Sequence[Message],
    num_media: int,
    salt: str = "",
    detail: Any = "auto",
    **fields: Any,
) -> tuple[Submit, Array, Array]:
    submit = Submit(
        request="r",
        attempt=1,
        kind="chat",
        params=SamplingParams(seed=0),
        text=TextOptions(adds_special_tokens=False),
        choices=[ChoiceStart(0)],
        options=write_options(RequestOptions(salt=salt)),
        media=[Medium(param=f"image {num}", detail=detail) for num in range(num_media)],
    )
    prompt = np.frombuffer(msgspec.json.encode(messages), np.uint8)
    return replace(submit, **fields), prompt, NO_IDS


class Tokenizer:
    """The requests of a tokenizer, one after the other."""

    def __init__(self, model: TextModel, reading: MediaReading | None) -> None:
        self._model = model
        self._reading = reading
        self.accepted: Accepted | None = None

    async def ask(self, submit: Submit, prompt: Array, resumed: Array, *files: Array) -> Any:
        """What is sent: Generate with its buffers, or Failed."""
        gateway, scheduler = Peer(), Peer()
        async with asyncio.TaskGroup() as tasks:
            requests = Requests(
                self._model,
                None,
                10,
                Lanes(1),
                tasks,
                OneScheduler(scheduler),
                media=self._reading,
            )
            requests.submit(gateway, submit, prompt, resumed, *files)
        if gateway.sent:
            ((failed, _),) = gateway.sent
            assert isinstance(failed, Failed)
            return failed
        requests.accept(Accepted(submit.request, submit.attempt))
        ((self.accepted, _),) = gateway.sent
        ((generate, arrays),) = scheduler.sent
        assert isinstance(generate, Generate)
        return generate, arrays

    async def convert(self, message: Convert, data: Array, *files: Array) -> Any:
        gateway = Peer()
        async with asyncio.TaskGroup() as tasks:
            requests = Requests(
                self._model, None, 10, Lanes(1), tasks, OneScheduler(None), media=self._reading
            )
            requests.convert(gateway, message, data, *files)
        ((answer, arrays),) = gateway.sent
        return answer if isinstance(answer, Failed) else arrays[0]


@pytest_asyncio.fixture(loop_scope="module")
async def tokenizer(model: TextModel, make_reading: MakeReading):
    reading = make_reading()
    yield Tokenizer(model, reading)
    await reading.close()


def expected(reference: Reference, messages: list[Message], pictures: list[Any]) -> Any:
    prompt = reference.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert isinstance(prompt, str)
    return reference.inputs(prompt, pictures)


async def test_a_prompt_is_that_of_transformers(tokenizer: Tokenizer, transformers: Reference):
    messages = [
        {"role": "system", "content": "See."},
        user(text("Which?"), image(1), image(0), text(" Or this?"), image(2)),
    ]
    generate, (ids, resumed, *pixels) = await tokenizer.ask(*chat(messages, 3), *FILES)
    pictures = [PICTURES[number] for number in (1, 0, 2)]
    wanted = expected(transformers, messages, pictures)
    assert ids.tolist() == wanted["input_ids"][0].tolist()
    assert (ids.dtype, len(resumed)) == (np.int32, 0)
    pad = transformers.model.config.image_token_id
    for item in generate.items:
        assert (ids[item.start : item.end] == pad).all()
    assert sum(item.num_tokens for item in generate.items) == (ids == pad).sum()
    assert tokenizer.accepted is not None
    assert tokenizer.accepted.media == [1, 0, 2]
    shapes = [(*item.size[1:], 3) for item in generate.items]
    read = [each.reshape(shape) for each, shape in zip(pixels, shapes, strict=True)]
    found = transformers.images(images=read, do_resize=False, return_tensors="pt")
    assert (found["pixel_values"] == wanted["pixel_values"]).all()


async def test_the_same_image_twice_has_its_pixels_once(tokenizer: Tokenizer):
    messages = [user(image(0), image(1), image(2))]
    files = [FILES[0], FILES[1], FILES[0]]
    generate, (_, _, *pixels) = await tokenizer.ask(*chat(messages, 3), *files)
    first, second, third = generate.items
    assert first.digest == third.digest != second.digest
    assert [len(each) for each in pixels] == [first.num_bytes, second.num_bytes]


async def test_another_salt_gives_another_digest(tokenizer: Tokenizer):
    digests = [
        (await tokenizer.ask(*chat([user(image(0))], 1, salt), FILES[0]))[0].items[0].digest
        for salt in ("a", "b", "a")
    ]
    assert digests[0] == digests[2] != digests[1]


async def test_another_size_gives_another_digest(tokenizer: Tokenizer):
    digests = set()
    for most in (78400, 10000, 6000):
        options = msgspec.json.encode({"max_pixels": most}).decode()
        asked = chat([user(image(0))], 1, media_options=options)
        generate, (_, _, pixels) = await tokenizer.ask(*asked, FILES[2])
        (item,) = generate.items
        assert item.num_bytes == len(pixels) <= 3 * most
        digests.add(item.digest)
    assert len(digests) == 3


async def test_an_image_of_every_turn_is_read_once(
    tokenizer: Tokenizer, change: Callable[[str], float]
):
    for num in (1, 2, 3):
        messages = [user(text("Look."), image(number)) for number in range(num)]
        assert isinstance(await tokenizer.ask(*chat(messages, num), *FILES[:num]), tuple)
    assert change("shoal_media_cache_misses_total") == 3
    assert change("shoal_media_cache_hits_total") == 3
    assert change("shoal_media_read_seconds_count") == 3


async def test_without_a_cache_it_is_read_again(
    model: TextModel, make_reading: MakeReading, change: Callable[[str], float]
):
    reading = make_reading(cache_bytes=0)
    tokenizer = Tokenizer(model, reading)
    for _ in range(2):
        await tokenizer.ask(*chat([user(image(0))], 1), FILES[0])
    assert change("shoal_media_cache_misses_total") == 2
    await reading.close()


async def test_a_replay_as_ids_is_the_same_prompt(model: TextModel, make_reading: MakeReading):
    """Also by another tokenizer, and with resumed output."""
    messages = [user(image(1), image(0), text("Then?"))]
    readings = make_reading(), make_reading()
    first, second = (Tokenizer(model, reading) for reading in readings)
    generate, (ids, _, *pixels) = await first.ask(*chat(messages, 2), *FILES[:2])
    media = [Medium(), Medium()]
    start = ChoiceStart(0, num_ids=1)
    submit, *_ = chat([], 0, kind="ids", media=media, attempt=2, choices=[start])
    resumed = np.array([7], np.int32)
    again, (same, emitted, *pixels_again) = await second.ask(
        submit, ids, resumed, FILES[1], FILES[0]
    )
    assert second.accepted is not None
    assert (again.items, second.accepted.media) == (generate.items, [0, 1])
    assert (same.tolist(), emitted.tolist()) == (ids.tolist(), [7])
    for one, other in zip(pixels, pixels_again, strict=True):
        assert (one == other).all()
    for files in (FILES[:2], [FILES[1], FILES[2]]):  # in another order, or another file
        failed = await second.ask(submit, ids, resumed, *files)
        assert (failed.status, failed.param) == (400, "prompt")
    for reading in readings:
        await reading.close()


async def test_dropped_turns_take_their_images_along(tokenizer: Tokenizer, transformers: Reference):
    turns = [
        [user(text(f"Turn {num}"), image(num)), {"role": "assistant", "content": "Yes."}]
        for num in range(3)
    ]
    messages = [message for turn in turns for message in turn][:-1]
    whole, (ids, *_) = await tokenizer.ask(*chat(messages, 3), *FILES)
    limit = len(ids) - 1
    cut = chat(messages, 3, chat=ChatOptions(history_limit=limit))
    generate, (left, _, *pixels) = await tokenizer.ask(*cut, *FILES)
    assert tokenizer.accepted is not None
    used = tokenizer.accepted.media
    assert used in ([1, 2], [2])
    assert tokenizer.accepted.dropped.num_turns == 3 - len(used)
    assert [item.digest for item in generate.items] == [whole.items[num].digest for num in used]
    assert len(pixels) == len(used)
    wanted = expected(transformers, messages[2 * used[0] :], [PICTURES[num] for num in used])
    assert left.tolist() == wanted["input_ids"][0].tolist()


async def test_turns_count_with_the_tokens_of_their_images(tokenizer: Tokenizer):
    """Otherwise turns of images alone would have no places between them."""
    files = [file_of(picture(seed, 280, 280)) for seed in range(8)]
    messages = [
        message
        for num in range(8)
        for message in (user(image(num)), {"role": "assistant", "content": "Yes."})
    ][:-1]
    limit = 700
    asked = chat(messages, 8, chat=ChatOptions(history_limit=limit))
    _, (ids, *_) = await tokenizer.ask(*asked, *files)
    assert limit // 2 < len(ids) <= limit


async def test_a_text_with_the_placeholder_is_refused(
    tokenizer: Tokenizer, subtests: pytest.Subtests
):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    escaped = '{"a": "\\u003c|image_pad|\\u003e"}'
    for name, message in (
        ("user", {"role": "user", "content": f"a {PAD}"}),
        ("part", user(text(PAD))),
        ("system", {"role": "system", "content": PAD}),
        ("name", {"role": "assistant", "tool_calls": [with_function(call, name=PAD)]}),
        ("arguments", {"role": "assistant", "tool_calls": [with_function(call, arguments=PAD)]}),
        ("JSON", {"role": "assistant", "tool_calls": [with_function(call, arguments=escaped)]}),
    ):
        with subtests.test(name):
            failed = await tokenizer.ask(*chat([user(image(0)), message], 1), FILES[0])
            assert (failed.status, failed.param) == (400, "messages[1]")
            assert PAD in failed.message
    tools = msgspec.json.encode([{"type": "function", "function": {"name": PAD}}]).decode()
    asked = chat([user(image(0))], 1, chat=ChatOptions(tools=tools))
    assert (await tokenizer.ask(*asked, FILES[0])).param == "tools"
    joined = user(text(PAD[:5]), text(PAD[5:]), image(0))
    failed = await tokenizer.ask(*chat([joined], 1), FILES[0])
    assert (failed.status, failed.param) == (400, "messages")
    assert "writes 2 placeholders" in failed.message


def with_function(call: Message, **fields: Any) -> Message:
    return {**call, "function": {**call["function"], **fields}}


async def test_a_placeholder_without_an_image_is_refused(
    tokenizer: Tokenizer, model: TextModel, subtests: pytest.Subtests
):
    written = np.frombuffer(f"a {PAD}".encode(), np.uint8)
    pair = np.frombuffer(msgspec.json.encode(["a", PAD]), np.uint8)
    ids = np.array(model.encode(f"a {PAD}", False), np.int32)
    _, typed, _ = chat([user(text(PAD))], 0)
    prompts: list[tuple[PromptKind, Array]] = [
        ("ids", ids),
        ("text", written),
        ("chat", typed),
        ("pair", pair),
    ]
    for kind, prompt in prompts:
        with subtests.test(kind):
            submit, *_ = chat([], 0, kind=kind)
            failures = [await tokenizer.ask(submit, prompt, NO_IDS)]
            if kind != "ids":
                failures.append(await tokenizer.convert(Convert("c", kind, False), prompt))
            for failed in failures:
                assert (failed.status, failed.param) == (400, "prompt")
                assert f"the placeholder {PAD} of an image, and no image" in failed.message


async def test_ids_with_placeholders_become_text_again(tokenizer: Tokenizer, model: TextModel):
    ids = np.array(model.encode(f"a {PAD}", False), np.int32)
    data = await tokenizer.convert(Convert("c", "ids", False, to="text"), ids)
    assert data.tobytes().decode() == f"a {PAD}"


async def test_a_model_without_images_takes_the_placeholder(model: TextModel):
    generate, arrays = await Tokenizer(model, None).ask(*chat([user(text(PAD))], 0))
    assert (generate.items, len(arrays)) == ([], 2)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "takes no images"),
        (
            "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}",
            "writes 0 placeholders",
        ),
        (
            "{% for m in messages %}{% for p in m.content %}"
            + PAD * 2
            + "{% endfor %}{% endfor %}",
            "writes 2 placeholders",
        ),
    ],
)
async def test_a_template_has_to_write_each_image_once(
    model: TextModel, make_reading: MakeReading, template: str, problem: str
):
    reading, templates = make_reading(), model.templates
    model.templates = ChatTemplates({"default": template}, False)
    try:
        failed = await Tokenizer(model, reading).ask(*chat([user(image(0))], 1), FILES[0])
    finally:
        model.templates = templates
    assert failed.status == 400
    assert problem in failed.message
    await reading.close()


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([user(image(0), image(2))], "messages[0].content[1]"),
        ([user(image(0), image(-1))], "messages[0].content[1]"),
        ([user(image(0)), user(text("a"), image(0))], "messages[1].content[1]"),
        ([user(image(0), {"type": "image"})], "messages[0].content[1]"),
        ([user(image(0), {"type": "image", "media": True})], "messages[0].content[1]"),
        ([user(image(1))], "messages"),
    ],
)
async def test_each_file_has_one_part(tokenizer: Tokenizer, messages: list[Message], param: str):
    failed = await tokenizer.ask(*chat(messages, 2), *FILES[:2])
    assert (failed.status, failed.param) == (400, param)


async def test_a_last_text_is_continued_and_an_image_is_not(tokenizer: Tokenizer, model: TextModel):
    options = ChatOptions(adds_generation_prompt=False, continues_final_message=True)
    _, (ids, *_) = await tokenizer.ask(
        *chat([user(image(0), text("Go on"))], 1, chat=options), FILES[0]
    )
    assert model.decode_many(ids.tolist()).endswith("<|vision_end|>Go on")
    failed = await tokenizer.ask(*chat([user(text("a"), image(0))], 1, chat=options), FILES[0])
    assert (failed.status, failed.param) == (400, "continue_final_message")


async def test_a_tool_may_answer_with_an_image(tokenizer: Tokenizer, model: TextModel):
    result = {"role": "tool", "tool_call_id": "c", "content": [text("Here:"), image(0)]}
    _, (ids, *_) = await tokenizer.ask(*chat([user(text("Draw.")), result], 1), FILES[0])
    assert f"Here:<|vision_start|>{PAD}" in model.decode_many(ids.tolist())


async def test_bad_files_are_refused_with_their_place(tokenizer: Tokenizer):
    html = np.frombuffer(b"<html>", np.uint8)
    long = file_of(picture(1, 201, 1))
    for bad, problem in ((html, "is no image"), (long, "one side may be 200 times the other")):
        failed = await tokenizer.ask(*chat([user(image(0), image(1))], 2), FILES[0], bad)
        assert (failed.status, failed.param) == (400, "image 1")
        assert failed.message.startswith("image 1 ")
        assert problem in failed.message


async def test_a_context_too_small_for_the_images_says_so(tokenizer: Tokenizer):
    """100 tokens each, of 4096."""
    large = [file_of(picture(seed, 280, 280)) for seed in range(41)]
    failed = await tokenizer.ask(*chat([user(*map(image, range(41)))], 41), *large)
    assert (failed.status, failed.code) == (400, "context_length_exceeded")
    assert "images and videos alone" in failed.message
    params = SamplingParams(seed=0, max_tokens=MAX_LEN - 120)
    asked = chat([user(image(0))], 1, params=params)
    failed = await tokenizer.ask(*asked, large[0])
    assert (failed.code, failed.param) == ("context_length_exceeded", "max_tokens")
    assert "100 of them of images" in failed.message


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ('{"frames": 2}', "frames"),
        ('{"max_pixels": 0}', ">= 1"),
        ('{"max_pixels": "1"}', "int"),
        ('{"max_pixels": 78401}', "78401 pixels; the limit is 78400"),
        ('{"size": {"shortest_edge": 78401}}', "78401 pixels; the limit is 78400"),
        ('{"min_pixels": 2000, "max_pixels": 1000}', "above max_pixels"),
        ('{"size": {"height": 28}}', "height"),
        ("[]", "object"),
    ],
)
async def test_options_of_images_are_checked(tokenizer: Tokenizer, options: str, problem: str):
    failed = await tokenizer.ask(*chat([user(image(0))], 1, media_options=options), FILES[0])
    assert (failed.status, failed.param) == (400, "mm_processor_kwargs")
    assert problem in failed.message


async def test_a_prompt_with_images_is_not_cut_and_has_a_chat(tokenizer: Tokenizer):
    asked = chat([user(image(0))], 1, text=TextOptions(max_prompt_tokens=20))
    failed = await tokenizer.ask(*asked, FILES[0])
    assert (failed.status, failed.param) == (400, "truncate_prompt_tokens")
    failed = await tokenizer.ask(*chat([user(image(0))], 1, kind="text"), FILES[0])
    assert (failed.status, failed.param) == (400, "prompt")


async def test_a_model_without_images_refuses_them(model: TextModel):
    failed = await Tokenizer(model, None).ask(*chat([user(image(0))], 1), FILES[0])
    assert (failed.status, failed.param) == (400, "image 0")
    assert failed.message == "the model takes no images"


async def test_another_number_of_files_is_no_message_of_ours(tokenizer: Tokenizer):
    with pytest.raises(ExceptionGroup) as caught:
        await tokenizer.ask(*chat([user(image(0))], 1))
    assert isinstance(caught.value.exceptions[0], CodecError)


async def test_a_cancelled_request_stops_waiting(model: TextModel, make_reading: MakeReading):
    reading, gateway, scheduler = make_reading(), Peer(), Peer()
    async with asyncio.TaskGroup() as tasks:
        requests = Requests(
            model, None, 10, Lanes(1), tasks, OneScheduler(scheduler), media=reading
        )
        requests.submit(gateway, *chat([user(image(0))], 1), FILES[0])
        await asyncio.sleep(0)
        requests.cancel(gateway, [RequestKey("r", 1)])
    assert (gateway.sent, scheduler.sent, len(requests)) == ([], [], 0)
    await reading.close()


async def test_conversions_count_the_tokens_of_images(tokenizer: Tokenizer):
    messages = [user(image(0), text("Hm?"))]
    submit, data, _ = chat(messages, 1)
    _, (ids, *_) = await tokenizer.ask(submit, data, NO_IDS, FILES[0])
    convert = Convert("c", "chat", False, media=submit.media)
    assert (await tokenizer.convert(convert, data, FILES[0])).tolist() == ids.tolist()
    written = await tokenizer.convert(replace(convert, to="text"), data, FILES[0])
    assert written.tobytes().decode().count(PAD) == 1
    failed = await tokenizer.convert(replace(convert, to="offsets"), data, FILES[0])
    assert failed.status == 400


async def test_conversions_decode_nothing(tokenizer: Tokenizer, change: Callable[[str], float]):
    """The file has no content behind its header."""
    submit, data, _ = chat([user(image(0))], 1)
    convert = Convert("c", "chat", False, media=submit.media)
    ids = await tokenizer.convert(convert, data, png_of(90, 90))
    assert len(ids) > 9
    assert change("shoal_media_cache_hits_total") == change("shoal_media_cache_misses_total") == 0


async def test_the_files_of_a_prompt_have_a_limit_of_pixels(tokenizer: Tokenizer):
    """Also if their pixels are known."""
    files = [file_of(picture(seed, 1000, 1000).convert("L")) for seed in range(5)]
    for num in (4, 5, 5):
        answer = await tokenizer.ask(*chat([user(*map(image, range(num)))], num), *files[:num])
        if num == 5:
            assert answer.status == 400
            assert "5000000 pixels of the prompt's files; the limit is 4194304" in answer.message
            assert answer.param.startswith("image ")
        else:
            assert isinstance(answer, tuple)


async def test_the_images_of_a_prompt_have_a_limit_of_bytes(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "MAX_PROMPT_BYTES", 100)
    failed = await tokenizer.ask(*chat([user(image(0))], 1), FILES[0])
    assert (failed.status, failed.param) == (400, "image 0")
    assert failed.message.startswith("image 0 makes ")
    assert failed.message.endswith("bytes of pixels of the prompt's files; the limit is 100")


async def test_prompts_that_wait_hold_a_limited_number_of_bytes(
    model: TextModel, make_reading: MakeReading
):
    """Each end gives them back."""
    reading = make_reading()
    tokenizer = Tokenizer(model, reading)
    asked = chat([user(image(0))], 1)
    generate, _ = await tokenizer.ask(*asked, FILES[0])
    num_bytes = generate.items[0].num_bytes
    submit, *_ = asked
    with await reading.read(submit, FILES[:1], "", ""):
        assert reading._memory.num_bytes == num_bytes
        with await reading.read(submit, FILES[:1], "", ""):
            assert reading._memory.num_bytes == num_bytes
    assert reading._memory.num_bytes == 0
    html = np.frombuffer(b"<html>", np.uint8)
    await tokenizer.ask(*chat([user(image(0), image(1))], 2), FILES[0], html)
    await tokenizer.ask(*chat([user(image(0), text(PAD))], 1), FILES[0])
    assert reading._memory.num_bytes == 0
    reading._memory = PixelMemory(num_bytes - 1)
    for file in FILES[:2]:
        failed = await tokenizer.ask(*asked, file)
        assert (failed.status, failed.code) == (503, "media_memory_full")
        assert failed.retry_after_s
    assert reading._memory.num_bytes == 0
    await reading.close()


async def test_an_ended_hold_takes_nothing():
    memory = PixelMemory(10)
    first, second = Hold(memory), Hold(memory)
    first.add("a", 6)
    second.add("a", 6)
    with pytest.raises(Unavailable, match="12 bytes of pixels; the limit is 10"):
        second.add("b", 6)
    first.end()
    first.add("c", 4)
    assert memory.num_bytes == 6
    second.end()
    assert memory.num_bytes == 0
