"""Talking to the model: streams, stop, retry, edit, parameters, tools, schemas, errors."""

import json
import re

from chatting import ENDLESS, TALK, answers, say, set_fields, set_temperature, until_done
from playwright.sync_api import Page, expect


def test_an_answer_streams_and_reports_its_cost(page: Page):
    set_fields(page, ENDLESS | {"max_tokens": 400})
    say(page, TALK)
    answer = answers(page).first
    expect(answer).to_have_attribute("data-status", "streaming")
    expect(answer.locator(".prose").last).to_contain_text("Shoal")
    expect(answer).to_have_attribute("data-status", "done")
    expect(answer.locator(".costs")).to_contain_text("400 out")
    expect(answer.locator(".costs")).to_contain_text("cut")


def test_stop_keeps_the_partial_answer_and_the_chat_goes_on(page: Page):
    set_fields(page, ENDLESS)
    say(page, TALK)
    expect(answers(page).locator(".prose").last).to_contain_text("Shoal")
    page.get_by_role("button", name="Stop").click()
    expect(answers(page)).to_have_attribute("data-status", "stopped")
    expect(answers(page).locator(".prose").last).to_contain_text("Shoal")
    set_fields(page, {"temperature": 0})
    say(page, "What is 12 + 30?")
    expect(until_done(page, 2)).to_have_attribute("data-status", "done")


def test_a_message_is_edited_and_an_answer_retried(page: Page):
    set_temperature(page)
    say(page, "What is 12 + 30?")
    expect(until_done(page)).to_contain_text("42")
    say(page, "What is 5 + 6?")
    until_done(page, 2)
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Your message").fill("What is 20 + 30?")
    page.get_by_role("button", name="Send instead").click()
    expect(until_done(page)).to_contain_text("20 + 30")
    expect(page.locator(".user")).to_have_count(1)
    page.get_by_role("button", name="Retry").click()
    expect(until_done(page)).to_contain_text("20 + 30")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()


def test_only_the_last_answer_can_be_retried(page: Page):
    set_temperature(page)
    for number in (1, 2):
        say(page, "What is 12 + 30?")
        until_done(page, number)
    expect(page.get_by_role("button", name="Retry")).to_have_count(1)
    expect(answers(page).last.get_by_role("button", name="Retry")).to_be_visible()


def test_an_edit_is_sent_and_left_by_keys(page: Page):
    set_temperature(page)
    say(page, "What is 12 + 30?")
    until_done(page)
    edit = page.get_by_role("button", name="Edit")
    edit.press("Enter")
    page.get_by_label("Your message").fill("Something else")
    page.get_by_label("Your message").press("Escape")
    expect(edit).to_be_focused()
    expect(page.locator(".said")).to_have_text("What is 12 + 30?")
    edit.press("Enter")
    page.get_by_label("Your message").fill("What is 20 + 30?")
    page.get_by_label("Your message").press("Enter")
    expect(until_done(page)).to_contain_text("20 + 30")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()


def test_the_request_holds_the_settings_of_the_panel(page: Page):
    page.get_by_label("System prompt").fill("Be brief.")
    set_temperature(page)
    page.get_by_role("spinbutton", name="Max tokens").fill("7")
    page.get_by_role("spinbutton", name="Seed").fill("3")
    page.get_by_text("More sampling").click()
    page.get_by_label("Stop strings").fill("one\ntwo words")
    set_fields(page, {"top_n_sigma": 2})
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, "Hi")
    body = json.loads(sent.value.post_data or "")
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    expected = {"temperature": 0, "max_tokens": 7, "seed": 3, "top_n_sigma": 2}
    assert {name: body[name] for name in expected} == expected
    assert body["stop"] == ["one", "two words"]
    assert "top_p" not in body
    until_done(page)


def test_turns_that_were_left_out_are_counted(page: Page):
    set_fields(page, {"temperature": 0, "max_tokens": 30, "history_limit": 60})
    for number in range(1, 6):
        say(page, f"What is {number} + {number}?")
        answer = until_done(page, number)
        expect(answer).to_have_attribute("data-status", "done")
    expect(answers(page).first.locator(".dropped-turns")).to_be_hidden()
    told = re.compile(r"^\d earlier turns? w(as|ere) left out of the prompt$")
    expect(answer.locator(".dropped-turns")).to_have_text(told)


