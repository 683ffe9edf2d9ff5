import { h } from "../dom.js";

/** A folded field of JSON. Calls `note` with its value, or with null while it is empty or wrong. */
export class JsonField {
  constructor({ name, label, explanation, example, isRight, controls = [] }, note) {
    Object.assign(this, { label, problem: null });
    this.#isRight = isRight;
    this.#note = note;
    this.state = h("small", { class: "state" });
    this.message = h("p", { class: "problem", id: `problem-${name}`, role: "alert", hidden: true });
    this.area = h("textarea", {
      id: `field-${name}`, rows: 9, class: "mono", spellcheck: "false", "aria-label": label,
      "aria-describedby": `problem-${name}`, placeholder: explanation, oninput: () => this.#changed(),
    });
    const footer = h("div", { class: "field-end" },
      ...controls,
      h("button", { class: "quiet", type: "button", onclick: () => this.#use(example) }, "Example"),
      h("button", { class: "quiet", type: "button", onclick: () => this.#use(null) }, "Clear"));
    this.element = h("details", { class: "more" }, h("summary", {}, label, this.state), this.area, this.message, footer);
  }

  #isRight;
  #note;

  focus() {
    this.element.open = true;
    this.area.focus();
  }

  set(value) {
    this.#fill(value);
    this.element.open = value !== null;
  }

  #use(value) {
    this.#fill(value);
    this.area.focus();
  }

  #fill(value) {
    this.area.value = value === null ? "" : JSON.stringify(value, null, 2);
    this.#changed();
  }

  #changed() {
    const { value, problem } = this.#read();
    this.problem = problem;
    this.message.hidden = problem === null;
    this.message.textContent = problem ?? "";
    this.area.setAttribute("aria-invalid", problem !== null);
    this.state.classList.toggle("wrong", problem !== null);
    this.state.textContent = problem ? "wrong" : value === null ? "" : "on";
    this.#note(value);
  }

  #read() {
    const text = this.area.value.trim();
    if (text === "") return { value: null, problem: null };
    try {
      const value = JSON.parse(text);
      return this.#isRight(value) ? { value, problem: null } : { value: null, problem: this.area.placeholder };
    } catch (error) {
      return { value: null, problem: error.message };
    }
  }
}
