"""Tokens with their probabilities, and marks of drafts."""

import json
import re

from chatting import TALK, say, set_temperature, until_done
from playwright.sync_api import Page, expect

# Browsers do not always keep the body of a stream read by a page.
KEEP_REPLY = """() => {
  const ask = window.fetch;
  window.reply = new Promise((keep) => {
    window.fetch = async (address, options) => {
      const reply = await ask(address, options);
      if (`${address}`.endsWith("chat/completions")) keep(reply.clone().text());
      return reply;
    };
  });
}"""


def test_tokens_are_the_text_with_probabilities_and_drafts(page: Page):
    set_temperature(page)
    page.evaluate(KEEP_REPLY)
    say(page, TALK)
    answer = until_done(page)
    text = answer.locator(".prose").last.inner_text()
    chunks = [
        json.loads(line.removeprefix("data: "))
        for line in page.evaluate("() => window.reply").splitlines()
        if line.startswith("data: {")
    ]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    drafts = [
        draft
        for choice in choices
        for draft in choice.get("draft_logprobs", {"content": []})["content"]
    ]
    answer.get_by_role("button", name="Tokens").click()
    tokens = answer.get_by_role("option")
    assert "".join(tokens.all_text_contents()).startswith(text)
    accepted = {str(draft["position"]) for draft in drafts if draft["accepted"]}
    marked = answer.locator("[data-draft=accepted][data-index]")
    assert accepted
    assert {each.get_attribute("data-index") for each in marked.all()} == accepted
    tokens.nth(1).hover()
    card = page.get_by_role("tooltip")
    expect(card.locator(".alternative")).to_have_count(5)
    expect(card.locator(".chosen code")).to_have_text(f"“{tokens.nth(1).text_content()}”")


def test_tokens_are_read_by_keyboard(page: Page):
    set_temperature(page)
    say(page, TALK)
    answer = until_done(page)
    answer.get_by_role("button", name="Tokens").click()
    answer.get_by_role("option").first.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
    focused = page.locator(":focus")
    expect(focused).to_have_attribute("data-index", "1")
    assert re.search(r", [\d.]+ %", focused.get_attribute("aria-label") or "")
    expect(page.get_by_role("tooltip")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("tooltip")).to_be_hidden()


def test_the_next_answer_is_shown_as_tokens_too_with_its_cached_prompt(page: Page):
    set_temperature(page)
    page.get_by_label("System prompt").fill("The tide comes in. " * 12)
    say(page, TALK)
    until_done(page).get_by_role("button", name="Tokens").click()
    say(page, "What is 2 + 3?")
    second = until_done(page, 2)
    expect(second.get_by_role("option").first).to_be_visible()
    shown = second.locator(".prompt-bar").inner_text()
    match = re.search(r"prompt (\d+) / (\d+) cached", shown)
    assert match
    assert 0 < int(match[1]) < int(match[2])
    button = second.get_by_role("button", name="Tokens", pressed=True)
    button.click()
    expect(second.get_by_role("option")).to_have_count(0)
