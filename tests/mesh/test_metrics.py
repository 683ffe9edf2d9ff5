"""Every metric used by dashboards and alerts is exported by its service."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version
from pathlib import Path

import aiohttp
from openai import AsyncOpenAI

from services.worker.metrics import show_parameters
from shared.link import link as link_module
from shared.link.address import admin_path
from shared.process.admin import AdminServer
from shared.wire.messages import ServiceName
from tests.mesh.mesh import READY_TIMEOUT_S, Mesh, running_mesh

ALL_SERVICES = [
    "shoal_bad_messages_total",
    "shoal_peers_refused_total",
    "shoal_ready",
]
NAMES: dict[ServiceName, list[str]] = {
    "gateway": [
        "shoal_buffered_bytes",
        'shoal_http_requests_total{route="/v1/completions",status="200"}',
        'shoal_link_round_trip_seconds_count{service="tokenizer"}',
        'shoal_mesh_replicas{service="scheduler"}',
        'shoal_mesh_replicas{service="tokenizer"}',
        'shoal_mesh_replicas{service="worker"}',
        'shoal_message_bytes_total{direction="out",service="tokenizer"}',
        'shoal_messages_total{direction="in",service="tokenizer"}',
        "shoal_open_requests",
        'shoal_peers{service="tokenizer"}',
        "shoal_replays_total",
        "shoal_stream_errors_total",
        'vllm:e2e_request_latency_seconds_count{model_name="shoal-tiny"}',
        'vllm:generation_tokens_total{model_name="shoal-tiny"}',
        'vllm:inter_token_latency_seconds_count{model_name="shoal-tiny"}',
        'vllm:kv_cache_usage_perc{model_name="shoal-tiny"}',
        'vllm:num_requests_running{model_name="shoal-tiny"}',
        'vllm:num_requests_waiting{model_name="shoal-tiny"}',
        'vllm:prompt_tokens_total{model_name="shoal-tiny"}',
        'vllm:request_generation_tokens_sum{model_name="shoal-tiny"}',
        'vllm:request_prompt_tokens_sum{model_name="shoal-tiny"}',
        'vllm:request_success_total{finished_reason="length",model_name="shoal-tiny"}',
        'vllm:time_to_first_token_seconds_count{model_name="shoal-tiny"}',
    ],
    "tokenizer": [
        'shoal_link_round_trip_seconds_count{service="gateway"}',
        'shoal_link_round_trip_seconds_count{service="scheduler"}',
        "shoal_decoded_tokens_total",
        "shoal_encoded_tokens_total",
        "shoal_open_requests",
        "shoal_prepare_seconds_count",
    ],
    "scheduler": [
        'shoal_kv_blocks{state="free"}',
        'shoal_kv_blocks{state="used"}',
        "shoal_keep_points",
        "shoal_kv_block_leak",
        'shoal_link_round_trip_seconds_count{service="worker"}',
        "shoal_plan_seconds_count",
        "shoal_prefix_hits_cut_total",
        "shoal_requeues_total",
        "shoal_sequences",
        'shoal_states{state="free"}',
        'shoal_states{state="kept"}',
        "shoal_step_age_seconds",
        "shoal_step_seconds_count",
        "shoal_step_sequences_count",
        "vllm:iteration_tokens_total_sum",
        "vllm:kv_cache_usage_perc",
        "vllm:num_preemptions_total",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:request_queue_time_seconds_count",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_drafts_total",
    ],
    "worker": [
        'shoal_memory_bytes{kind="kv_cache"}',
        'shoal_memory_bytes{kind="peak"}',
        'shoal_memory_bytes{kind="weights"}',
        'shoal_model_parameters{kind="active"}',
        'shoal_model_parameters{kind="total"}',
        "shoal_step_busy_seconds_total",
        "shoal_step_idle_seconds_total",
        "shoal_steps_total",
        "shoal_worker_guide_mask_seconds_total",
        "shoal_worker_guide_masks_total",
        "shoal_worker_sequences",
    ],
}

NUM_REQUESTS, NUM_TOKENS = 3, 40

Values = dict[str, float]


async def scrape(mesh: Mesh, name: ServiceName) -> Values:
    config = mesh.services[name]._config
    path = admin_path(config.mesh_dir, name, config.instance)
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session,
        session.get("http://admin/metrics") as response,
    ):
        lines = (await response.text()).splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


async def serve_requests(mesh: Mesh) -> int:
    """Returns the number of tokens of all prompts."""
    url = f"{mesh.url()}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=30) as client:
        replies = await asyncio.gather(
            *(
                client.completions.create(model="shoal-tiny", prompt="Once", max_tokens=NUM_TOKENS)
                for _ in range(NUM_REQUESTS)
            )
        )
    return sum(reply.usage.prompt_tokens for reply in replies if reply.usage)


def expected_changes(num_prompt_tokens: int) -> Values:
    """The last token of a sequence is never computed, but all prompt tokens are."""
    num_tokens = NUM_REQUESTS * NUM_TOKENS
    of_model = '{model_name="shoal-tiny"}'
    return {
        f"vllm:prompt_tokens_total{of_model}": num_prompt_tokens,
        f"vllm:generation_tokens_total{of_model}": num_tokens,
        f"vllm:request_prompt_tokens_sum{of_model}": num_prompt_tokens,
        f"vllm:request_prompt_tokens_count{of_model}": NUM_REQUESTS,
        f"vllm:request_generation_tokens_sum{of_model}": num_tokens,
        f"vllm:request_generation_tokens_count{of_model}": NUM_REQUESTS,
        "shoal_encoded_tokens_total": num_prompt_tokens,
        "shoal_decoded_tokens_total": num_tokens,
        "shoal_prepare_seconds_count": NUM_REQUESTS,
        "vllm:request_queue_time_seconds_count": NUM_REQUESTS,
        "vllm:iteration_tokens_total_sum": num_prompt_tokens + num_tokens - NUM_REQUESTS,
        "shoal_step_sequences_sum": num_tokens,
        "shoal_requeues_total": 0,
    }


@asynccontextmanager
async def observed_mesh(directory: Path) -> AsyncIterator[Mesh]:
    """With the admin sockets of its services."""
    async with running_mesh(directory) as mesh, AsyncExitStack() as stack:
        for name, service in mesh.services.items():
            await stack.enter_async_context(AdminServer(service, name, service._config))
        yield mesh


async def test_each_service_exports_its_metrics_and_counts_its_work(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(link_module, "HEARTBEAT_S", 0.05)
    show_parameters(3, 2)  # done by loading, which the fake engine skips
    async with observed_mesh(tmp_path) as mesh:
        before = await scrape(mesh, "scheduler")
        changes = expected_changes(await serve_requests(mesh))
        await mesh.until_idle()
        await mesh.until(lambda: not any(each.in_flight for each in mesh.core.workers.values()))
        await until_heartbeats_came_back(mesh, before)
        metrics = {name: await scrape(mesh, name) for name in NAMES}
        instances = {name: service._config.instance for name, service in mesh.services.items()}
    for service, names in NAMES.items():
        assert [name for name in [*ALL_SERVICES, *names] if name not in metrics[service]] == []
        who = f'instance="{instances[service]}",service="{service}",version="{version("shoal")}"'
        assert metrics[service][f"shoal_service_info{{{who}}}"] == 1
    after = metrics["scheduler"]  # in one process they all count together
    assert {name: after[name] - before.get(name, 0) for name in changes} == changes
    assert after["shoal_ready"] == 1
    assert after["shoal_open_requests"] == after["shoal_step_age_seconds"] == 0
    num_steps = after["shoal_steps_total"] - before["shoal_steps_total"]
    assert num_steps == after["shoal_step_seconds_count"] - before["shoal_step_seconds_count"]
    num_plans = after["shoal_plan_seconds_count"] - before["shoal_plan_seconds_count"]
    assert 0 < num_plans < num_steps, "a plan may ask for several steps"
    for name in ("shoal_step_busy_seconds_total", "shoal_step_idle_seconds_total"):
        assert after[name] > before[name]


async def until_heartbeats_came_back(mesh: Mesh, before: Values) -> None:
    """On each link to a service, after the mesh's figures have reached its gateway."""
    overview = 'shoal_mesh_replicas{service="worker"}'
    round_trips = [f'shoal_link_round_trip_seconds_count{{service="{name}"}}' for name in NAMES]
    async with asyncio.timeout(READY_TIMEOUT_S):
        while True:
            now = await scrape(mesh, "gateway")
            if now[overview] == 1 and all(now[name] > before.get(name, 0) for name in round_trips):
                return
            await asyncio.sleep(0.02)
