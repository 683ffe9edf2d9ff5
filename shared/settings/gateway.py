from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from shared.adapters.settings import AdapterRoutes
from shared.batch.settings import BatchSettings
from shared.media.settings import MediaRequests
from shared.responses.settings import ResponseSettings
from shared.settings.base import Settings
from shared.settings.fields import MAX_OPEN_REQUESTS, Addresses, ApiKeys, HostNames, Origins
from shared.traces.settings import TraceSettings
from shared.wire.envelope import MAX_PROMISE_MS
from shared.wire.messages import MAX_CHOICES, MAX_PRIORITY

ReasoningField = Literal["both", "reasoning", "reasoning_content"]


class PlainGateway(Settings):
    """Without the settings of optional parts."""

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
    max_priority_boost: int = Field(
        0,
        ge=0,
        le=MAX_PRIORITY,
        description="the range below 0 (sooner) that clients may use in a request's priority",
    )
    slow_client_s: float = Field(
        60.0, gt=0, description="seconds without reading after which a client is disconnected"
    )
    stream_heartbeat_s: float = Field(
        15.0,
        gt=0,
        description="seconds without a token after which a stream gets a comment, so that"
        " proxies keep it",
    )
    header_timeout_s: float = Field(
        20.0, gt=0, description="seconds for the head of a request, and for the TLS handshake"
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
        5.0, ge=0, description="seconds that a new request waits for a ready mesh; then 503"
    )
    enable_tokenizer_info_endpoint: bool = Field(
        False,
        description="GET /tokenizer_info: the tokenizer's configuration with the chat template,"
        " for every client",
    )
    reuse_port: bool = Field(False, description="share the port with other gateways on the machine")

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("ssl-keyfile: there is no ssl-certfile for it")
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


class GatewayConfig(
    AdapterRoutes,
    BatchSettings,
    MediaRequests,
    ResponseSettings,
    TraceSettings,
    PlainGateway,
):
    """The settings of a gateway."""
