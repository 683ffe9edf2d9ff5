"""The trace of an answer."""

from chatting import TALK, say, set_temperature, until_done
from playwright.sync_api import Page, expect


def test_spans_of_all_services_stand_beside_an_answer(page: Page):
    set_temperature(page)
    say(page, TALK)
    answer = until_done(page)
    answer.get_by_role("button", name="Trace").click()
    rows = answer.locator(".trace tbody tr.row")
    expect(rows.first).to_contain_text("POST /v1/chat/completions")
    roles = {row.get_attribute("data-role") for row in rows.all()}
    assert roles == {"gateway", "tokenizer", "scheduler", "worker"}
    lane = rows.first.locator(".lane").bounding_box()
    for span in answer.locator(".trace .span").all():
        box = span.bounding_box()
        assert lane is not None
        assert box is not None
        assert box["x"] >= lane["x"] - 1
        assert box["x"] + box["width"] <= lane["x"] + lane["width"] + 3
    opener = rows.first.get_by_role("button")
    expect(answer.locator(".trace dl").first).to_be_hidden()
    opener.press("Enter")
    expect(opener).to_have_attribute("aria-expanded", "true")
    expect(answer.locator(".trace dl").first).to_contain_text("num_output_tokens")
    details = answer.locator(".details td").first.bounding_box()
    assert details is not None
    assert lane is not None
    assert details["x"] + details["width"] >= lane["x"] + lane["width"] - 1
    page.set_viewport_size({"width": 375, "height": 800})
    box = rows.first.locator(".lane").bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 375
    page.set_viewport_size({"width": 1280, "height": 800})  # so that no panel covers the answer
    answer.get_by_role("button", name="Trace").click()
    expect(rows).to_have_count(0)
