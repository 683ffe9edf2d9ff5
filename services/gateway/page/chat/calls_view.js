import { h } from "../dom.js";
import { coloured } from "../text/code.js";

/** The calls of an answer; when it is done, their results can be typed in, and sent once.
 * `sendResults` says whether they were. */
export class CallsView {
  constructor(answer, sendResults) {
    this.answer = answer;
    this.element = h("div", { class: "calls" });
    this.#sendResults = sendResults;
  }

  #sendResults;
  #shown = "";
  #isSent = false;

  update() {
    const { calls, status } = this.answer;
    const shown = JSON.stringify([calls, status === "done", this.#isSent]);
    if (shown === this.#shown) return;
    this.#shown = shown;
    this.element.replaceChildren(...calls.map((call) => this.#call(call, status === "done")));
    if (calls.length && status === "done" && !this.#isSent) {
      this.element.append(h("button", { class: "button primary", type: "button", onclick: () => this.#send() },
        calls.length === 1 ? "Send the result" : "Send the results"));
    }
  }

  #call(call, isDone) {
    const id = `result-${call.id}`;
    return h("div", { class: "call" },
      h("div", { class: "call-name" }, h("span", {}, "calls "), h("code", {}, call.name)),
      h("pre", { tabindex: "0", role: "region", "aria-label": `Arguments of ${call.name}` }, h("code", {}, ...coloured(indented(call.arguments), "json"))),
      ...(isDone ? [
        h("label", { for: id }, "Result"),
        h("textarea", { id, rows: 1, class: "mono", readonly: this.#isSent, placeholder: "what the tool returned", oninput: (event) => (call.result = event.target.value) }, call.result),
      ] : []));
  }

  #send() {
    const empty = [...this.element.querySelectorAll("textarea")].find((area) => area.value.trim() === "");
    if (empty) return empty.focus();
    this.#isSent = this.#sendResults();
    this.update();
  }
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
