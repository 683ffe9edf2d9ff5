"""Reads requests with computations in the mesh."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Protocol, TypeVar

from aiohttp import web
from msgspec import structs

from services.gateway.http.account import ACCOUNT, owner_of
from services.gateway.http.admission import Admission, Reservation
from services.gateway.http.body import Body, BodyParser, BodyReader
from services.gateway.http.routes import observer_of
from services.gateway.mesh.job import Job
from services.gateway.mesh.mesh import Mesh
from shared.wire.envelope import Promise, RequestOptions
from shared.wire.messages import ModelInfo

Parsed = TypeVar("Parsed")


class Variants(Protocol):
    """Variants of the model of one kind, with names of their own: a seam for optional parts."""

    def names(self, model: ModelInfo) -> Sequence[str]:
        """Their names, in addition to those of ``model``."""

    def with_variant(self, options: RequestOptions, name: str) -> RequestOptions:
        """The options of a request for ``name``, which may be the model itself. Raises NotFound for
        a variant that is gone."""


class Intake:
    """Reads bodies within the room of ``admission``, and has them parsed for the served model."""

    def __init__(
        self,
        mesh: Mesh,
        admission: Admission,
        bodies: BodyReader,
        parser: BodyParser,
        *,
        shares_cache: bool,
        promise: Promise,
    ) -> None:
        """``promise`` applies without API keys."""
        self.variants: list[Variants] = []
        self.admission = admission
        self.bodies = bodies
        self.parser = parser
        self._mesh = mesh
        self._shares_cache = shares_cache
        self._promise = promise

    async def read(self, request: web.Request, reservation: Reservation) -> tuple[Body, ModelInfo]:
        """Returns the body, which ``reservation`` holds, and the model, once there is one, with the
        names of its variants. Raises RequestError, and what ``BodyReader.read`` does."""
        observer = observer_of(request)
        with observer.measure("read") as attributes:
            body = await self.bodies.read(request, reservation)
            attributes["num_bytes"] = len(body)
        with observer.measure("ready"):
            model = await self._mesh.tokenizers.ready_model()
        return body, self._with_variants(model)

    def _with_variants(self, model: ModelInfo) -> ModelInfo:
        """The model with all names that requests may give."""
        names = [name for each in self.variants for name in each.names(model)]
        return structs.replace(model, names=[*model.names, *names]) if names else model

    def texts(self, request: web.Request, num: int) -> AbstractContextManager[None]:
        """While the request generates ``num`` texts. Raises Overloaded at a limit of its key."""
        account = request.get(ACCOUNT)
        return account.texts(num) if account is not None else nullcontext()

    def promise(self, request: web.Request) -> Promise:
        """The promise to the request's API key."""
        account = request.get(ACCOUNT)
        return account.promise if account is not None else self._promise

    def owned(self, request: web.Request, job: Job) -> Job:
        """The job of the request's API key, with the model's variant. Raises NotFound."""
        job = job.of_owner(owner_of(request), shares_cache=self._shares_cache)
        options = job.options
        for each in self.variants:
            options = each.with_variant(options, job.model)
        return job if options is job.options else replace(job, options=options)

    async def parsed(
        self,
        request: web.Request,
        reservation: Reservation,
        parse: Callable[[Body, ModelInfo], Parsed],
        kept_bytes: Callable[[Parsed], int],
    ) -> tuple[Parsed, ModelInfo]:
        """Returns the result of ``parse`` of the body, and the model. ``reservation`` then holds
        the result's ``kept_bytes`` instead of the body's. Raises the errors of ``read`` and
        ``parse``."""
        body, model = await self.read(request, reservation)
        with observer_of(request).measure("parse"):
            parsed = await self.parser.parse(body, lambda body: parse(body, model))
        reservation.replace(len(body), kept_bytes(parsed))
        return parsed, model
