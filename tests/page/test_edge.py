"""The page in a deployed mesh: behind the stack's edge, with keys, under load."""

import json
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
from chatting import TALK, say, set_temperature, until_done
from conftest import ROOT, opened, serving, until_ready
from playwright.sync_api import Browser, Page, expect

from benchmarks.harness.ports import free_port

KEY = "right-key"
NUM_STREAMS, NUM_REQUESTS = 200, 2  # a request has the most choices max-choices allows


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of HAProxy with the stack's own configuration in front of a mesh with keys."""
    haproxy = shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin")
    assert haproxy, "no HAProxy; on Debian: apt-get install haproxy"
    folder = tmp_path_factory.mktemp("edge")
    with serving("--api-key", KEY, "--workers", "2") as served:
        port = free_port()
        (folder / "haproxy.cfg").write_text(configuration(served.url, port))
        with (folder / "log").open("wb") as log:
            proxy = subprocess.Popen(
                [haproxy, "-db", "-f", folder / "haproxy.cfg"],
                stdout=log,
                stderr=log,
                env=os.environ | {"EDGE_CERTIFICATE": ""},
            )
            try:
                until_ready(proxy, f"http://127.0.0.1:{port}/ready", folder / "log")
                yield f"http://127.0.0.1:{port}/"
            finally:
                proxy.kill()
                proxy.wait()


def configuration(gateway: str, port: int) -> str:
    """The stack's configuration, with this machine's addresses in place of Docker's names."""
    text = Path(ROOT, "compose/edge/haproxy.cfg").read_text()
    address = gateway.removeprefix("http://").strip("/")
    for pattern, new, num in [
        (r"server-template gateway 32 gateway:8000", f"server gateway {address}", 2),
        (r"bind :8000$", f"bind 127.0.0.1:{port}", 1),
        (r"bind :8405$", f"bind 127.0.0.1:{free_port()}", 1),
    ]:
        text, num_found = re.subn(pattern, new, text, flags=re.MULTILINE)
        assert num_found == num, pattern
    return text


def enter(page: Page) -> None:
    page.get_by_label("Key", exact=True).fill(KEY)
    page.get_by_role("button", name="Use this key").click()
    expect(page.get_by_label("Model")).to_contain_text("shoal-tiny")


def stream(address: str, number: int, stops: Event) -> int:
    """Reads ``number`` long answers of one request until stopped; returns the number of begun
    ones."""
    body = {
        "model": "shoal-tiny", "messages": [{"role": "user", "content": TALK}], "n": number,
        "stream": True, "max_tokens": 1500, "ignore_eos": True,
    }  # fmt: skip
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    data, begun = json.dumps(body).encode(), set()
    request = urllib.request.Request(f"{address}v1/chat/completions", data, headers)
    with urllib.request.urlopen(request, timeout=120) as events:
        for line in events:
            if stops.is_set():
                break
            if line.startswith(b"data: {"):
                begun |= {choice["index"] for choice in json.loads(line[6:])["choices"]}
    return len(begun)


def test_a_chat_streams_and_the_mesh_is_seen_through_the_edge(browser: Browser, edge: str):
    with opened(browser, edge) as page:
        enter(page)
        set_temperature(page)
        say(page, TALK)
        answer = until_done(page)
        expect(answer).to_contain_text("gateway")
        answer.get_by_role("button", name="Trace").click()
        expect(answer).to_contain_text("prefill")
        page.get_by_role("link", name="Mesh").click()
        expect(page.locator(".service[data-role=worker][data-state=ready]")).to_have_count(2)


def test_the_page_serves_while_two_hundred_streams_run(browser: Browser, edge: str):
    stops = Event()
    with opened(browser, edge) as page, ThreadPoolExecutor(NUM_REQUESTS) as threads:
        try:
            enter(page)
            each = NUM_STREAMS // NUM_REQUESTS
            streams = [threads.submit(stream, edge, each, stops) for _ in range(NUM_REQUESTS)]
            page.get_by_role("link", name="Mesh").click()
            scheduler = page.locator(".service[data-role=scheduler]")
            expect(scheduler).to_contain_text(f"running{NUM_STREAMS}", timeout=60_000)
            page.get_by_role("link", name="Chat", exact=True).click()
            set_temperature(page)
            page.get_by_role("spinbutton", name="Max tokens").fill("20")
            say(page, TALK)
            expect(until_done(page)).to_have_attribute("data-status", "done", timeout=120_000)
            page.get_by_role("link", name="Mesh").click()
            page.get_by_label("How many").fill("6")
            page.get_by_role("button", name="Start").click()
            expect(scheduler).to_contain_text(f"running{NUM_STREAMS + 6}", timeout=60_000)
            page.get_by_role("button", name="Stop").click()
            expect(scheduler).to_contain_text(f"running{NUM_STREAMS}", timeout=60_000)
        finally:
            stops.set()
        assert [each.result() for each in streams] == [NUM_STREAMS // NUM_REQUESTS] * NUM_REQUESTS
        expect(scheduler).to_contain_text("running0", timeout=60_000)
