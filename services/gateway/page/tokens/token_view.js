import { h, hold } from "../dom.js";
import { card } from "./token_card.js";
import { LEVELS, levelOf, percent, shown } from "./probability.js";

/** The tokens of an answer as the model wrote them, each the deeper in colour the less likely it
 * was. Arrow keys go from one to the next; the card of the one in focus has its alternatives. */
export class TokenView {
  constructor(answer) {
    this.answer = answer;
    this.list = h("div", {
      class: "tokens", role: "listbox", "aria-label": "Tokens of the answer", "aria-orientation": "horizontal",
      onkeydown: (event) => this.#pressed(event),
      onfocusin: (event) => this.#show(event.target),
      onfocusout: () => card.hide(),
      onpointerover: (event) => this.#show(event.target),
      onpointerleave: () => card.hide(),
    });
    this.summary = h("div", { class: "token-summary" });
    this.element = h("div", { class: "token-view" }, this.list, this.summary);
  }

  update() {
    const { tokens } = this.answer;
    const known = this.list.childElementCount;
    this.list.append(...tokens.slice(known).map((token, index) => tokenSpan(token, known + index)));
    if (tokens.length) hold(this.summary, legend(tokens), summaryOf(this.answer));
  }

  #show(element) {
    const token = this.answer.tokens[element.dataset?.index];
    if (token) card.show(token, element);
  }

  #pressed(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") card.hide();
    if (step === undefined) return;
    event.preventDefault();
    const all = this.list.children;
    const from = Number(event.target.dataset.index);
    const to = all[Math.min(Math.max(from + step, 0), all.length - 1)];
    event.target.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  }
}

function tokenSpan(token, index) {
  const draft = token.draft?.accepted ? ", an accepted draft" : "";
  return h("span", {
    class: "token", role: "option", tabindex: index === 0 ? "0" : "-1",
    "data-index": index, "data-level": levelOf(token.logprob),
    "data-draft": token.draft && (token.draft.accepted ? "accepted" : "rejected"),
    "aria-selected": "false",
    "aria-label": `${shown(token.text)}, ${percent(token.logprob)}${draft}`, "aria-describedby": "token-card",
  }, shown(token.text) + (token.text.endsWith("\n") ? "\n" : ""));
}

function legend(tokens) {
  const levels = LEVELS.map(({ label }, level) => h("span", { class: "token", "data-level": level }, label));
  const drafts = ["accepted", "rejected"].map((fate) => h("span", { class: "token", "data-draft": fate }, `draft ${fate}`));
  return h("span", { class: "legend" }, ...levels, ...(hasDrafts(tokens) ? drafts : []));
}

function hasDrafts(tokens) {
  return tokens.some(({ draft }) => draft);
}

function summaryOf({ tokens, usage }) {
  const mean = tokens.reduce((sum, { logprob }) => sum + logprob, 0) / tokens.length;
  const drafted = tokens.filter(({ draft }) => draft?.accepted).length;
  return h("span", { class: "facts" },
    h("span", { title: "the exponential of the mean negative logprob" }, `perplexity ${Math.exp(-mean).toFixed(2)}`),
    hasDrafts(tokens) ? h("span", {}, `${drafted} of ${tokens.length} drafted`) : null,
    usage ? promptBar(usage) : null);
}

function promptBar({ prompt_tokens: prompt, prompt_tokens_details: details }) {
  const cached = details?.cached_tokens ?? 0;
  const label = `prompt: ${cached} of ${prompt} tokens were cached`;
  return h("span", { class: "prompt-bar", title: label },
    h("span", { class: "share", "--share": `${(100 * cached) / Math.max(prompt, 1)}%`, role: "img", "aria-label": label }),
    `prompt ${cached} / ${prompt} cached`);
}
