import { streamChat } from "../api.js";
import { h, hold, oncePerFrame } from "../dom.js";

const MAX_STREAMS = 64;
const MAX_TOKENS = 1500;
const TAIL_CHARS = 240;

/** Long answers side by side, to see the mesh at work and what becomes of them when a part of it is
 * lost. */
export class Streams {
  constructor(modelOf) {
    this.#modelOf = modelOf;
    this.number = h("input", { id: "num-streams", type: "number", min: 1, max: MAX_STREAMS, value: 8, required: true });
    this.list = h("ol", { class: "streams", "aria-label": "Streams of this page" });
    this.button = h("button", { class: "button primary", type: "submit" }, "Start");
    this.element = h("section", { class: "load", "aria-label": "Streams" },
      h("form", { onsubmit: (event) => this.#submitted(event) },
        h("h2", {}, "Streams of this page"),
        h("label", { for: "num-streams" }, "How many"), this.number, this.button),
      h("p", { class: "hint" }, "Long answers to watch the mesh with. Kill a service while they run: they pause, and go on."),
      this.list);
  }

  #modelOf;
  #aborting = null;

  #submitted(event) {
    event.preventDefault();
    if (this.#aborting !== null) return this.#aborting.abort();
    this.#run();
  }

  async #run() {
    const aborting = (this.#aborting = new AbortController());
    const rows = Array.from({ length: this.number.valueAsNumber }, () => new StreamRow());
    this.button.textContent = "Stop";
    hold(this.list, ...rows.map((row) => row.element));
    try {
      for await (const { choices } of streamChat(this.#request(rows.length), aborting.signal, () => {})) {
        for (const choice of choices) rows[choice.index].take(choice);
      }
    } catch (error) {
      for (const row of rows) row.cut(aborting.signal.aborted ? "stopped" : error.message);
    }
    this.button.textContent = "Start";
    this.#aborting = null;
  }

  /** All streams are choices of one request: a browser has few connections to a server. */
  #request(number) {
    const content = "How do the services of Shoal work together?";
    return {
      model: this.#modelOf()?.id, messages: [{ role: "user", content }], n: number, stream: true,
      max_tokens: MAX_TOKENS, ignore_eos: true, return_token_ids: true,
    };
  }
}

class StreamRow {
  tail = h("span");
  facts = h("span", { class: "number" });
  element = h("li", { class: "stream", "data-status": "open" }, h("span", { class: "tail" }, this.tail), this.facts);
  #text = "";
  #numTokens = 0;
  #lastMs = null;
  #longestMs = 0;
  #draw = oncePerFrame(() => this.#show());

  take({ delta, token_ids: ids = [], finish_reason: finish }) {
    const now = performance.now();
    if (this.#lastMs !== null) this.#longestMs = Math.max(this.#longestMs, now - this.#lastMs);
    this.#numTokens += ids.length;
    if (ids.length) this.#lastMs = now;
    this.#text = (this.#text + (delta.content ?? "")).slice(-TAIL_CHARS);
    if (finish) this.element.dataset.status = "done";
    this.#draw();
  }

  cut(reason) {
    if (this.element.dataset.status === "done") return;
    this.element.dataset.status = "cut";
    this.#text += ` — ${reason}`;
    this.#draw();
  }

  #show() {
    this.tail.textContent = this.#text.replaceAll(/\s+/g, " ");
    this.facts.textContent = `${this.#numTokens} tokens · longest pause ${(this.#longestMs / 1000).toFixed(1)} s`;
  }
}
