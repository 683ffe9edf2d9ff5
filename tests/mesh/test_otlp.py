"""Traces at a collector: OTLP over HTTP, on loopback."""

import asyncio
from collections import defaultdict
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from services.gateway.service import GatewayService
from shared.settings.gateway import GatewayConfig
from tests.mesh.mesh import running_mesh

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """Keeps received spans by trace id, with their resource."""

    def __init__(self) -> None:
        self.spans: dict[str, list[tuple[dict[str, Any], Any]]] = defaultdict(list)
        app = web.Application()
        app.router.add_post("/v1/traces", self._take)
        self._runner = web.AppRunner(app)

    async def start(self) -> str:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1/traces"

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _take(self, request: web.Request) -> web.Response:
        for group in ExportTraceServiceRequest.FromString(await request.read()).resource_spans:
            resource = _values(group.resource.attributes)
            for span in (span for scope in group.scope_spans for span in scope.spans):
                self.spans[span.trace_id.hex()].append((resource, span))
        body = ExportTraceServiceResponse().SerializeToString()
        return web.Response(body=body, content_type="application/x-protobuf")


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


async def test_a_collector_gets_the_traces_that_their_clients_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    collector = Collector()
    endpoint = await collector.start()
    async with running_mesh(tmp_path) as mesh:
        config = GatewayConfig(mesh_dir=tmp_path, port=0, otlp_traces_endpoint=endpoint)
        mesh.start("gateway-1", GatewayService(config))
        await mesh.until_ready()
        async with aiohttp.ClientSession(mesh.url("gateway-1")) as http:
            for flags in ("01", "00"):
                trace_id = TRACE if flags == "01" else TRACE[::-1]
                headers = {"traceparent": f"00-{trace_id}-{PARENT}-{flags}"}
                body = {"prompt": "Hi there", "max_tokens": 3, "ignore_eos": True}
                async with http.post("/v1/completions", json=body, headers=headers) as response:
                    assert response.status == 200
                    version, answered, span_id, sampled = response.headers["traceparent"].split("-")
                    assert (version, answered, sampled) == ("00", trace_id, flags)
                    ids = {flags: span_id}
                if flags == "01":
                    recorded = ids[flags]
            async with http.get(f"/v1/traces/{TRACE}") as response:
                shown = await response.json()
        await mesh.lose("gateway-1")
    await collector.close()
    assert list(collector.spans) == [TRACE], "the other client does not record"
    received = {span.span_id.hex(): (resource, span) for resource, span in collector.spans[TRACE]}
    assert received.keys() == {span["id"] for span in shown["spans"]}
    whole_resource, whole = received[recorded]
    assert (whole.parent_span_id.hex(), shown["parent_id"]) == (PARENT, PARENT)
    assert whole_resource["service.name"] == "shoal-gateway"
    facts = _values(whole.attributes)
    assert facts["http.response.status_code"] == 200
    assert facts["gen_ai.usage.output_tokens"] == 3
    for span in shown["spans"][1:]:
        resource, sent = received[span["id"]]
        assert sent.parent_span_id.hex() == span["parent"]
        assert sent.name == span["name"]
        assert resource["service.name"] == f"shoal-{span['service']['role']}"
        assert resource["service.instance.id"] == span["service"]["instance"]
        duration_ms = (sent.end_time_unix_nano - sent.start_time_unix_nano) / 1e6
        assert duration_ms == pytest.approx(span["duration_ms"], abs=1e-3)
        assert _values(sent.attributes) == {
            f"shoal.{name}": value for name, value in span["attributes"].items()
        }


async def test_a_collector_that_is_gone_costs_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    collector = Collector()
    endpoint = await collector.start()
    await collector.close()
    async with running_mesh(tmp_path) as mesh:
        config = GatewayConfig(mesh_dir=tmp_path, port=0, otlp_traces_endpoint=endpoint)
        mesh.start("gateway-1", GatewayService(config))
        await mesh.until_ready()
        async with aiohttp.ClientSession(mesh.url("gateway-1")) as http:
            body = {"prompt": "Hi there", "max_tokens": 3}
            async with http.post("/v1/completions", json=body) as response:
                assert response.status == 200
        await asyncio.wait_for(mesh.lose("gateway-1"), 20)
