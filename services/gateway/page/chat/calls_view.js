import { h } from "../dom.js";
import { coloured } from "../text/code.js";

/** The calls of an answer; when it is done, their results can be typed in. */
export class CallsView {
  constructor(answer, sendResults) {
    this.answer = answer;
    this.element = h("div", { class: "calls" });
    this.#sendResults = sendResults;
  }

  #sendResults;
  #shown = "";

  update() {
    const { calls, status } = this.answer;
    const shown = JSON.stringify([calls, status === "done"]);
    if (shown === this.#shown) return;
    this.#shown = shown;
    this.element.replaceChildren(...calls.map((call) => this.#call(call, status === "done")));
    if (calls.length && status === "done") {
      this.element.append(h("button", { class: "button primary", type: "button", onclick: () => this.#send() },
        calls.length === 1 ? "Send the result" : "Send the results"));
    }
  }

  /** Results that are on their way can no longer be changed. */
  close() {
    for (const control of this.element.querySelectorAll("textarea, button")) control.disabled = true;
  }

  #call(call, isDone) {
    const id = `result-${call.id}`;
    return h("div", { class: "call" },
      h("div", { class: "call-name" }, h("span", {}, "calls "), h("code", {}, call.name)),
      h("pre", { tabindex: "0", role: "region", "aria-label": `Arguments of ${call.name}` }, h("code", {}, ...coloured(indented(call.arguments), "json"))),
      ...(isDone ? [
        h("label", { for: id }, "Result"),
        h("textarea", { id, rows: 1, class: "mono", placeholder: "what the tool returned", oninput: (event) => (call.result = event.target.value) }, call.result),
      ] : []));
  }

  #send() {
    const empty = [...this.element.querySelectorAll("textarea")].find((area) => area.value.trim() === "");
    if (empty) return empty.focus();
    this.close();
    this.#sendResults();
  }
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
