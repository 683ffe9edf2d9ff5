"""A model may write anything; nothing of it is run, loaded or followed."""

from chatting import say, set_fields, until_done
from playwright.sync_api import Page, expect

HOSTILE = """# Title <img src=x onerror="window.hit=1">

<script>window.hit = 2</script>

<svg/onload=window.hit=3><iframe srcdoc="<script>parent.hit=4</script>"></iframe>

[a](javascript:window.hit=5)
[b](JaVaScRiPt&colon;window.hit=6) [c](data:text/html,<script>x</script>)
[d](https://example.com/"onmouseover="window.hit=7) ![e](https://example.com/pixel.png)
<a href="javascript:window.hit=8">f</a> `<b>bold</b>` &lt;b&gt; **strong**

```html
<script>window.hit = 9</script>
```

```__proto__
x
```

| a | b |
|---|--:|
| <img src=x onerror=window.hit=10> | 2 |

- [ ] <input autofocus onfocus=window.hit=11>
"""


def test_hostile_markdown_is_text(page: Page):
    loaded: list[str] = []
    page.on("request", lambda request: loaded.append(request.url))
    set_fields(page, {"structured_outputs": {"choice": [HOSTILE]}, "max_tokens": 1000})
    say(page, "Hi")
    answer = until_done(page)
    prose = answer.locator(".prose").last
    expect(prose.locator("strong")).to_have_text("strong")
    expect(prose.locator("h3")).to_contain_text("<img src=x")
    expect(prose.locator("td").first).to_contain_text("onerror=window.hit=10")
    expect(prose.locator("code", has_text="<b>bold</b>")).to_have_count(1)
    expect(prose).to_contain_text("<script>window.hit = 2</script>")
    assert prose.locator("img, script, iframe, svg:not(.icon), object, embed, style").count() == 0
    links = prose.locator("a").evaluate_all("all => all.map(each => each.protocol)")
    assert set(links) == {"https:"}
    for link in prose.locator("a").all():
        link.hover()
    assert page.evaluate("window.hit") is None
    assert not [url for url in loaded if "example.com" in url]
    handlers = (
        "all => all.some(each => [...each.attributes].some(({name}) => name.startsWith('on')))"
    )
    assert not prose.locator("*").evaluate_all(handlers)
