"""Settings: one YAML file, environment (``SHOAL_…``) over it, flags over that.

Keys are those that vLLM's and FastDeploy's users write already. Each service reads its own class,
once, at start; derived values are computed where they are used and passed on explicitly.
pydantic-settings does the merging and the checking.
"""

import json
import os
import re
import secrets
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PositiveInt,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    CliSuppress,
    NoDecode,
    SettingsConfigDict,
    SettingsError,
)

from shared.config_sources import advised, merging, one_line, warn_of_unread_variables
from shared.endpoint import check_dialled, check_listened
from shared.errors import ConfigError
from shared.messages import (
    INSTANCE,
    MAX_BATCHED_TOKENS,
    MAX_BLOCK_SIZE,
    MAX_BLOCKS,
    MAX_CHOICES,
    MAX_SEQS,
    MAX_STALL_S,
)
from shared.speculative_config import Speculative, SpeculativeConfig

EMBEDDED_MODEL = Path(__file__).parent.parent / "models" / "shoal-tiny"


API_KEY = r"[!-~]{1,256}"

TCP_SETTINGS = ("listen_address", "tokenizer_address", "scheduler_address")
# Each process needs its own of these, so that one value for a whole mesh is a mistake.
SETTINGS_OF_ONE_SERVICE = {
    *("instance", "admin_host", "admin_port", "keys", "insecure_tcp"),
    *TCP_SETTINGS,
}


def _split(value: Any) -> Any:
    """A list of names from a file, or text: JSON, or names between commas."""
    if not isinstance(value, str):
        return value
    return json.loads(value) if value.startswith("[") else value.split(",")


def check_api_key(key: SecretStr) -> SecretStr:
    """Raises ValueError, which does not tell the key."""
    if not re.fullmatch(API_KEY, key.get_secret_value()):
        raise ValueError("expected 1 to 256 printable ASCII characters, no space")
    return key


def _path_as_text(value: Any) -> Any:
    """Programs may give a folder as they have it."""
    return str(value) if isinstance(value, Path) else value


def _check_origin(text: str) -> str:
    """Raises ValueError."""
    if text != "*" and not re.fullmatch(r"https?://[^/\s]+", text):
        raise ValueError("expected *, or an origin such as https://page.example")
    return text


def _split_sizes(value: Any) -> Any:
    """One alone, too; no text is no size."""
    if isinstance(value, int):
        return [value]
    return [] if value == "" else _split(value)


Names = Annotated[list[str], NoDecode, BeforeValidator(_split)]
Sizes = Annotated[list[PositiveInt], Field(min_length=1), NoDecode, BeforeValidator(_split_sizes)]
Model = Annotated[str, BeforeValidator(_path_as_text)]
ListenAddress = Annotated[str, AfterValidator(check_listened)]
ApiKeys = Annotated[
    list[Annotated[SecretStr, AfterValidator(check_api_key)]], NoDecode, BeforeValidator(_split)
]
Origins = Annotated[
    list[Annotated[str, AfterValidator(_check_origin)]], NoDecode, BeforeValidator(_split)
]
Addresses = Annotated[
    list[Annotated[str, AfterValidator(check_dialled)]], NoDecode, BeforeValidator(_split)
]


