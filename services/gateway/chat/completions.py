"""Generation: from a request of any API to its reply."""

import time
from dataclasses import replace

from aiohttp import web

from services.gateway.chat.generation import GenerationEndpoint
from services.gateway.chat.intake import Intake
from services.gateway.chat.media import Media
from services.gateway.chat.open_generation import GenerationTools, OpenGeneration, hold
from services.gateway.chat.requests.parse import Limits
from services.gateway.chat.requests.reply_bytes import token_bytes
from services.gateway.chat.serving import start_meter, warn
from services.gateway.chat.structure import Structure
from services.gateway.http.account import owner_of
from services.gateway.http.admission import Reservation
from services.gateway.http.pieces import PieceMaker
from services.gateway.http.request_id import check_request_id, request_id, take_request_id
from services.gateway.http.routes import observer_of
from services.gateway.http.violations import client_names
from services.gateway.mesh.job import Job
from services.gateway.mesh.mesh import Mesh
from shared.errors import InvalidRequest
from shared.settings.gateway import GatewayConfig
from shared.wire.messages import ModelInfo

NOT_GENERATING = "model_does_not_generate"


class Completions:
    """Body → Job → mesh → reply. The client gets nothing before the mesh has accepted the
    request."""

    def __init__(
        self,
        mesh: Mesh,
        intake: Intake,
        pieces: PieceMaker,
        config: GatewayConfig,
        structure: Structure,
        media: Media,
    ) -> None:
        self._mesh = mesh
        self._intake = intake
        self._limits = Limits(
            max_choices=config.max_choices,
            max_logprobs=config.max_logprobs,
            max_priority_boost=config.max_priority_boost,
            history_limit=config.history_limit,
            structure=structure,
            media=media,
        )
        self._tools = GenerationTools(mesh, pieces, config, structure)

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
            hold(reservation, token_bytes(job, model), param)
            job = self._intake.owned(request, job)
            meter = start_meter(request, job.model, started_s)
            with self._intake.texts(request, job.total_choices), client_names(job.field_names):
                reservation.is_served = True
                await self._load(request, job, reservation)
                generation = OpenGeneration(
                    tools=self._tools,
                    request=request,
                    endpoint=endpoint,
                    job=job,
                    model=model,
                    meter=meter,
                    reservation=reservation,
                )
                return await generation.run()

    async def count(self, request: web.Request, endpoint: GenerationEndpoint) -> int:
        """The number of tokens of the request's only prompt."""
        with self._intake.admission.admit() as reservation:
            job, _ = await self._job(request, endpoint, reservation)
            reservation.is_served = True
            with client_names(job.field_names):
                await self._load(request, job, reservation)
                [prompt] = job.prompts
                ids = await self._mesh.conversions.convert(
                    owner_of(request), prompt, job.text.adds_special_tokens, job.chat
                )
            return len(ids)

    async def _load(self, request: web.Request, job: Job, reservation: Reservation) -> None:
        load = self._limits.media.loaded
        job.prompts[:] = await load(job.prompts, owner_of(request), reservation)

    async def _job(
        self, request: web.Request, endpoint: GenerationEndpoint, reservation: Reservation
    ) -> tuple[Job, ModelInfo]:
        """Of the body only the prompts and the parsed options are kept."""
        body, model = await self._intake.read(request, reservation)
        _check_generates(model)
        with observer_of(request).measure("parse"):
            limits = replace(self._limits, promise=self._intake.promise(request))
            job = await endpoint.job(body, model, limits, self._intake.parser)
        reservation.replace(len(body), job.prompt_bytes + job.option_bytes)
        return job, model


def _check_generates(model: ModelInfo) -> None:
    """Raises InvalidRequest for a model that pools."""
    if model.pooling is None:
        return
    routes = "/v1/embeddings, /pooling, /score and /rerank"
    if model.pooling.task == "classify":
        routes = "/classify, /pooling, /score and /rerank"
    raise InvalidRequest(
        f"the model {model.names[0]} pools (runner): it writes no texts, and answers {routes}",
        param="model",
        code=NOT_GENERATING,
    )
