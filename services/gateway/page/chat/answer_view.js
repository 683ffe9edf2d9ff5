import { icon } from "../icons.js";
import { h, hold } from "../dom.js";
import { coloured, copyButton } from "../text/code.js";
import { Markdown } from "../text/markdown.js";
import { TokenView } from "../tokens/token_view.js";
import { Timeline } from "../trace/timeline.js";
import { isOpen } from "./answer.js";
import { CallsView } from "./calls_view.js";
import { costs } from "./costs.js";

/** What the model said, as it comes, as a text or as tokens, and when it is done the trace of the
 * request. `actions`: retry, sendResults, hasTraces, and noteTokens, which gets whether tokens are
 * shown. */
export class AnswerView {
  constructor(answer, actions) {
    this.turn = answer;
    this.dropped = h("p", { class: "dropped-turns", hidden: true });
    this.text = h("div", { class: "prose" });
    this.reasoning = h("div", { class: "prose" });
    this.folded = h("details", { class: "reasoning", hidden: true }, h("summary", {}, "Reasoning"), this.reasoning);
    this.calls = new CallsView(answer, actions.sendResults);
    this.problem = h("div", { class: "problem", role: "alert", hidden: true });
    this.footer = h("div", { class: "turn-end" });
    this.below = h("div");
    this.element = h("article", { class: "turn answer", "aria-label": answer.model },
      this.dropped, this.folded, this.text, this.calls.element, this.problem, this.footer, this.below);
    this.#markdown = new Markdown(this.text);
    this.#reasoned = new Markdown(this.reasoning);
    this.#actions = actions;
    this.update();
  }

  #markdown;
  #reasoned;
  #actions;
  #tokens = null;

  /** Shows tokens in place of texts, or texts again. */
  showTokens(isOn) {
    this.#tokens = isOn ? new TokenView(this.turn) : null;
    this.element.classList.toggle("as-tokens", isOn);
    this.element.querySelector(".token-view")?.remove();
    if (isOn) this.text.before(this.#tokens.element);
    this.update();
  }

  update() {
    const answer = this.turn;
    this.element.dataset.status = answer.status;
    this.element.setAttribute("aria-busy", isOpen(answer));
    this.#noteDropped(answer.numDroppedTurns);
    this.folded.hidden = answer.reasoning === "";
    this.#reasoned.show(answer.reasoning);
    this.#showText(answer);
    this.calls.update();
    this.#tokens?.update();
    if (!isOpen(answer) && !this.footer.hasChildNodes()) this.#end();
  }

  /** What was to be JSON is no Markdown: that would take the backslashes out of its strings. */
  #showText({ isJson, content }) {
    if (!isJson) this.#markdown.show(content);
    else if (content) hold(this.text, h("pre", {}, h("code", {}, ...coloured(content, "json"))));
  }

  #end() {
    const { error, status, content, tokens, requestId } = this.turn;
    this.problem.hidden = error === null;
    this.problem.textContent = error ?? "";
    hold(this.footer,
      h("button", { class: "quiet retry", type: "button", onclick: this.#actions.retry }, icon("retry"), "Retry"),
      content ? copyButton(content) : null,
      tokens.length ? toggle("tokens", "Tokens", this.#tokens !== null, (isOn) => this.#noteTokens(isOn)) : null,
      requestId && this.#actions.hasTraces() ? toggle("trace", "Trace", false, (isOn) => this.#showTrace(isOn)) : null,
      status === "stopped" ? h("span", { class: "tag" }, "stopped") : null,
      ...costs(this.turn));
  }

  #noteDropped(num) {
    this.dropped.hidden = num === 0;
    this.dropped.textContent = `${num} earlier ${num === 1 ? "turn was" : "turns were"} left out of the prompt`;
  }

  #noteTokens(isOn) {
    this.showTokens(isOn);
    this.#actions.noteTokens(isOn);
  }

  #showTrace(isOn) {
    hold(this.below, isOn ? new Timeline(this.turn.requestId).element : null);
  }
}

function toggle(name, label, isOn, change) {
  const button = h("button", { class: "quiet", type: "button", "aria-pressed": isOn, onclick: () => {
    const isNowOn = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", isNowOn);
    change(isNowOn);
  } }, icon(name), label);
  return button;
}
