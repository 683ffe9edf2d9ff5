"""A server with keys: the page asks for one once, and keeps it in the tab."""

from collections.abc import Iterator

import pytest
from chatting import TALK, say, set_temperature, until_done
from conftest import Served, opened, serving
from playwright.sync_api import Browser, expect


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    with serving("--api-key", "right-key") as served:
        yield served


def test_the_key_is_typed_once(browser: Browser, locked: Served):
    with opened(browser, locked.url) as page:
        page.get_by_label("Key", exact=True).fill("wrong-key")
        page.get_by_role("button", name="Use this key").click()
        expect(page.get_by_role("alert")).to_contain_text("not one of this server's")
        page.get_by_label("Key", exact=True).fill("right-key")
        page.get_by_role("button", name="Use this key").click()
        expect(page.get_by_label("Model")).to_contain_text("shoal-tiny")
        set_temperature(page)
        say(page, TALK)
        expect(until_done(page)).to_contain_text("gateway")
        page.reload()
        expect(page.get_by_label("Model")).to_contain_text("shoal-tiny")
        assert page.evaluate("localStorage.length") == 0
        assert "right-key" not in page.url


def test_without_a_key_the_page_waits_for_one(browser: Browser, locked: Served):
    with opened(browser, locked.url) as page:
        page.get_by_role("button", name="Cancel").click()
        page.get_by_role("button", name="Enter the API key").click()
        expect(page.get_by_role("dialog")).to_be_visible()
