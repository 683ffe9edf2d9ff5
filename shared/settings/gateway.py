from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic_settings import NoDecode

from shared.settings.base import Settings
from shared.settings.fields import (
    MAX_OPEN_REQUESTS,
    Addresses,
    ApiKeys,
    HostNames,
    Names,
    Origins,
    ReasoningKey,
)
from shared.settings.json_object import reader_of
from shared.wire.envelope import MAX_PROMISE_MS
from shared.wire.messages import MAX_CHOICES, MAX_MEDIA, MAX_PRIORITY


class Limit(BaseModel):
    """The most files of each kind in a prompt, in the forms of vLLM's ``limit-mm-per-prompt``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    image: int = Field(32, ge=0, le=MAX_MEDIA)
    video: int = Field(4, ge=0, le=MAX_MEDIA)
    audio: int = Field(0, ge=0, le=0)  # not supported

    @field_validator("image", "video", "audio", mode="before")
    @classmethod
    def _read_count(cls, value: Any) -> Any:
        """Reads {"count": 4} as 4."""
        return value["count"] if isinstance(value, dict) and {*value} == {"count"} else value

    def __str__(self) -> str:
        return self.model_dump_json(exclude={"audio"})


if TYPE_CHECKING:
    MediaLimit = Limit
else:  # a model class would add its keys as flags
    MediaLimit = Annotated[Any, NoDecode, BeforeValidator(reader_of(Limit, '{"image": 4}'))]


ReasoningField = Literal["both", "reasoning", "reasoning_content"]


class GatewayConfig(Settings):
    tokenizer_address: Addresses = Field(
        [],
        description="tokenizers on other machines, tcp://HOST or tcp://HOST:PORT; every address"
        " of a name is dialled (default port: 5570)",
    )
    host: str = Field("127.0.0.1", description="HTTP address; with :: every one, of IPv4 too")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port")
    uds: Path | None = Field(
        None, description="Unix socket for HTTP, without TLS, instead of host and port"
    )
    page: bool = Field(True, description="serve a page at / with a chat and the live mesh")
    api_key: ApiKeys = Field(
        [],
        description="accepted API keys; flags are visible to others on the machine, so prefer the"
        " environment or api-key-file",
    )
    api_key_file: Path | None = Field(
        None,
        description="file with the accepted API keys, one a line; blank lines and # comments"
        " are skipped",
    )
    allowed_origins: Origins = Field(
        [], description="origins whose pages may use the API from a browser; *: all"
    )
    allowed_hosts: HostNames = Field(
        [],
        description="names under which a server without API keys answers, in addition to"
        " localhost and IP addresses; *: any (default: any, on the loopback none)",
    )
    ssl_certfile: Path | None = Field(
        None, description="PEM file with a certificate and its chain: HTTPS instead of HTTP"
    )
    ssl_keyfile: Path | None = Field(
        None, description="PEM file with the certificate's private key (default: in ssl-certfile)"
    )
    mesh_endpoint: bool = Field(
        True, description="answer GET /v1/mesh: all services of the mesh, their state and load"
    )
    max_body_bytes: int = Field(16 << 20, gt=0, description="largest request body; above it 413")
    max_open_requests: int = MAX_OPEN_REQUESTS
    accept_timeout_s: float = Field(
        60.0, gt=0, description="seconds until a request must be accepted; then 503"
    )
    max_buffered_bytes: int = Field(
        256 << 20,
        gt=0,
        description="bytes of bodies, replies and logprobs of all open requests; above it 429",
    )
    max_logprobs: int = Field(20, ge=-1, description="most logprobs of a token; -1: the vocabulary")
    max_choices: int = Field(
        128,
        gt=0,
        le=MAX_CHOICES,
        description="most choices of a request, n times its number of prompts",
    )
    limit_mm_per_prompt: MediaLimit = Field(
        Limit(), description='most files of a request, such as {"image": 4, "video": 1}'
    )
    allowed_media_domains: Names = Field(
        [], description="hosts of fetched files, such as a.example,minio:9000; *: any public one"
    )
    max_open_requests_per_key: int | None = Field(
        None,
        gt=0,
        description="texts generated at once for an API key; separately, by the same number,"
        " its other requests that cost work; above it 429",
    )
    max_tokens_per_minute_per_key: int | None = Field(
        None,
        gt=0,
        description="prompt and generated tokens of an API key per minute; beyond them 429",
    )
    ttft_ms: float | None = Field(
        None,
        gt=0,
        le=MAX_PROMISE_MS,
        description="promise: milliseconds until the first token; a request may ask for longer"
        " times, not for shorter (default: none)",
    )
    tpot_ms: float | None = Field(
        None,
        gt=0,
        le=MAX_PROMISE_MS,
        description="promise: milliseconds from each token to the next, on average; a request may"
        " ask for longer times, not for shorter (default: none)",
    )
    share_prefix_cache: bool = Field(
        False,
        description="API keys share cached prefixes; cached_tokens and times then reveal one"
        " key's prompts to another",
    )
    history_limit: int = Field(
        0,
        ge=-1,
        description="tokens of a chat's prompt above which its oldest turns are dropped, unless"
        " the request sets its own limit; -1: above the context; 0: never",
    )
    reasoning_field: ReasoningField = Field(
        "both", description="the field of a reply with the reasoning, or both"
    )
    response_store: Path | None = Field(
        None,
        description="SQLite file for the responses of /v1/responses, shared by the gateways of"
        " one machine (default: none are stored)",
    )
    response_store_bytes: int = Field(
        256 << 20, gt=0, description="most bytes of stored responses and their input"
    )
    response_store_age_s: float = Field(
        7 * 24 * 3600.0, gt=0, description="seconds until a stored response expires"
    )
    max_background_responses: int = Field(
        64,
        gt=0,
        description="background responses of an API key, running or queued, and twice that for"
        " all keys; above it 429",
    )
    trace_store_bytes: int = Field(
        16 << 20,
        ge=0,
        description="bytes of traces kept for /v1/traces; 0: no tracing",
    )
    otlp_traces_endpoint: str | None = Field(
        None,
        pattern="^https?://[^/]+",
        description="URL of an OpenTelemetry collector for all traces, by OTLP over HTTP, for"
        " example http://127.0.0.1:4318/v1/traces; needs shoal[otel]",
    )
    reasoning_key: ReasoningKey | None = Field(
        None,
        description="secret that encrypts reasoning for stateless clients, the same for all"
        " gateways; prefer the environment over a flag (default: one per process)",
    )
    max_priority_boost: int = Field(
        0,
        ge=0,
        le=MAX_PRIORITY,
        description="the range below 0 (sooner) that clients may use in a request's priority",
    )
    slow_client_s: float = Field(
        60.0,
        gt=0,
        description="seconds without reading after which a client is disconnected",
    )
    stream_heartbeat_s: float = Field(
        15.0,
        gt=0,
        description="seconds without a token after which a stream gets a comment, so that"
        " proxies keep it",
    )
    header_timeout_s: float = Field(
        20.0,
        gt=0,
        description="seconds for the head of a request, and for the TLS handshake",
    )
    keep_alive_timeout_s: float = Field(
        75.0, gt=0, description="seconds without a request after which a connection is closed"
    )
    replay_s: float = Field(
        30.0,
        ge=0,
        description="seconds that a request waits for another tokenizer or scheduler after a loss",
    )
    ready_wait_s: float = Field(
        5.0,
        ge=0,
        description="seconds that a new request waits for a ready mesh; then 503",
    )
    allow_runtime_lora_updating: bool = Field(
        False,
        description="clients may load and unload adapters: POST /v1/load_lora_adapter,"
        " /v1/unload_lora_adapter",
    )
    enable_tokenizer_info_endpoint: bool = Field(
        False,
        description="GET /tokenizer_info: the tokenizer's configuration with the chat template,"
        " for every client",
    )
    batch_dir: Path | None = Field(
        None,
        description="folder of /v1/files and /v1/batches, shared by gateways; without it they"
        " are refused",
    )
    max_file_bytes: int = Field(
        200 << 20, gt=0, description="largest file that clients may upload; above it 413"
    )
    max_batch_requests: int = Field(
        50_000, gt=0, description="most requests in a batch; one with more fails"
    )
    max_batches_per_key: int = Field(
        100,
        gt=0,
        description="open batches of an API key, or of a server without keys; above it 429",
    )
    max_open_batch_requests: int = Field(
        16, gt=0, description="open requests of all batches of a gateway"
    )
    batch_priority: int = Field(
        100,
        ge=0,
        le=MAX_PRIORITY,
        description="priority of batch requests; higher is later, and is preempted",
    )
    reuse_port: bool = Field(False, description="share the port with other gateways on the machine")

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("ssl-keyfile: there is no ssl-certfile for it")
        return self

    @model_validator(mode="after")
    def _check_traces(self) -> Self:
        if self.otlp_traces_endpoint is not None and not self.trace_store_bytes:
            raise ValueError("otlp-traces-endpoint: with trace-store-bytes 0 nothing is traced")
        return self

    @model_validator(mode="after")
    def _check_key_limits(self) -> Self:
        for name in ("max_open_requests_per_key", "max_tokens_per_minute_per_key"):
            has_keys = self.api_key or self.api_key_file is not None
            if getattr(self, name) is not None and not has_keys:
                raise ValueError(f"{name.replace('_', '-')} needs api-key or api-key-file")
        return self

    @model_validator(mode="after")
    def _check_api_key(self) -> Self:
        if "api_key" in self.model_fields_set and not self.api_key:
            raise ValueError("api-key: there is none; remove the setting to serve without")
        return self
