import { getJson } from "../api.js";
import { h, hold } from "../dom.js";
import { inTreeOrder } from "./tree.js";

/** Where the time of a request went, as the server traced it. */
export class Timeline {
  constructor(requestId) {
    this.element = h("div", { class: "trace", tabindex: "0", role: "region", "aria-label": "Trace" });
    this.#load(requestId);
  }

  async #load(requestId) {
    hold(this.element, h("p", { class: "hint" }, "loading the trace …"));
    try {
      hold(this.element, table(await getJson(`v1/traces/${encodeURIComponent(requestId)}`)));
    } catch (error) {
      hold(this.element, h("p", { class: "hint", role: "alert" }, error.message));
    }
    this.element.scrollIntoView({ block: "nearest" });
  }
}

function table({ spans }) {
  const ordered = inTreeOrder(spans);
  const startS = Math.min(...ordered.map(({ start }) => start));
  const wholeMs = Math.max(...ordered.map((span) => 1000 * (span.start - startS) + span.duration_ms));
  return h("table", {},
    h("caption", { class: "unseen" }, "Spans of the request"),
    h("thead", {}, h("tr", {}, ...["Span", "Service", "Time"].map((each) => h("th", { scope: "col" }, each)), h("th", { class: "axis", "aria-hidden": "true" }, ...axis(wholeMs)))),
    h("tbody", {}, ...ordered.flatMap((span) => rows(span, startS, wholeMs))));
}

/** A span, and below it, while it is open, why it took so long. */
function rows(span, startS, wholeMs) {
  const facts = Object.entries(span.attributes);
  if (facts.length === 0) return [row(span, span.name, startS, wholeMs)];
  const more = h("tr", { class: "details", hidden: true }, h("td", { colspan: 4 },
    h("dl", {}, ...facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value)))))));
  const opener = h("button", { class: "opener", type: "button", "aria-expanded": false, onclick: () => {
    more.hidden = !more.hidden;
    opener.setAttribute("aria-expanded", !more.hidden);
  } }, span.name);
  return [row(span, opener, startS, wholeMs), more];
}

function row(span, name, startS, wholeMs) {
  const offsetMs = 1000 * (span.start - startS);
  return h("tr", { class: "row", "data-role": span.service.role },
    h("th", { scope: "row", "--depth": span.depth }, name),
    h("td", {}, `${span.service.role} ${span.service.instance}`),
    h("td", { class: "number" }, milliseconds(span.duration_ms)),
    h("td", { class: "lane", "aria-hidden": "true" },
      h("span", { class: "span", "--start": `${(100 * offsetMs) / wholeMs}%`, "--width": `${(100 * span.duration_ms) / wholeMs}%` })));
}

function axis(wholeMs) {
  return [0, 0.25, 0.5, 0.75, 1].map((share) => h("span", { "--at": `${100 * share}%` }, milliseconds(share * wholeMs)));
}

function milliseconds(ms) {
  return ms >= 1000 ? `${(ms / 1000).toFixed(2)} s` : `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
}
