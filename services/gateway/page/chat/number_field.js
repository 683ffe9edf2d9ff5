import { h } from "../dom.js";

/** A number that may be left out. Calls `note` with it, or with undefined. */
export class NumberField {
  constructor({ name, label, min, max, step, note: explanation, hasSlider, isRare }, note) {
    Object.assign(this, { name, label, isRare, problem: null });
    this.#note = note;
    this.#range = max === undefined ? `a number from ${min} on` : `a number from ${min} to ${max}`;
    const limits = { min, max, step: step === 1 ? 1 : "any" };
    this.input = h("input", {
      id: `field-${name}`, type: "number", inputmode: "decimal", placeholder: "auto", ...limits,
      "aria-describedby": explanation ? `note-${name}` : null,
      oninput: () => this.#changed(),
    });
    this.message = h("small", { class: "problem", role: "alert", hidden: true });
    this.slider = hasSlider ? h("input", {
      type: "range", ...limits, step, value: max / 2, tabindex: "-1", "aria-hidden": "true", class: "unset",
      oninput: () => this.set(this.slider.value),
    }) : null;
    this.element = h("div", { class: "field row" },
      h("label", { for: this.input.id }, label, explanation ? h("small", { id: `note-${name}` }, explanation) : null, this.message),
      this.slider, this.input);
  }

  #note;
  #range;

  focus() {
    this.element.closest("details")?.setAttribute("open", "");
    this.input.focus();
  }

  set(value) {
    this.input.value = value ?? "";
    this.#changed();
  }

  #changed() {
    const isRight = this.input.checkValidity();
    this.problem = isRight ? null : `expected ${this.#range}`;
    this.message.textContent = this.problem ?? "";
    this.message.hidden = isRight;
    this.input.setAttribute("aria-invalid", !isRight);
    this.#note(isRight && this.input.value !== "" ? this.input.valueAsNumber : undefined);
    this.#showOnSlider();
  }

  #showOnSlider() {
    if (this.slider === null) return;
    this.slider.classList.toggle("unset", this.input.value === "");
    this.slider.value = this.input.value || this.slider.max / 2;
  }
}
