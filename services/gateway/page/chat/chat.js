import { ApiError, streamChat } from "../api.js";
import { announce, h, oncePerFrame } from "../dom.js";
import { icon } from "../icons.js";
import { absorb, end, newAnswer } from "./answer.js";
import { AnswerView } from "./answer_view.js";
import { Composer } from "./composer.js";
import { EXAMPLES } from "./fields.js";
import { Panel } from "./panel.js";
import { showRequest } from "./request_dialog.js";
import { requestOf } from "./request.js";
import { UserView } from "./user_view.js";

const NEAR_END_PX = 80;
const NARROW = matchMedia("(max-width: 900px)"); // where the panel covers the conversation

/** A conversation with a model, and the panel that says how it is asked. */
export class Chat {
  constructor(modelOf, hasTraces) {
    this.#modelOf = modelOf;
    this.#hasTraces = hasTraces;
    this.panel = new Panel(() => this.togglePanel(false));
    this.panel.element.addEventListener("keydown", ({ key }) => key === "Escape" && NARROW.matches && this.togglePanel(false));
    this.composer = new Composer((text, images) => this.#say(text, images), () => this.stop());
    this.log = h("div", { class: "log" });
    this.scroller = h("div", { class: "scroller" }, this.log);
    this.element = h("section", { class: "chat", "aria-label": "Conversation" },
      h("div", { class: "talk" },
        this.scroller, h("div", { class: "dock" }, this.#tools(), this.composer.element)),
      this.panel.element);
    this.element.classList.toggle("no-panel", NARROW.matches);
    this.#showExamples();
    // Everywhere: the browser would open a file, and the conversation would be lost.
    addEventListener("dragover", (event) => event.dataTransfer.types.includes("Files") && event.preventDefault());
    addEventListener("drop", (event) => this.composer.take(event, event.dataTransfer));
  }

  #modelOf;
  #hasTraces;
  #showsTokens = false;
  #isExample = false;
  #views = [];
  #aborting = null;

  get #turns() {
    return this.#views.map((view) => view.turn);
  }

  /** Offers the fields, images and examples that the model takes. */
  adapt({ shoal: traits, input_modalities: modalities = [] }) {
    this.panel.adapt(traits);
    this.composer.setTakesImages(modalities.includes("image"));
    this.element.classList.toggle("no-tools", !traits.tool_parser);
  }

  /** What is generated ends; what has come stays. */
  stop() {
    this.#aborting?.abort();
  }

  togglePanel(isOpen = this.element.classList.contains("no-panel")) {
    this.element.classList.toggle("no-panel", !isOpen);
    this.settings.setAttribute("aria-expanded", isOpen);
    if (isOpen) this.panel.element.querySelector("textarea").focus();
    else this.settings.focus();
  }

  #tools() {
    this.settings = h("button", { class: "quiet", type: "button", "aria-controls": "panel", "aria-expanded": !NARROW.matches, onclick: () => this.togglePanel() }, icon("settings"), "Request");
    return h("div", { class: "tools" },
      h("button", { class: "quiet", type: "button", onclick: () => this.#startAnew() }, icon("plus"), "New chat"),
      h("span", { class: "gap" }),
      h("button", { class: "quiet", type: "button", onclick: () => showRequest(this.#shownRequest()) }, icon("code"), "As curl"),
      this.settings);
  }

  #showExamples() {
    this.log.replaceChildren(h("div", { class: "welcome" },
      h("h1", {}, "Write to the model"),
      h("p", {}, "Each answer says what it cost, and shows how likely each of its tokens was. Begin with one of these, or with words of your own."),
      h("ul", { class: "examples" }, ...EXAMPLES.map(({ title, text, values }) =>
        h("li", { class: values.tools && "needs-tools" }, h("button", { type: "button", onclick: () => this.#try(text, values) }, h("b", {}, title), h("span", {}, text)))))));
  }

  #try(text, values) {
    this.panel.set(values);
    this.#isExample = true;
    this.#say(text);
  }

  #startAnew() {
    this.stop();
    this.#views = [];
    if (this.#isExample) this.panel.set({});
    this.#isExample = false;
    this.#showExamples();
    this.composer.focus();
  }

  #request(turns = this.#turns) {
    return requestOf(this.#modelOf()?.id, this.panel.values, turns);
  }

  /** What would be sent now; while nothing is written, what brought the last answer. */
  #shownRequest() {
    const turns = this.#turns;
    const { area, hasMessage, images } = this.composer;
    if (hasMessage) turns.push({ role: "user", content: area.value.trim(), images });
    else if (turns.at(-1)?.role === "assistant") turns.pop();
    return this.#request(turns);
  }

  /** Whether the panel is wrong, which it says and shows. */
  #isRefused() {
    if (this.panel.problem === null) return false;
    this.togglePanel(true);
    this.panel.focusProblem();
    announce(this.panel.problem);
    return true;
  }

  /** False where the panel is wrong. */
  #say(text, images = []) {
    if (this.#isRefused()) return false;
    if (this.#views.length === 0) this.log.replaceChildren();
    const view = new UserView({ role: "user", content: text, images }, (...changed) => this.#edit(view, ...changed));
    this.#add(view);
    this.#answer();
    return true;
  }

  #edit(view, text, images) {
    if (this.#isRefused()) return;
    this.#cutFrom(this.#views.indexOf(view));
    this.#say(text, images);
  }

  #retry(view) {
    if (this.#isRefused()) return;
    this.#cutFrom(this.#views.indexOf(view));
    this.#answer();
  }

  /** False where the panel is wrong. */
  #sendResults(view) {
    if (this.#isRefused()) return false;
    this.#cutFrom(this.#views.indexOf(view) + 1);
    this.#answer();
    return true;
  }

  #cutFrom(index) {
    this.stop();
    for (const view of this.#views.splice(index)) view.element.remove();
  }

  #add(view) {
    this.#views.push(view);
    this.log.append(view.element);
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  async #answer() {
    const body = this.#request();
    const answer = newAnswer(body);
    const view = new AnswerView(answer, {
      retry: () => this.#retry(view),
      sendResults: () => this.#sendResults(view),
      hasTraces: this.#hasTraces,
      noteTokens: (isOn) => (this.#showsTokens = isOn),
    });
    if (this.#showsTokens) view.showTokens(true);
    const update = oncePerFrame(() => this.#follow(() => view.update()));
    const aborting = (this.#aborting = new AbortController());
    this.#add(view);
    this.composer.setBusy(true);
    this.composer.focus();
    announce("The model answers");
    try {
      const note = (requestId, numDroppedTurns) => Object.assign(answer, { requestId, numDroppedTurns });
      for await (const chunk of streamChat(body, aborting.signal, note)) {
        absorb(answer, chunk);
        update();
      }
      end(answer, "done");
    } catch (error) {
      if (aborting.signal.aborted) end(answer, "stopped");
      else end(answer, "failed", problemOf(error, answer));
    }
    this.#follow(() => view.update());
    if (this.#aborting !== aborting) return;
    this.composer.setBusy(false);
    announce(answer.error ?? (answer.status === "stopped" ? "Stopped" : answer.content || "The model calls tools"));
  }

  /** Draws, and stays at the end if that is what the user looks at. */
  #follow(draw) {
    const { scroller } = this;
    const isAtEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_END_PX;
    draw();
    if (isAtEnd) scroller.scrollTop = scroller.scrollHeight;
  }
}

function problemOf(error, { requestId }) {
  if (!(error instanceof ApiError)) return `${requestId ? "The connection broke" : "The server cannot be reached"}: ${error.message}`;
  const later = error.retryAfterS === null ? "" : ` Try again in ${error.retryAfterS} s.`;
  return error.message + later;
}