def test_a_tool_is_called_and_answers_with_the_result_that_is_typed_in(page: Page):
    page.get_by_role("button", name="Call a tool").click()
    answer = until_done(page)
    expect(answer.locator(".call-name")).to_contain_text("multiply")
    assert json.loads(answer.locator("pre").inner_text()) == {"a": 1234, "b": 56}
    answer.get_by_label("Result").fill("69104")
    set_temperature(page, "9")
    send = answer.get_by_role("button", name="Send the result")
    send.click()
    expect(page.locator("#announcer")).to_contain_text("Temperature: expected")
    set_temperature(page)
    send.click()
    expect(until_done(page, 2)).to_contain_text("69104")
    first = answers(page).first
    first.get_by_role("button", name="Tokens").click()
    expect(first.get_by_role("option").first).to_be_visible()
    expect(first.get_by_role("button", name="Send the result")).to_have_count(0)
    expect(first.get_by_label("Result")).not_to_be_editable()


def test_an_answer_is_held_to_a_schema(page: Page):
    page.get_by_role("button", name="Fill a schema").click()
    text = until_done(page).locator(".prose").last.inner_text()
    assert json.loads(text) == {"name": "Ada", "age": 31, "city": "Rome"}
    page.get_by_role("button", name="As curl").click()
    expect(page.get_by_role("dialog")).to_contain_text("json_schema")
    expect(page.get_by_role("dialog")).not_to_contain_text("assistant")
    page.get_by_role("button", name="Close", exact=True).click()
    page.get_by_role("button", name="New chat").click()
    say(page, TALK)
    assert not until_done(page).locator(".prose").last.inner_text().startswith("{")


def test_an_answer_in_json_keeps_its_backslashes(page: Page):
    expected = {"said": 'a "b" *c* \\ d'}
    schema = {"name": "said", "schema": {"const": expected}}
    set_fields(page, {"response_format": {"type": "json_schema", "json_schema": schema}})
    say(page, "Hi")
    text = until_done(page).locator(".prose").last.inner_text()
    assert json.loads(text) == expected


def test_a_new_chat_resets_the_settings_of_an_example(page: Page):
    page.get_by_role("button", name="Call a tool").click()
    until_done(page)
    tools = page.get_by_label("Tools", exact=True)
    expect(tools).to_be_visible()
    slider = page.locator("input[type=range]").first
    expect(slider).to_have_value("0")
    page.get_by_role("button", name="New chat").click()
    expect(tools).to_be_hidden()
    expect(tools).to_have_value("")
    expect(slider).to_have_value("1")


def test_a_number_out_of_range_is_named_and_nothing_is_sent(page: Page):
    set_temperature(page, "9")
    say(page, "Hi")
    expect(page.get_by_text("expected a number from 0 to 2", exact=True)).to_be_visible()
    expect(page.locator("#announcer")).to_contain_text("Temperature: expected")
    expect(page.get_by_role("spinbutton", name="Temperature")).to_be_focused()
    expect(answers(page)).to_have_count(0)
    set_temperature(page)
    page.get_by_role("button", name="Send").click()
    until_done(page)


def test_a_field_that_is_not_json_is_named_and_nothing_is_sent(page: Page):
    page.locator("summary", has_text="JSON schema").click()
    page.get_by_label("JSON schema", exact=True).fill('{"type": ')
    page.locator("summary", has_text="JSON schema").click()
    say(page, "Hi")
    expect(page.locator("#problem-schema")).to_be_visible()
    expect(page.get_by_label("JSON schema", exact=True)).to_be_focused()
    expect(page.locator("#announcer")).to_contain_text("JSON schema")
    expect(answers(page)).to_have_count(0)
    expect(page.get_by_label("Message", exact=True)).to_have_value("Hi")


def test_a_refusal_is_shown_in_the_servers_words(page: Page):
    set_fields(page, {"ignore_eos": "perhaps"})
    say(page, "Hi")
    answer = until_done(page)
    expect(answer).to_have_attribute("data-status", "failed")
    expect(answer.get_by_role("alert")).to_contain_text("ignore_eos")
