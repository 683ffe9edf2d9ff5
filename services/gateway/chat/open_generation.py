"""One generation request, from its job to the end of its reply."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from aiohttp import web

from services.gateway.chat.generation import GenerationEndpoint
from services.gateway.chat.replies.choice_parser import ChoiceParser, PlainParser
from services.gateway.chat.replies.reply import Head, Reply
from services.gateway.chat.replies.writers import BodyWriter, StreamWriter, is_large
from services.gateway.chat.requests.reply_bytes import TOKEN_BYTES, prompt_bytes
from services.gateway.chat.serving import accepting, send_json, warn
from services.gateway.chat.structure import Structure
from services.gateway.http.admission import Reservation
from services.gateway.http.client import EVENT_STREAM, Client
from services.gateway.http.pieces import PieceMaker
from services.gateway.http.request_id import request_id
from services.gateway.http.request_meter import RequestMeter
from services.gateway.http.routes import observer_of
from services.gateway.http.violations import not_held
from services.gateway.mesh.job import Job, Prompt
from services.gateway.mesh.mesh import Mesh
from services.gateway.mesh.output_collector import ChoiceUpdate, OutputCollector, merged
from shared.errors import InvalidRequest, RequestError
from shared.settings.gateway import GatewayConfig
from shared.text.utf8 import MAX_CHAR_BYTES, num_half_bytes
from shared.wire.codec import Array
from shared.wire.messages import ConvertedTo, ModelInfo

STREAM_HEADERS = {
    "Content-Type": f"{EVENT_STREAM}; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
DROPPED_TURNS = "X-Shoal-Dropped-Turns"
"""Header that counts the oldest turns of a chat, if any are not in its prompt."""

_NO_IDS = np.zeros(0, np.int32)


class GenerationTools:
    """Parts of the gateway that every generation uses."""

    def __init__(
        self, mesh: Mesh, pieces: PieceMaker, config: GatewayConfig, structure: Structure
    ) -> None:
        self.mesh = mesh
        self.pieces = pieces
        self.prompt_texts = PromptTexts(mesh, config.accept_timeout_s)
        self.accept_timeout_s = config.accept_timeout_s
        self.heartbeat_s = config.stream_heartbeat_s
        self.reasoning_field = config.reasoning_field
        self.structure = structure


class OpenGeneration:
    def __init__(
        self,
        tools: GenerationTools,
        request: web.Request,
        endpoint: GenerationEndpoint,
        job: Job,
        model: ModelInfo,
        meter: RequestMeter,
        reservation: Reservation,
    ) -> None:
        public_id = request_id(request)
        reply_id = endpoint.reply_id(public_id)
        self._tools = tools
        self._endpoint = endpoint
        self._job = job
        self._model = model
        self._meter = meter
        self._reservation = reservation
        self._head = Head(reply_id, int(time.time()), job.model, model.fingerprint)
        self._client = Client(request)
        self._mesh_id = f"{public_id}~{secrets.token_hex(4)}"
        self._observer = observer_of(request)
        self._observer.note_ids({public_id, reply_id})
        self._echoes: Sequence[str] = ()

    async def run(self) -> web.StreamResponse:
        """Raises RequestError; the client gets nothing before the mesh has accepted the request."""
        texts, offsets = await self._show_prompts()
        with self._tools.mesh.generate(self._mesh_id, self._job, self._observer) as collector:
            self._meter.follow(collector)
            prompt_ids = await self._accept(collector)
            reply = self._reply(collector, prompt_ids, texts, offsets)
            await self._send_reply(collector, reply)
            self._meter.end()
            return await self._client.end()

    async def _show_prompts(self) -> tuple[list[str], list[Array | None]]:
        job, texts = self._job, self._tools.prompt_texts
        if job.echoes and job.text.max_prompt_tokens is None:
            self._echoes = await texts.echoes(job)
        if job.first_text and job.parsing is None:
            self._echoes = [job.first_text]
        encoded, offsets = await texts.shown(job)
        shown = (each.nbytes for each in (*encoded, *offsets) if each is not None)
        self._reservation.grow(sum(shown))
        return [each.tobytes().decode() for each in encoded], offsets

    async def _accept(self, collector: OutputCollector) -> list[Array]:
        """Returns the ids of all prompts, empty for aborted ones: enough for a replay."""
        job = self._job
        with self._observer.measure("accept"):
            async with accepting(self._tools.accept_timeout_s):
                await collector.accepted()
        ids = [_NO_IDS if each is None else each for each in collector.prompt_ids]
        warnings = [*job.warnings, *not_held(collector.left_out, job.field_names)]
        warn(self._client.response, warnings)
        if num_dropped := collector.dropped.num_turns:
            self._client.response.headers[DROPPED_TURNS] = str(num_dropped)
        num_bytes = job.prompt_bytes
        job.prompts[:] = [
            replace(prompt, kind="ids", data=each, media=[prompt.media[n] for n in kept])
            for prompt, each, kept in zip(job.prompts, ids, collector.media, strict=True)
        ]
        self._reservation.replace(num_bytes, job.prompt_bytes)
        param = "logprobs" if job.num_prompt_logprobs is None else "prompt_logprobs"
        hold(self._reservation, prompt_bytes(job, self._model, ids), param)
        if job.echoes and job.text.max_prompt_tokens is not None:
            self._echoes = await self._tools.prompt_texts.echoes(job)
        self._meter.accept()
        return ids

    def _reply(
        self,
        collector: OutputCollector,
        prompt_ids: list[Array],
        texts: list[str],
        offsets: list[Array | None],
    ) -> Reply:
        job = self._job
        has_logprobs = job.params.logprobs is not None or job.has_prompt_logprobs
        return Reply(
            format=self._endpoint.format,
            head=self._head,
            job=job,
            spelling=self._tools.mesh.tokens.spelling(job.names_by_id) if has_logprobs else None,
            echoes=self._echoes,
            prompt_ids=prompt_ids,
            texts=texts,
            offsets=offsets,
            dropped=collector.dropped,
            reasoning_field=self._tools.reasoning_field,
        )

    async def _send_reply(self, collector: OutputCollector, reply: Reply) -> None:
        parsers = self._parsers(collector)
        with self._observer.measure("reply") as attributes, self._client.counted(attributes):
            if self._job.is_stream:
                await self._stream(collector, self._endpoint.stream_writer(reply, parsers))
            else:
                await self._whole(collector, self._endpoint.body_writer(reply, parsers))

    def _parsers(self, collector: OutputCollector) -> Sequence[ChoiceParser]:
        """One parser for each choice."""
        job = self._job
        if job.parsing is None:
            return [PlainParser()] * job.total_choices
        table, starts = self._tools.mesh.tokens, collector.starts
        return self._tools.structure.parsers(job, job.parsing, table, starts, self._mesh_id)

    async def _stream(self, collector: OutputCollector, writer: StreamWriter) -> None:
        client = self._client
        await client.begin(STREAM_HEADERS, writer.fail)
        if opening := writer.open():
            await client.write(opening)
        pace = ChunkPace(self._job.stream_interval)
        async with client.commented(self._tools.heartbeat_s, writer.heartbeat):
            try:
                async for update in collector:
                    self._meter.observe(update)
                    if (due := pace.push(update)) is not None:
                        await self._send(writer, due)
                    collector.consumed(update)
                    if writer.is_over(update):
                        collector.cut(update.index)
            except RequestError:
                for due in pace.rest():
                    await self._send(writer, due)
                raise
            await self._endpoint.keep()
        if closing := writer.close():
            await client.write(closing)

    async def _send(self, writer: StreamWriter, update: ChoiceUpdate) -> None:
        client = self._client
        client.is_between_events = False
        events = writer.write(update)
        if is_large(update):
            await self._tools.pieces.send(events, client.write)
        elif data := b"".join(events):
            await client.write(data)
        client.is_between_events = True

    async def _whole(self, collector: OutputCollector, writer: BodyWriter) -> None:
        async for update in collector:
            self._meter.observe(update)
            writer.add(update)
            num_bytes = len(update.text.encode()) + update.num_tokens * TOKEN_BYTES
            self._reservation.grow(num_bytes)
            collector.consumed(update)
            if writer.is_over(update):
                collector.cut(update.index)
        await self._endpoint.keep()
        written = writer.write()
        await send_json(self._client, written, self._tools.pieces, is_large=writer.is_large)


def hold(reservation: Reservation, num_bytes: int, param: str) -> None:
    """Holds bytes requested by ``param``. Raises InvalidRequest, Overloaded."""
    limit = reservation.max_bytes
    if num_bytes > limit:
        remedy = "fewer logprobs, choices or max_tokens, or with stream=true"
        if param == "prompt_logprobs":
            remedy = "fewer of them"
        raise InvalidRequest(
            f"the tokens and logprobs that are asked for may take {num_bytes} bytes here; the"
            f" limit is max-buffered-bytes = {limit}; ask for {remedy}",
            param=param,
        )
    reservation.hold(num_bytes)


class PromptTexts:
    """Texts of prompts repeated in a reply, and the places of their tokens. Each call raises
    Unavailable after ``timeout_s``."""

    def __init__(self, mesh: Mesh, timeout_s: float) -> None:
        self._mesh = mesh
        self._timeout_s = timeout_s

    async def echoes(self, job: Job) -> list[str]:
        """The texts in front of each choice."""
        async with accepting(self._timeout_s):
            return [await self._echo(job.options.owner, prompt) for prompt in job.prompts]

    async def shown(self, job: Job) -> tuple[list[Array], list[Array | None]]:
        """Returns texts of prompts in UTF-8 and places of their tokens, each if the client asked.
        The places of a prompt of ids are None."""
        texts = [prompt for prompt in job.prompts if job.returns_prompt_text]
        located = [prompt for prompt in job.prompts if job.returns_offsets]
        async with accepting(self._timeout_s):
            encoded = [await self._converted(job, prompt, "text") for prompt in texts]
            offsets = [
                None if prompt.kind == "ids" else await self._converted(job, prompt, "offsets")
                for prompt in located
            ]
        return encoded, offsets

    async def _converted(self, job: Job, prompt: Prompt, to: ConvertedTo) -> Array:
        text = job.text
        return await self._mesh.conversions.convert(
            *(job.options.owner, prompt, text.adds_special_tokens, job.chat, to),
            *(text.max_prompt_tokens, text.keeps_prompt_start),
        )

    async def _echo(self, owner: str, prompt: Prompt) -> str:
        if prompt.kind == "ids":
            return await self._echo_of_ids(owner, prompt.data)
        return prompt.data.tobytes().decode()

    async def _echo_of_ids(self, owner: str, ids: Array) -> str:
        """An incomplete character at the end of a prompt is left out: the generated text may
        complete it."""
        written = self._mesh.tokens.written
        num_half = num_half_bytes(b"".join(map(written, ids[-MAX_CHAR_BYTES:].tolist())))
        while num_half and (num_bytes := len(written(int(ids[-1])))) <= num_half:
            ids, num_half = ids[:-1], num_half - num_bytes
        if not len(ids):
            return ""
        data = await self._mesh.conversions.convert(owner, Prompt("ids", ids), False, to="text")
        text = data.tobytes().decode()
        return text.rstrip("\N{REPLACEMENT CHARACTER}") if num_half else text


class ChunkPace:
    """Holds back updates of a choice until they have ``num_tokens``. Updates up to the first text,
    and the end, are never held."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._held: dict[int, list[ChoiceUpdate]] = {}  # of choices with text
        self._nums_held: dict[int, int] = {}  # their tokens

    def push(self, update: ChoiceUpdate) -> ChoiceUpdate | None:
        """Returns the choice's update to send now."""
        if self._num_tokens == 1 or update.of_prompt:
            return update
        index = update.index
        if index not in self._held:
            if update.text:
                self._held[index], self._nums_held[index] = [], 0
            return update
        self._held[index].append(update)
        self._nums_held[index] += update.num_tokens
        if update.finished is None and self._nums_held[index] < self._num_tokens:
            return None
        due = merged(self._held[index])
        self._held[index], self._nums_held[index] = [], 0
        return due

    def rest(self) -> list[ChoiceUpdate]:
        """Returns the held updates of all choices, once no more will come."""
        return [merged(held) for held in self._held.values() if held]
