"""Images that a user pastes, drops, picks and removes, and a tiny model that sees them."""

import base64
import random
import struct
import subprocess
import zlib
from collections.abc import Iterator

import pytest
from chatting import say, set_fields, until_done
from conftest import ROOT, Served, opened, serving
from playwright.sync_api import Browser, Locator, Page, expect
from test_look import violations

FILES = """([images, name, kind]) => {
  const data = new DataTransfer();
  for (const [number, text] of images.entries()) {
    const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
    data.items.add(new File([bytes], `${name}${number}.png`, { type: "image/png" }));
  }
  const about = { bubbles: true, cancelable: true };
  const event = kind === "paste"
    ? new ClipboardEvent(kind, { ...about, clipboardData: data })
    : new DragEvent(kind, { ...about, dataTransfer: data });
  const place = kind === "paste" ? "#composer" : kind === "drop" ? ".panel" : "header";
  return document.querySelector(place).dispatchEvent(event);
}"""
COPY = """async (text) => {
  const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  const blob = new Blob([bytes], { type: "image/png" });
  await navigator.clipboard.write([new ClipboardItem({ "image/png": blob })]);
}"""
SLOW = """() => {
  const real = createImageBitmap;
  window.createImageBitmap = async (file) => {
    await new Promise((resolve) => setTimeout(resolve, 300));
    return real(file);
  };
}"""


def png(width: int, height: int, blue: int) -> bytes:
    """Stripes."""
    return png_of(width, [bytes([row % 256, 90, blue]) * width for row in range(height)])


def png_of(width: int, rows: list[bytes]) -> bytes:
    height, lines = len(rows), b"".join(b"\0" + row for row in rows)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (b"IHDR", head), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


MAX_ARGUMENT_BYTES = 128 << 10  # of Linux
NOISE = png_of(300, [random.Random(row).randbytes(900) for row in range(200)])
SHOT, FISH, HUGE = png(1280, 800, 200), png(120, 160, 40), png(1600, 1400, 0)


def give(page: Page, kind: str, *images: bytes) -> bool:
    """Returns whether the browser would go on with a ``paste``, ``drop`` or ``dragover``."""
    texts = [base64.b64encode(each).decode() for each in images]
    goes_on: bool = page.evaluate(FILES, [texts, kind, kind])
    return goes_on


def size_of(url: str) -> tuple[int, int]:
    """Width and height of a PNG."""
    width, height = struct.unpack(">II", base64.b64decode(url.partition(",")[2])[16:24])
    return width, height


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("model")
    save = [ROOT / ".venv/bin/python", "-m", "tests.media.checkpoints", folder]
    subprocess.run(save, cwd=ROOT, check=True, capture_output=True)
    with serving(
        "--model", str(folder), "--served-model-name", "tiny-vl", "--max-image-pixels", "2000000"
    ) as served:
        yield served


@pytest.fixture
def page(browser: Browser, seeing: Served) -> Iterator[Page]:
    with opened(browser, seeing.url) as page:
        expect(page.get_by_role("button", name="Add an image")).to_be_visible()
        set_fields(page, {"temperature": 0, "max_tokens": 12})
        yield page


def waiting(page: Page) -> Locator:
    """The images that are not sent yet."""
    return page.locator(".composer canvas")


