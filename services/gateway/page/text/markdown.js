import { lexer } from "../vendor/marked.js";
import { h } from "../dom.js";
import { codeBlock } from "./code.js";

const PROTOCOLS = new Set(["http:", "https:", "mailto:"]);
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };

/** Shows a growing text of Markdown in `element`: only the blocks that changed are made again. */
export class Markdown {
  #blocks = [];

  constructor(element) {
    this.element = element;
  }

  show(source) {
    const tokens = lexer(source).filter((token) => token.type !== "space" && token.type !== "def");
    const same = this.#blocks.findIndex((raw, index) => raw !== tokens[index]?.raw);
    const start = same === -1 ? this.#blocks.length : same;
    while (this.element.childNodes.length > start) this.element.lastChild.remove();
    this.element.append(...tokens.slice(start).map(block));
    this.#blocks = tokens.map((token) => token.raw);
  }
}

function block(token) {
  switch (token.type) {
    case "heading": return h(`h${Math.min(token.depth + 2, 6)}`, {}, ...inline(token.tokens));
    case "paragraph": return h("p", {}, ...inline(token.tokens));
    case "code": return codeBlock(token.text, token.lang);
    case "blockquote": return h("blockquote", {}, ...token.tokens.map(block));
    case "hr": return h("hr");
    case "list": return list(token);
    case "table": return table(token);
    case "text": return h("span", {}, ...inline(token.tokens ?? [token]));
    case "space": return "";
    default: return h("p", {}, token.raw);
  }
}

function list(token) {
  const attributes = token.ordered && token.start !== 1 ? { start: token.start } : {};
  return h(token.ordered ? "ol" : "ul", attributes, ...token.items.map(listItem));
}

function listItem(item) {
  const box = item.task && h("input", { type: "checkbox", disabled: true, checked: item.checked, "aria-label": "done" });
  return h("li", {}, box || null, ...item.tokens.filter((token) => token.type !== "checkbox").map(block));
}

function table(token) {
  const cell = (tag, cell, index) => h(tag, { class: token.align[index] && `to-${token.align[index]}` }, ...inline(cell.tokens));
  return h("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" },
    h("table", {},
      h("thead", {}, h("tr", {}, ...token.header.map((each, index) => cell("th", each, index)))),
      h("tbody", {}, ...token.rows.map((row) => h("tr", {}, ...row.map((each, index) => cell("td", each, index)))))));
}

function inline(tokens) {
  return tokens.map((token) => {
    switch (token.type) {
      case "strong": return h("strong", {}, ...inline(token.tokens));
      case "em": return h("em", {}, ...inline(token.tokens));
      case "del": return h("del", {}, ...inline(token.tokens));
      case "codespan": return h("code", {}, token.text);
      case "br": return h("br");
      case "link": return link(token.href, inline(token.tokens));
      case "image": return link(token.href, [token.text || "image"]);
      case "text": return token.tokens ? h("span", {}, ...inline(token.tokens)) : withEntities(token.text);
      case "escape": return token.text;
      default: return token.raw;
    }
  });
}

/** A link, or its text alone where it leads to no page elsewhere and no address. Images are links too:
 * nothing is loaded because a model wrote it. */
function link(href, children) {
  const url = URL.canParse(href) ? new URL(href) : null;
  if (url === null || !PROTOCOLS.has(url.protocol)) return h("span", { title: href }, ...children);
  return h("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}

function withEntities(text) {
  return text.replace(/&(?:#(\d{1,7})|#x([0-9a-f]{1,6})|(\w{2,6}));/gi, (all, decimal, hex, name) => {
    if (name) return ENTITIES[name] ?? all;
    const point = decimal ? Number(decimal) : parseInt(hex, 16);
    return point > 0 && point <= 0x10ffff ? String.fromCodePoint(point) : all;
  });
}
