"""The settings of the load client."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cli.bench.lengths import Lengths
from shared.errors import ConfigError

DEFAULT_NUM_REQUESTS = 100
DEFAULT_CONCURRENCY = 8
DEFAULT_VERDICT_S = 60.0
VERDICT_LOAD = 1.5  # of the tested rate: keeping up with it leaves room for bursts
MIN_VERDICT_REQUESTS = 3  # one for each third
FIXED_BY_VERDICT = ("num_requests", "concurrency", "request_rate")
WRITTEN_BY_US = ("model", "prompt", "messages", "max_tokens", "stream", "stream_options", "n")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A setting not given is None. ``goodput`` holds targets in ms by figure. Raises ConfigError
    for contradictory settings."""

    url: str
    model: str | None
    endpoint: str
    api_key: str | None
    num_requests: int | None
    concurrency: int | None
    request_rate: float | None
    burstiness: float
    seed: int
    input_len: Lengths
    output_len: Lengths
    prefix_len: int
    num_prefixes: int
    vocab_size: int
    trace: Path | None
    replay: bool
    ignore_eos: bool
    temperature: float
    logprobs: int | None
    extra_body: dict[str, Any]
    warmup: int
    timeout: float
    goodput: dict[str, float]
    verdict: float | None
    duration: float | None
    json: Path | None
    rows: bool

    def __post_init__(self) -> None:
        self._check_load()
        if self.num_prefixes > 1 and not self.prefix_len:
            raise ConfigError(f"--num-prefixes: {self.num_prefixes} needs --prefix-len")
        for field in WRITTEN_BY_US:
            if field in self.extra_body:
                raise ConfigError(f"--extra-body: {field} is set by this program")
        if self.rows and self.json is None:
            raise ConfigError("--rows: needs --json, the file for the rows")

    def _check_load(self) -> None:
        if self.verdict is not None:
            for name in FIXED_BY_VERDICT:
                if getattr(self, name) is not None:
                    flag = f"--{name.replace('_', '-')}"
                    raise ConfigError(f"{flag}: --verdict sets its own, so give one of the two")
        elif self.duration is not None:
            raise ConfigError(f"--duration: {self.duration:g} needs --verdict")
        if self.replay and self.trace is None:
            raise ConfigError("--replay: needs --trace")
        if self.replay and self.rate is not None:
            raise ConfigError("--replay: the trace sets the times, so no rate can be given")

    @property
    def rate(self) -> float | None:
        """Requests per second; None if arrivals follow a trace or the answers."""
        return self.request_rate if self.verdict is None else VERDICT_LOAD * self.verdict

    @property
    def duration_s(self) -> float:
        return DEFAULT_VERDICT_S if self.duration is None else self.duration

    @property
    def is_open_loop(self) -> bool:
        return self.rate is not None or self.replay

    @property
    def max_open(self) -> int | None:
        """The most open requests; None for any number."""
        if self.concurrency is None and not self.is_open_loop:
            return DEFAULT_CONCURRENCY
        return self.concurrency

    def num_measured(self, num_lines: int | None) -> int:
        """The number of measured requests. ``num_lines`` is the trace's, whose first lines warm up.
        Raises ConfigError if the trace is too short."""
        wanted = self.num_requests
        if self.verdict is not None:
            wanted = max(MIN_VERDICT_REQUESTS, round(VERDICT_LOAD * self.verdict * self.duration_s))
        if num_lines is None:
            return wanted or DEFAULT_NUM_REQUESTS
        if self.warmup + (wanted or 1) > num_lines:
            text = f"{self.warmup} to warm up and {wanted or 1} to count"
            raise ConfigError(f"--trace: {text} are more than its {num_lines} lines")
        return wanted or num_lines - self.warmup

    def as_dict(self) -> dict[str, Any]:
        """The effective settings for the report, without the key."""
        values = {name: value for name, value in asdict(self).items() if name != "api_key"}
        load = {"concurrency": self.max_open, "request_rate": self.rate}
        lengths = {"input_len": str(self.input_len), "output_len": str(self.output_len)}
        paths = {name: values[name] and str(values[name]) for name in ("trace", "json")}
        return values | load | lengths | paths