class Settings(BaseSettings):
    """Common to all services."""

    model_config = SettingsConfigDict(
        env_prefix="SHOAL_",
        frozen=True,
        extra="ignore",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_exit_on_error=False,
        protected_namespaces=(),
    )

    config: Path | None = Field(None, description="YAML file with any of these settings")
    mesh_dir: Path = Field(
        Path("/tmp") / f"shoal-{os.getuid()}" / "default",
        description="0700 directory of the mesh's sockets on this machine",
    )
    instance: str = Field(
        default_factory=lambda: secrets.token_hex(4),
        pattern=f"^{INSTANCE}$",
        description="name of this process in logs and in its sockets' paths",
    )
    admin_host: str = Field("127.0.0.1", description="address of the admin port")
    admin_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="tcp admin port (none: a unix socket in the mesh directory)",
    )
    admin_token: Annotated[SecretStr, AfterValidator(check_api_key)] | None = Field(
        None, description="token without which the admin port does nothing that changes something"
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = Field(
        "text", description="text, or json: one object a line"
    )
    log_requests: bool = Field(
        False, description="log a line for each request in each service when it ends"
    )
    drain_timeout_s: float = Field(30.0, ge=0, description="seconds to end open work after SIGTERM")
    keys: Path | None = Field(
        None, description="folder with the mesh's keys for tcp, as `shoal keys` writes it"
    )
    insecure_tcp: bool = Field(
        False,
        description="allow tcp without keys: anyone who reaches a port can read and forge traffic",
    )

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        """What no setting can tell alone."""
        if self.keys is None and not self.insecure_tcp:
            for name in TCP_SETTINGS:
                if getattr(self, name, None):
                    raise ValueError(
                        f"{name.replace('_', '-')} needs keys (a folder that `shoal keys` wrote),"
                        " or insecure-tcp in a network that nobody else can reach"
                    )
        return self

    @classmethod
    def load(cls, argv: list[str], prog: str) -> Self:
        """Merges file, environment and ``argv``; ConfigError has one line per wrong setting.

        Prints the help and exits where ``argv`` asks for it.
        """
        warn_of_unread_variables(ServeConfig.model_fields.keys())
        try:
            flags: CliSettingsSource[Any] = CliSettingsSource(
                cls, cli_parse_args=argv, cli_prog_name=prog
            )
            settings: Self = merging(cls, flags, ServeConfig.model_fields.keys())()
            return settings
        except ValidationError as error:
            raise ConfigError("\n".join(one_line(detail) for detail in error.errors())) from None
        except SettingsError as error:
            raise ConfigError(advised(str(error), cls.model_fields.keys(), prog)) from None

    def describe(self) -> str:
        """All settings that have a value in one line, for the start-up log."""
        settings = [(name.replace("_", "-"), value) for name, value in self if value is not None]
        return " ".join(f"{name}={value}" for name, value in settings)


class GatewayConfig(Settings):
    tokenizer_address: Addresses = Field(
        [],
        description="tokenizers on other machines, tcp://HOST or tcp://HOST:PORT with commas"
        " between; every address of a name is dialled (default port: 5570)",
    )
    host: str = Field("127.0.0.1", description="address to serve HTTP on")
    port: int = Field(8000, ge=0, le=65535, description="port to serve HTTP on")
    api_key: ApiKeys = Field(
        [],
        description="keys of which a client must show one, with commas between; flags can be seen"
        " by others on the machine, so better in the environment or in api-key-file",
    )
    api_key_file: Path | None = Field(
        None, description="file with one key a line; blank lines and # comments are passed over"
    )
    allowed_origins: Origins = Field(
        [], description="origins whose pages may use the API from a browser; *: all"
    )
    ssl_certfile: Path | None = Field(
        None, description="PEM file with a certificate and its chain: HTTPS instead of HTTP"
    )
    ssl_keyfile: Path | None = Field(
        None, description="PEM file with the certificate's private key (default: in ssl-certfile)"
    )
    max_body_bytes: int = Field(16 << 20, gt=0, description="largest request body; above it 413")
    max_open_requests: int = Field(4096, gt=0, description="open requests; above it 429")
    accept_timeout_s: float = Field(
        60.0, gt=0, description="seconds to wait until a request is accepted; then 503"
    )
    max_buffered_bytes: int = Field(
        256 << 20,
        gt=0,
        description="bytes of bodies, replies and logprobs that all open requests"
        " may hold; above it 429",
    )
    max_logprobs: int = Field(
        20, ge=-1, description="most logprobs of a token that clients may ask; -1: the vocabulary"
    )
    max_choices: int = Field(
        128,
        gt=0,
        le=MAX_CHOICES,
        description="most choices of a request, n times its number of prompts",
    )
    max_open_requests_per_key: int | None = Field(
        None, gt=0, description="generation requests that an API key may have open; above it 429"
    )
    max_tokens_per_minute_per_key: int | None = Field(
        None,
        gt=0,
        description="tokens, of prompts and generated, that an API key may use in a minute; when"
        " they are used up 429",
    )
    max_priority_boost: int = Field(
        0,
        ge=0,
        le=1000,
        description="how far below 0, which is sooner, clients may set a request's priority",
    )
    slow_client_s: float = Field(
        60.0, gt=0, description="seconds for which a client may not read; then its request ends"
    )
    stream_heartbeat_s: float = Field(
        15.0,
        gt=0,
        description="seconds without a token after which a stream gets a comment, so that proxies"
        " keep it",
    )
    header_timeout_s: float = Field(
        20.0,
        gt=0,
        description="seconds to send the head of a request, from the connection or from the first"
        " byte of a later one, and for the handshake of TLS; then the connection is closed",
    )
    keep_alive_timeout_s: float = Field(
        75.0, gt=0, description="seconds without a request after which a connection is closed"
    )
    replay_s: float = Field(
        30.0,
        ge=0,
        description="seconds that a request waits for another tokenizer or scheduler when its own"
        " is lost",
    )
    ready_wait_s: float = Field(
        5.0,
        ge=0,
        description="seconds that a new request waits while nothing is ready to serve it; then 503",
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


class TokenizerConfig(Settings):
    listen_address: ListenAddress | None = Field(
        None,
        description="address for services on other machines, tcp://HOST or tcp://HOST:PORT; HOST is"
        " an address, an interface or * (default ports: tokenizer 5570, scheduler 5571 and 5572)",
    )
    scheduler_address: Addresses = Field(
        [],
        description="schedulers on other machines, tcp://HOST or tcp://HOST:PORT with commas"
        " between; every address of a name is dialled (default ports: 5571, workers 5572)",
    )
    model: Model = Field(
        str(EMBEDDED_MODEL),
        description="a Hugging Face model folder, or org/name or org/name@revision of a model in"
        " the Hugging Face cache; nothing is downloaded",
    )
    served_model_name: Names = Field(
        [], description="names clients may use (default: the folder's name, or org/name)"
    )
    max_model_len: int | None = Field(
        None, gt=0, description="longest prompt plus output, in tokens (default: the model's)"
    )
    generation_config: str = Field(
        "auto",
        description="defaults of sampling: auto (generation_config.json of the model's folder),"
        " none (OpenAI's), or another folder",
    )
    max_open_requests: int = Field(4096, gt=0, description="open requests; above it 429")
    tokenizer_threads: int = Field(2, gt=0, description="threads that render and encode prompts")


class SchedulerConfig(Settings):
    listen_address: ListenAddress | None = Field(
        None,
        description="address for services on other machines, tcp://HOST or tcp://HOST:PORT; HOST is"
        " an address, an interface or * (default ports: tokenizer 5570, scheduler 5571 and 5572)",
    )
    max_waiting: int = Field(1024, gt=0, description="requests that wait for a slot; above it 429")
    pipeline_depth: int = Field(
        2,
        ge=1,
        le=2,
        description="steps in flight per worker: with 2 it never waits for the scheduler",
    )
    max_num_partial_prefills: int = Field(
        2, ge=1, description="sequences on a worker in the middle of their prompt at once"
    )
    max_long_partial_prefills: int = Field(
        1, ge=1, description="how many of these may be long; others that are long wait"
    )
    long_prefill_token_threshold: int = Field(
        0,
        ge=0,
        description="tokens to compute beyond which a prompt is long, and gives shorter ones a part"
        " of each step (0: as many as a step computes)",
    )
    enable_prefix_caching: bool = Field(True, description="reuse the KV cache of shared prefixes")
    priority_step_s: float = Field(
        10.0, gt=0, description="seconds of waiting that one step of priority is worth"
    )
    worker_grace_s: float = Field(
        60.0, ge=0, description="seconds that requests wait for a lost worker's replacement"
    )
    quarantine_s: float = Field(
        600.0,
        ge=0,
        description="seconds for which a request that workers died under is refused; 0: not at all",
    )

    @model_validator(mode="after")
    def _check_partial_prefills(self) -> Self:
        num, limit = self.max_long_partial_prefills, self.max_num_partial_prefills
        if num > limit:
            raise ValueError(
                f"max-long-partial-prefills: {num}: at most max-num-partial-prefills, {limit}"
            )
        return self


class WorkerConfig(Settings):
    scheduler_address: Addresses = Field(
        [],
        description="schedulers on other machines, tcp://HOST or tcp://HOST:PORT with commas"
        " between; every address of a name is dialled (default ports: 5571, workers 5572)",
    )
    model: Model = Field(
        str(EMBEDDED_MODEL),
        description="a Hugging Face model folder, or org/name or org/name@revision of a model in"
        " the Hugging Face cache; nothing is downloaded",
    )
    max_model_len: int | None = Field(
        None, gt=0, description="longest prompt plus output, in tokens (default: the model's)"
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="auto: bfloat16 where the machine computes it, else float32"
    )
    load_format: Literal["auto", "safetensors", "dummy"] = Field(
        "auto",
        description="auto, safetensors: the weights in the folder; dummy: random ones, for"
        " measurements",
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpu_claims: Path | None = Field(
        None,
        description="folder in which the workers of a machine take a GPU each (default: torch's"
        " current GPU; under serve: a folder of its own)",
    )
    native_kernels: bool = Field(
        True, description="on a CPU: compute with our native code where it can run the model"
    )
    attention_backend: Literal["triton", "sdpa"] = Field(
        "triton",
        description="on a GPU: our kernels, or torch's scaled_dot_product_attention over a copy of"
        " keys and values, to compare with (slow, and without CUDA graphs)",
    )
    enforce_eager: bool = Field(False, description="on a GPU: no CUDA graphs")
    cudagraph_capture_sizes: Sizes = Field(
        [1, 4, 16, 32, 64, 96, 128, 256],
        description="on a GPU: numbers of sequences whose steps are captured as CUDA graphs, with"
        " commas between, up to max-num-seqs; a step that only decodes takes the next larger one",
    )
    draft_acceptance: float | None = Field(
        None,
        ge=0,
        le=1,
        description="for measurements on a GPU: how likely a draft counts as right if those before"
        " it did, whatever it is; the output is not meaningful",
    )
    block_size: int = Field(16, gt=0, le=MAX_BLOCK_SIZE, description="tokens in one KV block")
    max_num_seqs: int = Field(128, gt=0, le=MAX_SEQS, description="sequences that run at once")
    max_num_batched_tokens: int | None = Field(
        None,
        gt=0,
        le=MAX_BATCHED_TOKENS,
        description="tokens a step computes (default: 512 on a CPU, 8192 on a GPU)",
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of the device's memory for weights, KV cache and peak"
    )
    speculative_config: Speculative = Field(
        SpeculativeConfig(),
        description='JSON object: "method" mtp (the model\'s own head; the default where it has'
        ' one), ngram (prompt lookup) or none; "num_speculative_tokens" (3); "adaptive" (true: as'
        ' many of these as pay); "prompt_lookup_min" (2) and "prompt_lookup_max" (4)',
    )
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = Field(
        "raw_logprobs",
        description="raw: as the model computes them; processed: after penalties, temperature and"
        " truncation, of the scores that are sampled from",
    )
    num_gpu_blocks_override: int | None = Field(
        None, gt=0, le=MAX_BLOCKS, description="KV blocks, instead of profiling"
    )
    kv_cache_memory_bytes: int | None = Field(
        None, gt=0, description="memory of the KV cache, instead of profiling (CPU: at most 4 GiB)"
    )
    num_threads: int | None = Field(
        None,
        gt=0,
        description="CPU threads (default: the cores we may use; but one for torch's operators)",
    )
    stall_s: float = Field(
        60.0,
        gt=0,
        le=MAX_STALL_S,
        description="work pending and no step for so long: not ready; twice: exit",
    )


class ServeConfig(GatewayConfig, TokenizerConfig, SchedulerConfig, WorkerConfig):
    """Serves a model from a mesh of processes on this machine."""

    gateways: int = Field(1, ge=1, le=64, description="gateways, which share the port")
    tokenizers: int = Field(1, ge=1, le=64, description="tokenizers")
    workers: int = Field(1, ge=1, le=64, description="workers, each with the whole model")

    liveness_timeout_s: float = Field(
        10.0,
        gt=0,
        description="seconds that a service may leave unanswered whether it is alive, six times"
        " as many while it is starting; then it is killed and started again",
    )

    instance: CliSuppress[str] = ""
    admin_host: CliSuppress[str] = ""
    admin_port: CliSuppress[int | None] = None
    keys: CliSuppress[Path | None] = None
    insecure_tcp: CliSuppress[bool] = False
    listen_address: CliSuppress[str | None] = None
    tokenizer_address: CliSuppress[Addresses] = []
    scheduler_address: CliSuppress[Addresses] = []

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        for name in sorted(self.model_fields_set & SETTINGS_OF_ONE_SERVICE):
            raise ValueError(f"{name.replace('_', '-')} is a setting of one service alone")
        return self
