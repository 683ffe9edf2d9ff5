"""Chooses the drafter and the number of drafts from settings and model."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

from services.worker.machine.kv_cache import KVCache
from services.worker.models import CausalLM
from services.worker.speculation.drafter import Drafter, NoDrafter
from services.worker.speculation.mtp import MtpDrafter
from services.worker.speculation.ngram import NgramDrafter
from services.worker.step.sampler import Sampler
from services.worker.step.sampling import Rules
from shared.errors import ConfigError
from shared.settings.speculative import SpeculativeConfig
from shared.settings.worker import WorkerConfig
from shared.wire.messages import Capacity

log = logging.getLogger(__name__)

DEFAULT_DRAFTS = 3
DRAFTERS = {
    "mtp": "by an MTP head",
    "eagle3": "by an EAGLE-3 head",
    "ngram": "by prompt lookup",
}


class Speculation(NamedTuple):
    """Up to ``num_drafts`` per sequence and step, fewer if it ``adapts`` and they do not pay. An
    EAGLE-3 head is the model's MTP head."""

    method: Literal["mtp", "ngram", "none"]
    num_drafts: int
    adapts: bool


NO_SPECULATION = Speculation("none", 0, False)


def choose_speculation(wanted: SpeculativeConfig, has_head: bool) -> Speculation:
    """``has_head``: the model has an MTP head. Logs the choice. Raises ConfigError if the model
    lacks the chosen method."""
    method = wanted.method or ("mtp" if has_head else "none")
    if method == "none":
        log.info("drafts: none%s", "" if wanted.method else " (the model has no MTP head)")
        return NO_SPECULATION
    if method == "mtp" and not has_head:
        raise ConfigError("speculative-config: method mtp: the model has no MTP head")
    num_drafts = wanted.num_speculative_tokens or DEFAULT_DRAFTS
    depth = "adaptive, up to" if wanted.adaptive else "always"
    log.info("drafts: %s, %s %d a step", DRAFTERS[method], depth, num_drafts)
    return Speculation("mtp" if method == "eagle3" else method, num_drafts, wanted.adaptive)


def make_drafter(
    speculation: Speculation,
    wanted: SpeculativeConfig,
    model: CausalLM,
    sampler: Sampler,
    rules: Rules,
    kv_cache: KVCache,
    capacity: Capacity,
) -> Drafter:
    """A stage without the model's MTP head makes no drafts."""
    if speculation.method == "mtp":
        if model.draft_head is None:
            return NoDrafter(recomputes_states=True)
        make = model.draft_head.make_drafter or MtpDrafter
        return make(model.draft_head, sampler, rules, kv_cache, capacity)
    if speculation.method == "ngram":
        return NgramDrafter(*wanted.lookup_lens)
    return NoDrafter()


@contextmanager
def naming_the_setting() -> Iterator[None]:
    """Errors of a draft model name its setting."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"speculative-config: {error}") from None


def check_one_rank(settings: WorkerConfig) -> None:
    """For draft models. Raises ConfigError."""
    for key in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (num := getattr(settings, key)) > 1:
            method, name = settings.speculative_config.method, key.replace("_", "-")
            raise ConfigError(f"method {method}: {name} {num} is not supported; only 1 is")
