"""Generation: a request of any API to its reply."""

import secrets
import time

import numpy as np
from aiohttp import web

from services.gateway.chat.generation import GenerationEndpoint
from services.gateway.chat.intake import Intake
from services.gateway.chat.replies.chunk_pace import ChunkPace
from services.gateway.chat.replies.output_parser import OutputParser, output_parser
from services.gateway.chat.replies.reply import Head, Reply
from services.gateway.chat.replies.writers import BodyWriter, StreamWriter, is_large
from services.gateway.chat.requests.parse import Limits
from services.gateway.chat.requests.reply_bytes import TOKEN_BYTES, prompt_bytes, token_bytes
from services.gateway.chat.requests.runner import check_generates
from services.gateway.chat.serving import accepting, send_json, start_meter, warn
from services.gateway.http.account import owner_of
from services.gateway.http.admission import Reservation
from services.gateway.http.client import EVENT_STREAM, Client
from services.gateway.http.pieces import PieceMaker
from services.gateway.http.request_id import check_request_id, request_id, take_request_id
from services.gateway.http.request_meter import RequestMeter
from services.gateway.http.violations import client_names, not_held
from services.gateway.mesh.job import Job, Parsing, Prompt
from services.gateway.mesh.mesh import Mesh
from services.gateway.mesh.output_collector import ChoiceUpdate, OutputCollector
from services.gateway.traces.tracing import TRACE, measured
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