def test_a_screenshot_is_pasted_another_dropped_and_an_answer_comes(page: Page):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.evaluate(COPY, base64.b64encode(SHOT).decode())
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.press("Control+V")
    expect(waiting(page)).to_have_count(1)
    assert not give(page, "dragover", FISH)
    assert not give(page, "drop", FISH)
    expect(waiting(page)).to_have_count(2)
    assert waiting(page).first.evaluate("each => each.width") <= 320, "a screen does not need more"
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, "Which is bluer?")
    parts = sent.value.post_data_json["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["image_url", "image_url", "text"]
    assert size_of(parts[0]["image_url"]["url"]) == (1280, 800)
    answer = until_done(page)
    expect(answer).to_have_attribute("data-status", "done")
    expect(page.locator(".user canvas")).to_have_count(2)
    expect(waiting(page)).to_have_count(0)
    say(page, "And now?")
    expect(until_done(page, 2)).to_have_attribute("data-status", "done")


def test_an_image_is_removed_and_another_is_sent_without_words(page: Page):
    give(page, "paste", FISH, SHOT)
    expect(waiting(page)).to_have_count(2)
    page.get_by_role("button", name="Remove paste0.png").click()
    expect(waiting(page)).to_have_count(1)
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Send").click()
    [part] = sent.value.post_data_json["messages"][0]["content"]
    assert part["type"] == "image_url"
    expect(until_done(page)).to_have_attribute("data-status", "done")


def test_a_file_that_is_no_image_is_named_and_the_message_stays(page: Page):
    page.get_by_label("Message", exact=True).fill("Describe it.")
    give(page, "drop", b"no image")
    expect(page.get_by_role("alert")).to_have_text("The browser cannot read drop0.png")
    expect(page.get_by_label("Message", exact=True)).to_have_value("Describe it.")
    page.get_by_role("button", name="Send").click()
    expect(until_done(page)).to_have_attribute("data-status", "done")
    expect(page.locator(".composer .problem")).to_be_hidden()


def test_an_image_that_the_server_refuses_is_named_in_its_words_and_removed(page: Page):
    give(page, "paste", FISH, HUGE)
    expect(waiting(page)).to_have_count(2)
    say(page, "Describe it.")
    answer = until_done(page)
    expect(answer).to_have_attribute("data-status", "failed")
    expect(answer.get_by_role("alert")).to_contain_text("messages[0].content[1].image_url.url")
    page.get_by_role("button", name="Edit").click()
    page.get_by_role("button", name="Remove paste1.png").click()
    page.get_by_role("button", name="Send instead").click()
    expect(until_done(page)).to_have_attribute("data-status", "done")
    expect(page.locator(".user canvas")).to_have_count(1)


def test_a_message_waits_for_its_images(page: Page):
    page.evaluate(SLOW)
    area = page.get_by_label("Message", exact=True)
    area.fill("Describe it.")
    give(page, "paste", FISH, SHOT)
    with page.expect_request("**/v1/chat/completions") as sent:
        area.press("Enter")
    parts = sent.value.post_data_json["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["image_url", "image_url", "text"]
    until_done(page)
    area.fill("And this?")
    give(page, "paste", b"no image", FISH)
    area.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("The browser cannot read paste0.png")
    expect(waiting(page)).to_have_count(1)
    expect(area).to_have_value("And this?")
    expect(page.locator(".user")).to_have_count(1)


def test_a_model_without_images_says_so(browser: Browser, served: Served):
    with opened(browser, served.url) as page:
        expect(page.get_by_label("Model")).to_be_visible()
        assert not give(page, "drop", FISH), "the browser would leave the page"
        expect(page.get_by_role("alert")).to_have_text("The model takes no images")
        expect(waiting(page)).to_have_count(0)


def test_a_request_with_an_image_runs_in_a_terminal(page: Page):
    give(page, "paste", NOISE)
    expect(waiting(page)).to_have_count(1)
    page.get_by_label("Message", exact=True).fill("What's on it?")
    page.get_by_role("button", name="As curl").click()
    command = page.get_by_role("dialog").locator("code").last.text_content()
    assert command is not None
    assert len(command) > MAX_ARGUMENT_BYTES
    replied = subprocess.run(["bash"], input=command, text=True, capture_output=True, check=True)
    assert "data: [DONE]" in replied.stdout


def test_nothing_that_the_model_lacks_is_offered_or_explained(page: Page):
    expect(page.get_by_role("button", name="Compute")).to_be_visible()
    expect(page.get_by_role("button", name="Call a tool")).to_be_hidden()
    say(page, "Describe yourself.")
    answer = until_done(page)
    answer.get_by_role("button", name="Tokens").click()
    expect(answer.locator(".token-summary")).to_contain_text("perplexity")
    expect(answer.locator(".token-summary")).not_to_contain_text("draft")


def test_images_are_no_serious_barrier(browser: Browser, seeing: Served):
    with opened(browser, seeing.url, width=390, bypass_csp=True) as page:  # axe is the test's own
        expect(page.get_by_role("button", name="Add an image")).to_be_visible()
        give(page, "paste", FISH, SHOT)
        expect(waiting(page)).to_have_count(2)
        assert violations(page) == []
        say(page, "Which is bluer?")
        until_done(page)
        page.get_by_role("button", name="Edit").click()
        assert violations(page) == []
