"""Settings of traces."""

from typing import Self

from pydantic import Field, model_validator

from shared.settings.base import Settings


class TraceSettings(Settings):
    """Of a gateway."""

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

    @model_validator(mode="after")
    def _check_traces(self) -> Self:
        if self.otlp_traces_endpoint is not None and not self.trace_store_bytes:
            raise ValueError("otlp-traces-endpoint: with trace-store-bytes 0 nothing is traced")
        return self
