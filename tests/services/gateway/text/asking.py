"""Requests for chats with tools and reasoning, as Jobs."""

from dataclasses import replace
from typing import Any

from services.gateway.mesh.job import Job
from services.gateway.text.structure import TextStructure
from shared.wire.messages import ModelInfo
from tests.services.gateway import asking
from tests.services.gateway.asking import CALLER
from tests.services.gateway.fakes import LIMITS

STRUCTURED = replace(LIMITS, structure=TextStructure())


def chat(model: ModelInfo = CALLER, **fields: Any) -> Job:
    return asking.chat(model, STRUCTURED, **fields)
