"""``/v1/embeddings``, ``/pooling``, ``/classify``, ``/score`` and ``/rerank``."""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from aiohttp import web
from prometheus_client import Counter

from services.gateway.api import Api, Core
from services.gateway.apis.pooling.parse import (
    PoolingJob,
    parse_classify,
    parse_embeddings,
    parse_pooling,
    pooling_of,
)
from services.gateway.apis.pooling.reply import (
    PooledReply,
    write_classes,
    write_embeddings,
    write_pooled,
    write_ranks,
    write_scores,
)
from services.gateway.apis.pooling.scoring import parse_rerank, parse_score
from services.gateway.chat.requests.parse import Limits
from services.gateway.chat.serving import accepting, send_json, start_meter, warn
from services.gateway.http.admission import Reservation
from services.gateway.http.body import Body
from services.gateway.http.client import Client
from services.gateway.http.request_id import check_request_id, request_id, take_request_id
from services.gateway.http.request_meter import RequestMeter
from services.gateway.http.routes import observer_of
from services.gateway.mesh.observer import RequestObserver
from services.gateway.mesh.output_collector import OutputCollector
from shared.errors import InternalError, InvalidRequest, RequestError
from shared.wire.codec import Array
from shared.wire.messages import ModelInfo, RunKind

POOLED_INPUTS = Counter(
    "shoal_pooled_inputs",
    "Texts and pairs with a pooled output sent to a client; task: embed or classify",
    ["model_name", "task"],
)
LARGE_REPLY = 1 << 14  # numbers, from which on it is written in pieces
ABORTED = "request_aborted"


@dataclass(frozen=True)
class PoolingEndpoint:
    """The differences between the endpoints."""

    id_prefix: str
    parse: Callable[[Body, ModelInfo, Limits], PoolingJob]
    write: Callable[[PooledReply], Iterator[bytes]]


EMBEDDINGS = PoolingEndpoint("embd-", parse_embeddings, write_embeddings)
POOLING = PoolingEndpoint("pool-", parse_pooling, write_pooled)
CLASSIFY = PoolingEndpoint("classify-", parse_classify, write_classes)
SCORE = PoolingEndpoint("score-", parse_score, write_scores)
RERANK = PoolingEndpoint("rerank-", parse_rerank, write_ranks)

ROUTES = {
    "/v1/embeddings": EMBEDDINGS,
    "/pooling": POOLING,
    "/classify": CLASSIFY,
    "/score": SCORE,
    "/v1/score": SCORE,
    "/rerank": RERANK,
    "/v1/rerank": RERANK,
    "/v2/rerank": RERANK,
}


class PoolingEndpoints(Api):
    """Body → Job → mesh → vectors → reply. Only some inputs of a large request are in the mesh at
    once."""

    generating_routes = (*ROUTES,)

    def __init__(self, core: Core) -> None:
        self._mesh = core.mesh
        self._intake = core.intake
        self._pieces = core.pieces
        config = core.config
        self._accept_timeout_s = config.accept_timeout_s
        self._limits = Limits(config.max_choices, config.max_logprobs, config.max_priority_boost)

    def routes(self) -> list[web.RouteDef]:
        return [self._route(path, endpoint) for path, endpoint in ROUTES.items()]

    def _route(self, path: str, endpoint: PoolingEndpoint) -> web.RouteDef:
        handler = partial(self.serve, endpoint=endpoint)
        return web.post(path, handler)

    async def serve(self, request: web.Request, endpoint: PoolingEndpoint) -> web.StreamResponse:
        started_s = time.monotonic()
        check_request_id(request)
        with self._intake.admission.admit() as reservation:
            asked, model = await self._parsed(request, endpoint, reservation)
            take_request_id(request, asked.job.request_id)
            asked = replace(asked, job=self._intake.owned(request, asked.job))
            meter = start_meter(request, asked.job.model, started_s)
            reservation.is_served = True
            public_id = request_id(request)
            pooling = pooling_of(model)
            observer, name = observer_of(request), endpoint.id_prefix + public_id
            observer.note_ids({public_id, name})
            vectors, num_tokens = await self._pool(public_id, asked, pooling.size, meter, observer)
            meter.end()
            POOLED_INPUTS.labels(asked.job.model, pooling.task).inc(len(vectors))
            reply = PooledReply(
                id=name,
                created=int(time.time()),
                asked=asked,
                pooling=pooling,
                vectors=vectors,
                num_tokens=num_tokens,
            )
            return await self._send(request, endpoint.write(reply), vectors, asked.job.warnings)

    async def _parsed(
        self, request: web.Request, endpoint: PoolingEndpoint, reservation: Reservation
    ) -> tuple[PoolingJob, ModelInfo]:
        """Of the body only the prompts are kept, and room is held for their results."""
        asked, model = await self._intake.parsed(
            request,
            reservation,
            lambda body, model: endpoint.parse(body, model, self._limits),
            lambda asked: asked.job.prompt_bytes,
        )
        size, limit = pooling_of(model).size, self._intake.admission.max_bytes
        num_bytes = 4 * len(asked.job.prompts) * size
        if num_bytes > limit:
            raise InvalidRequest(
                f"{len(asked.job.prompts)} vectors of {size} numbers take {num_bytes} bytes; the"
                f" limit is max-buffered-bytes = {limit}",
                param=asked.params[0].partition("[")[0],
            )
        reservation.hold(num_bytes)
        return asked, model

    async def _pool(
        self,
        public_id: str,
        asked: PoolingJob,
        size: int,
        meter: RequestMeter,
        observer: RequestObserver,
    ) -> tuple[list[Array], int]:
        """The vectors of all prompts, of ``size`` numbers unless they are cut, and the number of
        the prompts' tokens."""
        wanted = asked.job.params.pooling
        size = (wanted and wanted.num_dims) or size
        mesh_id = f"{public_id}~{secrets.token_hex(4)}"
        with self._mesh.generate(mesh_id, asked.job, observer) as collector:
            meter.follow(collector)
            try:
                with observer.measure("accept"):
                    async with accepting(self._accept_timeout_s):
                        await collector.begun()
                with observer.measure("collect"):
                    vectors = await _collected(collector, size, meter)
            except RequestError as error:
                if collector.failed_prompt is not None and error.param == "prompt":
                    error.param = asked.params[collector.failed_prompt]
                    error.message = f"{error.param}: {error.message}"
                raise
            finally:
                meter.accept()  # accepted prompts count, even if others fail
            return vectors, collector.num_prompt_tokens

    async def _send(
        self,
        request: web.Request,
        pieces: Iterator[bytes],
        vectors: list[Array],
        warnings: Sequence[str],
    ) -> web.StreamResponse:
        client = Client(request)
        warn(client.response, warnings)
        is_large = sum(map(len, vectors)) > LARGE_REPLY
        with observer_of(request).measure("reply") as attributes, client.counted(attributes):
            await send_json(client, pieces, self._pieces, is_large=is_large)
            return await client.end()


async def _collected(collector: OutputCollector, size: int, meter: RequestMeter) -> list[Array]:
    """Raises the RequestError that ended one of the prompts."""
    found: dict[int, Array] = {}
    async for update in collector:
        meter.observe(update)
        if update.run.kind != RunKind.POOLED:
            raise InvalidRequest("the request was aborted", code=ABORTED)
        if len(update.arrays.values) != size:
            raise InternalError(f"{len(update.arrays.values)} numbers came where {size} belong")
        found[update.index] = update.arrays.values
    return [found[index] for index in sorted(found)]
