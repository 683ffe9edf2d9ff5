"""A gateway's counters, and its exported figures of the mesh."""

from pathlib import Path

from services.gateway.mesh.tokenizers import MeshMetrics, Tokenizers
from shared.wire.messages import Overview
from tests.services.gateway.client import TEXT, Client
from tests.services.gateway.fakes import fake_tokenizer, until

FISH = 'model_name="fish"'


async def values(client: Client) -> dict[str, float]:
    lines = (await client.get("/metrics")).text.splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in pairs}


async def test_metrics_count_requests_tokens_and_times(client: Client) -> None:
    before = await values(client)
    await client.answered(TEXT, "a", "b", prompt="a")
    after = await values(client)
    for name, change in {
        'shoal_http_requests_total{route="/v1/completions",status="200"}': 1,
        f"vllm:prompt_tokens_total{{{FISH}}}": 5,
        f"vllm:generation_tokens_total{{{FISH}}}": 2,
        f'vllm:request_success_total{{finished_reason="stop",{FISH}}}': 1,
        f"vllm:time_to_first_token_seconds_count{{{FISH}}}": 1,
        f"vllm:e2e_request_latency_seconds_count{{{FISH}}}": 1,
        f"vllm:request_prompt_tokens_count{{{FISH}}}": 1,
        f"vllm:request_prompt_tokens_sum{{{FISH}}}": 5,
        f"vllm:request_generation_tokens_count{{{FISH}}}": 1,
        f"vllm:request_generation_tokens_sum{{{FISH}}}": 2,
    }.items():
        assert after[name] - before.get(name, 0) == change, name
    assert after["shoal_open_requests"] == 0


async def test_each_delivery_of_a_choice_but_its_first_is_one_latency_between_tokens(
    client: Client,
) -> None:
    name = f"vllm:inter_token_latency_seconds_count{{{FISH}}}"
    before = await values(client)
    response, request = await client.streaming(TEXT, n=2)
    await response.content.readuntil(b"\n\n")
    for choice, texts in ((0, ["b", "c"]), (1, ["d"]), (1, ["e"])):
        request.text(*texts, choice=choice)
        await response.content.readuntil(b"\n\n")
    request.finish(choice=0)
    request.finish(choice=1)
    await response.read()
    assert (await values(client))[name] - before.get(name, 0) == 2


def replicas(values: dict[str, float]) -> dict[str, float]:
    kinds = ("tokenizer", "scheduler", "worker")
    return {kind: values[f'shoal_mesh_replicas{{service="{kind}"}}'] for kind in kinds}


async def test_figures_of_each_scheduler_through_two_tokenizers_count_once(
    tmp_path: Path, client: Client
) -> None:
    assert replicas(await values(client)) == {"tokenizer": 1, "scheduler": 0, "worker": 0}
    async with fake_tokenizer(tmp_path, "t2") as other:
        one = Overview("s1", 2, num_running=6, num_waiting=0, num_blocks=50, num_free_blocks=40)
        two = Overview("s2", 1, num_running=1, num_waiting=2, num_blocks=30, num_free_blocks=20)
        client.tokenizer.overviews, other.overviews = [one, two], [two]
        tokenizers = client.gateway._mesh.tokenizers
        await until(lambda: len(tokenizers) == 2)
        client.tokenizer.link.send_status()
        other.link.send_status()
        await until(lambda: all(each.peer.status.overview for each in tokenizers))
        metrics = await values(client)
        assert replicas(metrics) == {"tokenizer": 2, "scheduler": 2, "worker": 3}
        assert metrics[f"vllm:num_requests_running{{{FISH}}}"] == 7
        assert metrics[f"vllm:num_requests_waiting{{{FISH}}}"] == 2
        assert metrics[f"vllm:kv_cache_usage_perc{{{FISH}}}"] == 0.25


def test_without_a_scheduler_its_figures_are_absent() -> None:
    mesh_metrics = MeshMetrics(Tokenizers(ready_wait_s=0, on_change=lambda: None))
    assert [family.name for family in mesh_metrics.collect()] == ["shoal_mesh_replicas"]
