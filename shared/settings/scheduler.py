from typing import Self

from pydantic import Field, model_validator

from shared.media.settings import MediaMemory
from shared.settings.base import Settings
from shared.settings.fields import LISTEN_ADDRESS, ListenAddress


class PlainScheduler(Settings):
    """Without the settings of optional parts."""

    listen_address: ListenAddress | None = LISTEN_ADDRESS
    max_waiting: int = Field(1024, gt=0, description="requests in the waiting queue; above it 429")
    pipeline_depth: int = Field(
        2,
        ge=1,
        le=2,
        description="plans in flight per worker; with 2 a worker never waits for the scheduler",
    )
    max_num_partial_prefills: int = Field(
        2, ge=1, description="sequences of a worker in the middle of their prompt"
    )
    max_long_partial_prefills: int = Field(
        1, ge=1, description="long ones among these; further long prompts wait"
    )
    long_prefill_token_threshold: int = Field(
        0,
        ge=0,
        description="tokens to compute above which a prompt is long and yields a part of each"
        " step to shorter ones (0: the tokens of a step)",
    )
    enable_prefix_caching: bool = Field(True, description="reuse the KV cache of shared prefixes")
    priority_step_s: float = Field(
        10.0, gt=0, description="seconds of waiting that equal one step of priority"
    )
    later_priority_share: float = Field(
        0.2,
        gt=0,
        lt=1,
        description="share of a worker's time for lower priorities (for example batches) while"
        " higher ones run; alone they get all of it",
    )
    min_stream_rate: float = Field(
        0.5,
        ge=0,
        le=0.8,
        description="share of its rate without prompts that a stream keeps beside prompts, unless"
        " it was promised another time per token; 0: prompts come first",
    )
    worker_grace_s: float = Field(
        60.0, ge=0, description="seconds that requests wait for the replacement of a lost worker"
    )
    quarantine_s: float = Field(
        600.0,
        ge=0,
        description="seconds for which requests that workers died under are refused; 0: never",
    )

    @model_validator(mode="after")
    def _check_partial_prefills(self) -> Self:
        num, limit = self.max_long_partial_prefills, self.max_num_partial_prefills
        if num > limit:
            raise ValueError(
                f"max-long-partial-prefills: {num}: at most max-num-partial-prefills, {limit}"
            )
        return self


class SchedulerConfig(
    MediaMemory,
    PlainScheduler,
):
    """The settings of a scheduler."""
