"""A user's actions in the chat."""

import json
from typing import Any

from playwright.sync_api import Locator, Page, expect

TALK = "How do the services of Shoal work together?"
ENDLESS = {"ignore_eos": True, "max_tokens": 1900, "temperature": 0}


def answers(page: Page) -> Locator:
    return page.locator(".answer")


def say(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_label("Message", exact=True).press("Enter")


def until_done(page: Page, num_answers: int = 1) -> Locator:
    """Waits for the end of the last of ``num_answers``."""
    expect(answers(page)).to_have_count(num_answers)
    last = answers(page).last
    expect(last).not_to_have_attribute("aria-busy", "true")
    return last


def set_fields(page: Page, fields: dict[str, Any]) -> None:
    """Adds ``fields`` to each request."""
    more = page.locator("details", has_text="More fields")
    if more.get_attribute("open") is None:
        more.locator("summary").click()
    page.get_by_label("More fields", exact=True).fill(json.dumps(fields))


def set_temperature(page: Page, value: str = "0") -> None:
    page.get_by_role("spinbutton", name="Temperature").fill(value)
