import { icon } from "../icons.js";
import { h } from "../dom.js";

/** Calls `send` where the key is Enter. With Shift it begins a line. */
export function onSendKey(event, send) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
}

/** Where the user writes. */
export class Composer {
  constructor(send, stop) {
    this.area = h("textarea", {
      id: "composer", rows: 1, placeholder: "Write a message", "aria-label": "Message", enterkeyhint: "send",
      onkeydown: (event) => onSendKey(event, () => this.#isBusy || this.element.requestSubmit()),
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

  /** Not where it would bring up a keyboard that covers the answer. */
  focus() {
    if (matchMedia("(pointer: fine)").matches) this.area.focus();
  }

  setBusy(isBusy) {
    this.#isBusy = isBusy;
    this.button.replaceChildren(icon(isBusy ? "stop" : "send"));
    this.button.setAttribute("aria-label", isBusy ? "Stop" : "Send");
    this.#offer();
  }

  #offer() {
    this.button.disabled = !this.#isBusy && this.area.value.trim() === "";
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
