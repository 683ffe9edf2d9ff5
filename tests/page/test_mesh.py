"""The live mesh: figures under load, and a killed worker."""

import os
import signal
from collections.abc import Iterator

import pytest
from chatting import ENDLESS, TALK, answers, say, set_fields, until_done
from conftest import Served, opened, serving, until_ready
from playwright.sync_api import Browser, Page, expect

from benchmarks.processes import services_of


@pytest.fixture
def own() -> Iterator[Served]:
    """A mesh of the test's own, since it loses a worker."""
    with serving("--workers", "2") as served:
        yield served


def start_streams(page: Page, number: int) -> None:
    page.get_by_role("link", name="Mesh").click()
    page.get_by_label("How many").fill(str(number))
    page.get_by_role("button", name="Start").click()


def test_a_killed_worker_turns_red_and_its_streams_go_on(browser: Browser, own: Served):
    with opened(browser, own.url) as page:
        start_streams(page, 6)
        workers = page.locator(".service[data-role=worker]")
        expect(workers).to_have_count(2)
        expect(page.locator(".service[data-role=scheduler]")).to_contain_text("running6")
        expect(page.locator(".link-labels span").first).to_contain_text("ms")
        os.kill(services_of(own.directory)["worker"], signal.SIGKILL)
        lost = page.locator(".service[data-state=lost]")
        expect(lost).to_have_count(1)
        expect(page.locator("#announcer")).to_contain_text("is lost")
        surface = page.locator(".service[data-state=ready]").first
        colour = "each => getComputedStyle(each).borderColor"
        assert lost.evaluate(colour) != surface.evaluate(colour)
        expect(page.locator(".stream[data-status=done]")).to_have_count(6, timeout=300_000)
        expect(page.locator(".stream").first).to_contain_text("1500 tokens")
        expect(page.locator(".service[data-role=worker][data-state=ready]")).to_have_count(2)


def test_an_answer_whose_gateway_is_killed_says_so_and_is_retried(browser: Browser, own: Served):
    with opened(browser, own.url) as page:
        set_fields(page, ENDLESS)
        say(page, TALK)
        prose = answers(page).locator(".prose").last
        expect(prose).to_contain_text("Shoal")
        os.kill(services_of(own.directory)["gateway"], signal.SIGKILL)
        expect(answers(page).get_by_role("alert")).to_contain_text("The connection broke")
        expect(prose).to_contain_text("Shoal")
        until_ready(own.server, f"{own.url}ready", own.log)
        set_fields(page, {"temperature": 0})
        page.get_by_role("button", name="Retry").click()
        expect(until_done(page)).to_have_attribute("data-status", "done")


def test_the_state_before_a_lost_connection_is_shown_as_old(page: Page):
    page.get_by_role("link", name="Mesh").click()
    expect(page.locator(".service[data-role=gateway]")).to_contain_text("ready")
    page.context.set_offline(True)
    expect(page.get_by_role("alert")).to_contain_text("cannot be seen")
    faded = "each => getComputedStyle(each).opacity < 1"
    assert page.locator(".column").first.evaluate(faded)
    page.context.set_offline(False)
    expect(page.get_by_role("alert")).to_be_hidden()
    assert not page.locator(".column").first.evaluate(faded)


def test_streams_and_workers_stand_side_by_side(page: Page):
    page.get_by_role("link", name="Mesh").click()
    streams = page.get_by_role("region", name="Streams", exact=True)
    last = page.locator(".service[data-role=worker]").last
    expect(last).to_contain_text("ready")
    beside, worker = streams.bounding_box(), last.bounding_box()
    assert beside is not None
    assert worker is not None
    assert beside["y"] < worker["y"] + worker["height"]
    assert beside["x"] + beside["width"] < worker["x"]


def test_the_mesh_is_asked_for_only_while_it_is_seen(page: Page):
    expect(page.get_by_role("link", name="Mesh")).to_be_visible()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(2500)
    assert not [url for url in asked if url.endswith("/v1/mesh")]
    page.get_by_role("link", name="Mesh").click()
    expect(page.locator(".service[data-role=gateway]")).to_contain_text("ready")
    page.get_by_role("link", name="Chat", exact=True).click()
    page.wait_for_timeout(500)
    asked.clear()
    page.wait_for_timeout(2500)
    assert not [url for url in asked if url.endswith("/v1/mesh")]
