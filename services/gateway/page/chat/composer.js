import { icon } from "../icons.js";
import { h } from "../dom.js";

/** Where the user writes. Enter sends, Shift+Enter begins a line. */
export class Composer {
  constructor(send, stop) {
    this.area = h("textarea", {
      id: "composer", rows: 1, placeholder: "Write a message", "aria-label": "Message", enterkeyhint: "send",
      onkeydown: (event) => this.#pressed(event),
      oninput: () => this.#offer(),
    });
    this.button = h("button", { class: "button primary round", type: "submit", disabled: true });
    this.element = h("form", { class: "composer", onsubmit: (event) => this.#submitted(event) }, this.area, this.button);
    this.#send = send;
    this.#stop = stop;
    this.setBusy(false);
  }

  #send;
  #stop;
  #isBusy = false;

  setBusy(isBusy) {
    this.#isBusy = isBusy;
    this.button.replaceChildren(icon(isBusy ? "stop" : "send"));
    this.button.setAttribute("aria-label", isBusy ? "Stop" : "Send");
    this.#offer();
  }

  #offer() {
    this.button.disabled = !this.#isBusy && this.area.value.trim() === "";
  }

  #pressed(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || this.#isBusy) return;
    event.preventDefault();
    this.element.requestSubmit();
  }

  #submitted(event) {
    event.preventDefault();
    if (this.#isBusy) return this.#stop();
    const text = this.area.value.trim();
    if (text === "" || !this.#send(text)) return;
    this.area.value = "";
    this.#offer();
  }
}
