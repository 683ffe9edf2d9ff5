"""Light and dark, wide and narrow, by keyboard and for screen readers."""

import pytest
from axe_playwright_python.sync_playwright import Axe
from chatting import set_fields, until_done
from conftest import Served, opened
from playwright.sync_api import Browser, Page, expect

SERIOUS = {"serious", "critical"}


def violations(page: Page) -> list[str]:
    found = Axe().run(page).response["violations"]
    return [
        f"{each['id']}: {node['html']} {node['failureSummary']}"
        for each in found
        if each["impact"] in SERIOUS
        for node in each["nodes"]
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_no_serious_barrier(browser: Browser, served: Served, width: int, scheme: str):
    options = {"color_scheme": scheme, "bypass_csp": True}  # axe is the test's own script
    with opened(browser, served.url, width=width, **options) as page:
        expect(page.get_by_label("Model")).to_be_visible()
        assert violations(page) == []
        page.get_by_role("button", name="Call a tool").click()
        answer = until_done(page)
        answer.get_by_role("button", name="Tokens").click()
        answer.get_by_role("button", name="Trace").click()
        expect(answer.locator(".trace table")).to_be_visible()
        answer.get_by_role("option").first.focus()
        assert violations(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_mesh_has_no_serious_barrier(browser: Browser, served: Served, scheme: str):
    with opened(browser, f"{served.url}#mesh", color_scheme=scheme, bypass_csp=True) as page:
        expect(page.locator(".service[data-role=worker]").first).to_be_visible()
        assert violations(page) == []


def test_nothing_is_wider_than_a_phone(browser: Browser, served: Served):
    with opened(browser, served.url, width=360, has_touch=True, is_mobile=True) as page:
        page.get_by_role("button", name="Request", exact=True).click()
        set_fields(page, {"structured_outputs": {"choice": ["```\n" + "wide " * 80 + "\n```"]}})
        page.get_by_role("button", name="Close the request's panel").click()
        page.get_by_label("Message", exact=True).fill("x" * 200)
        page.get_by_role("button", name="Send").click()
        until_done(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        box = page.get_by_label("Message", exact=True).bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= 800


def test_escape_leaves_a_panel_that_covers_the_chat(browser: Browser, served: Served):
    with opened(browser, served.url, width=700) as page:
        request = page.get_by_role("button", name="Request", exact=True)
        expect(request).to_have_attribute("aria-expanded", "false")
        request.click()
        expect(page.get_by_label("System prompt")).to_be_focused()
        expect(page.get_by_label("Message", exact=True)).to_be_hidden()
        page.keyboard.press("Escape")
        expect(page.get_by_label("System prompt")).to_be_hidden()
        expect(request).to_be_focused()
        expect(request).to_have_attribute("aria-expanded", "false")


def test_the_theme_is_chosen_and_kept(page: Page):
    page.get_by_role("button", name="Theme").click()
    page.get_by_role("button", name="Theme: light").click()
    page.reload()
    expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "dark"


def test_a_chat_needs_no_mouse(page: Page):
    page.keyboard.type("What is 2 + 3?")
    page.keyboard.press("Enter")
    until_done(page)
    page.keyboard.press("Shift+Tab")
    focused = page.evaluate("document.activeElement.textContent")
    assert focused == "Request"
    expect(page.locator("#announcer")).not_to_be_empty()