class Completions:
    """Body → Job → mesh → reply. Nothing is sent to the client before the mesh has accepted."""

    def __init__(
        self, mesh: Mesh, intake: Intake, pieces: PieceMaker, config: GatewayConfig
    ) -> None:
        self._mesh = mesh
        self._intake = intake
        self._accept_timeout_s = config.accept_timeout_s
        self._stream_heartbeat_s = config.stream_heartbeat_s
        self._limits = Limits(
            config.max_choices,
            config.max_logprobs,
            config.max_priority_boost,
            config.history_limit,
        )
        self._pieces = pieces
        self._reasoning_field = config.reasoning_field

    async def serve(self, request: web.Request, endpoint: GenerationEndpoint) -> web.StreamResponse:
        started_s = time.monotonic()
        check_request_id(request)
        with self._intake.admission.admit() as reservation:
            job, model = await self._job(request, endpoint, reservation)
            take_request_id(request, job.request_id)
            answer = await endpoint.answer_early(request_id(request), job, model)
            if answer is not None:
                warn(answer, job.warnings)
                reservation.is_served = True
                return answer
            param = "return_token_ids" if job.params.logprobs is None else "logprobs"
            self._hold(reservation, token_bytes(job, model), param)
            job = self._intake.owned(request, job)
            meter = start_meter(request, job.model, started_s)
            with self._intake.texts(request, job.total_choices), client_names(job.field_names):
                reservation.is_served = True
                return await self._generate(request, endpoint, job, model, meter, reservation)

    async def count(self, request: web.Request, endpoint: GenerationEndpoint) -> int:
        """How many tokens the one prompt of the request has."""
        with self._intake.admission.admit() as reservation:
            job, _ = await self._job(request, endpoint, reservation)
            reservation.is_served = True
            [prompt] = job.prompts
            adds_special_tokens = job.text.adds_special_tokens
            with client_names(job.field_names):
                ids = await self._mesh.conversions.convert(
                    owner_of(request), prompt.kind, prompt.data, adds_special_tokens, job.chat
                )
            return len(ids)

    async def _job(
        self, request: web.Request, endpoint: GenerationEndpoint, reservation: Reservation
    ) -> tuple[Job, ModelInfo]:
        """Of the body only the prompts are kept, and what is to be done with them."""
        body, model = await self._intake.read(request, reservation)
        check_generates(model)
        with measured(request, "parse"):
            job = await endpoint.job(body, model, self._limits, self._intake.parser)
        reservation.replace(len(body), job.prompt_bytes + job.option_bytes)
        return job, model

    async def _generate(
        self,
        request: web.Request,
        endpoint: GenerationEndpoint,
        job: Job,
        model: ModelInfo,
        meter: RequestMeter,
        reservation: Reservation,
    ) -> web.StreamResponse:
        has_logprobs = job.params.logprobs is not None or job.has_prompt_logprobs
        spelling = self._mesh.tokens.spelling(job.names_by_id) if has_logprobs else None
        is_cut = job.text.max_prompt_tokens is not None
        echoes = await self._echoes(job) if job.echoes and not is_cut else []
        if job.first_text and job.parsing is None:
            echoes = [job.first_text]
        texts, offsets = await self._shown(job, reservation)
        public_id = request_id(request)
        reply_id = endpoint.reply_id(public_id)
        head = Head(reply_id, int(time.time()), job.model, model.fingerprint)
        client = Client(request)
        mesh_id = f"{public_id}~{secrets.token_hex(4)}"
        trace = request[TRACE]
        trace.ids = {public_id, reply_id}
        with self._mesh.generate(mesh_id, job, trace) as collector:
            meter.follow(collector)
            with trace.measure("accept"):
                prompt_ids = await self._accepted(collector)
            warn(client.response, [*job.warnings, *not_held(collector.left_out, job.field_names)])
            if num_dropped := collector.dropped.num_turns:
                client.response.headers[DROPPED_TURNS] = str(num_dropped)
            self._keep_ids(job, prompt_ids, reservation)
            param = "logprobs" if job.num_prompt_logprobs is None else "prompt_logprobs"
            self._hold(reservation, prompt_bytes(job, model, prompt_ids), param)
            if job.echoes and is_cut:
                echoes = await self._echoes(job)
            meter.accept()
            shown = echoes, prompt_ids, texts, offsets, collector.dropped
            reply = Reply(endpoint.format, head, job, spelling, *shown)
            parser = self._output_parser(job.parsing, collector, mesh_id)
            with trace.measure("reply") as attributes, client.counted(attributes):
                if job.is_stream:
                    writer = endpoint.stream_writer(reply, parser)
                    interval = job.stream_interval
                    await self._stream(client, collector, writer, meter, endpoint, interval)
                else:
                    body = endpoint.body_writer(reply, parser)
                    await self._whole(client, collector, body, meter, reservation, endpoint)
            meter.end()
            return await client.end()

    def _output_parser(
        self, parsing: Parsing | None, collector: OutputCollector, seed: str
    ) -> OutputParser | None:
        if parsing is None:
            return None
        table, starts = self._mesh.tokens, collector.starts
        return output_parser(parsing, table, starts, seed, self._reasoning_field)

    async def _echoes(self, job: Job) -> list[str]:
        async with accepting(self._accept_timeout_s):
            return [await self._echo(job.owner, prompt) for prompt in job.prompts]

    async def _echo(self, owner: str, prompt: Prompt) -> str:
        if prompt.kind == "ids":
            return await self._echo_of_ids(owner, prompt.data)
        return prompt.data.tobytes().decode()

    async def _echo_of_ids(self, owner: str, ids: Array) -> str:
        """Half a character at the end of a prompt is in the text behind it, which may end it."""
        written = self._mesh.tokens.written
        num_half = num_half_bytes(b"".join(map(written, ids[-MAX_CHAR_BYTES:].tolist())))
        while num_half and (num_bytes := len(written(int(ids[-1])))) <= num_half:
            ids, num_half = ids[:-1], num_half - num_bytes
        if not len(ids):
            return ""
        data = await self._mesh.conversions.convert(owner, "ids", ids, False, to="text")
        text = data.tobytes().decode()
        return text.rstrip("\N{REPLACEMENT CHARACTER}") if num_half else text

    async def _shown(
        self, job: Job, reservation: Reservation
    ) -> tuple[list[str], list[Array | None]]:
        """The texts of the prompts, and where in them their tokens are, if the client wants
        them."""
        texts = [prompt for prompt in job.prompts if job.returns_prompt_text]
        located = [prompt for prompt in job.prompts if job.returns_offsets]
        async with accepting(self._accept_timeout_s):
            encoded = [await self._converted(job, prompt, "text") for prompt in texts]
            offsets = [
                None if prompt.kind == "ids" else await self._converted(job, prompt, "offsets")
                for prompt in located
            ]
        reservation.grow(sum(each.nbytes for each in (*encoded, *offsets) if each is not None))
        return [each.tobytes().decode() for each in encoded], offsets

    async def _converted(self, job: Job, prompt: Prompt, to: ConvertedTo) -> Array:
        text = job.text
        return await self._mesh.conversions.convert(
            *(job.owner, prompt.kind, prompt.data, text.adds_special_tokens, job.chat, to),
            *(text.max_prompt_tokens, text.keeps_prompt_start),
        )

    async def _accepted(self, collector: OutputCollector) -> list[Array]:
        """The ids of the prompts, all of which will run, but for those aborted before."""
        async with accepting(self._accept_timeout_s):
            await collector.accepted()
        return [_NO_IDS if ids is None else ids for ids in collector.prompt_ids]

    def _keep_ids(self, job: Job, prompt_ids: list[Array], reservation: Reservation) -> None:
        """They are all that a replay needs of the prompts."""
        num_bytes = job.prompt_bytes
        job.prompts[:] = [Prompt("ids", ids) for ids in prompt_ids]
        reservation.replace(num_bytes, job.prompt_bytes)

    async def _stream(
        self,
        client: Client,
        collector: OutputCollector,
        writer: StreamWriter,
        meter: RequestMeter,
        endpoint: GenerationEndpoint,
        interval: int,
    ) -> None:
        await client.begin(STREAM_HEADERS, writer.fail)
        if opening := writer.open():
            await client.write(opening)
        pace = ChunkPace(interval)
        async with client.commented(self._stream_heartbeat_s, writer.heartbeat):
            try:
                async for update in collector:
                    meter.observe(update)
                    if (due := pace.push(update)) is not None:
                        await self._send(client, writer, due)
                    collector.consumed(update)
                    if writer.is_over(update):
                        collector.cut(update.index)
            except RequestError:
                for due in pace.rest():
                    await self._send(client, writer, due)
                raise
            await endpoint.keep()
        if closing := writer.close():
            await client.write(closing)

    async def _send(self, client: Client, writer: StreamWriter, update: ChoiceUpdate) -> None:
        client.is_between_events = False
        events = writer.write(update)
        if is_large(update):
            await self._pieces.send(events, client.write)
        elif data := b"".join(events):
            await client.write(data)
        client.is_between_events = True

    async def _whole(
        self,
        client: Client,
        collector: OutputCollector,
        writer: BodyWriter,
        meter: RequestMeter,
        reservation: Reservation,
        endpoint: GenerationEndpoint,
    ) -> None:
        async for update in collector:
            meter.observe(update)
            writer.add(update)
            reservation.grow(len(update.text.encode()) + update.num_tokens * TOKEN_BYTES)
            collector.consumed(update)
            if writer.is_over(update):
                collector.cut(update.index)
        await endpoint.keep()
        await send_json(client, writer.write(), self._pieces, is_large=writer.is_large)

    def _hold(self, reservation: Reservation, num_bytes: int, param: str) -> None:
        """For what ``param`` asks for."""
        limit = self._intake.admission.max_bytes
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
