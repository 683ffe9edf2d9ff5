"""One generation request, from its job to the end of its reply."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from aiohttp import web

from services.gateway.chat.generation import GenerationEndpoint
from services.gateway.chat.prompt_texts import PromptTexts
from services.gateway.chat.replies.choice_parser import ChoiceParser, PlainParser
from services.gateway.chat.replies.chunk_pace import ChunkPace
from services.gateway.chat.replies.reply import Head, Reply
from services.gateway.chat.replies.writers import BodyWriter, StreamWriter, is_large
from services.gateway.chat.requests.reply_bytes import TOKEN_BYTES, prompt_bytes
from services.gateway.chat.serving import accepting, send_json, warn
from services.gateway.chat.structure import Structure
from services.gateway.http.admission import Reservation
from services.gateway.http.client import EVENT_STREAM, Client
from services.gateway.http.observed import observer_of
from services.gateway.http.pieces import PieceMaker
from services.gateway.http.request_id import request_id
from services.gateway.http.request_meter import RequestMeter
from services.gateway.http.violations import not_held
from services.gateway.mesh.job import Job
from services.gateway.mesh.mesh import Mesh
from services.gateway.mesh.output_collector import ChoiceUpdate, OutputCollector
from shared.errors import InvalidRequest, RequestError
from shared.settings.gateway import GatewayConfig
from shared.wire.codec import Array
from shared.wire.messages import ModelInfo

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
