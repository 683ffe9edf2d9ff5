import { icon } from "../icons.js";
import { announce, h, hold } from "../dom.js";
import { imagesIn, readImage } from "./image.js";

/** Calls `send` where the key is Enter. With Shift it begins a line. */
export function onSendKey(event, send) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
}

/** Where the user writes, and adds images for a model that takes them. */
export class Composer {
  constructor(send, stop) {
    this.area = h("textarea", {
      id: "composer", rows: 1, placeholder: "Write a message", "aria-label": "Message", enterkeyhint: "send",
      onkeydown: (event) => onSendKey(event, () => this.#isBusy || this.element.requestSubmit()),
      oninput: () => this.#offer(),
    });
    this.button = h("button", { class: "button primary round", type: "submit", disabled: true });
    this.picker = h("input", { type: "file", accept: "image/*", multiple: true, hidden: true, onchange: () => this.#picked() });
    this.adder = h("button", { class: "button round", type: "button", hidden: true, "aria-label": "Add an image", onclick: () => this.picker.click() }, icon("image"));
    this.shown = h("div", { class: "images" });
    this.element = h("form", {
      class: "composer", onsubmit: (event) => this.#submitted(event), onpaste: (event) => this.#take(event, event.clipboardData),
      ondragover: (event) => this.#takesImages && event.preventDefault(), ondrop: (event) => this.#take(event, event.dataTransfer),
    }, this.shown, this.adder, this.area, this.button, this.picker);
    this.#send = send;
    this.#stop = stop;
    this.setBusy(false);
  }

  #send;
  #stop;
  #isBusy = false;
  #takesImages = false;
  #images = [];

  get images() {
    return [...this.#images];
  }

  setTakesImages(takesImages) {
    this.#takesImages = takesImages;
    this.adder.hidden = !takesImages;
    if (!takesImages) this.#setImages([]);
  }

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
    if (text === "" || !this.#send(text, this.images)) return;
    this.area.value = "";
    this.#setImages([]);
    this.#offer();
  }

  #take(event, transfer) {
    const files = this.#takesImages ? imagesIn(transfer) : [];
    if (files.length === 0) return;
    event.preventDefault();
    this.#add(files);
  }

  #picked() {
    this.#add([...this.picker.files]);
    this.picker.value = "";
  }

  async #add(files) {
    for (const file of files) {
      try {
        const image = await readImage(file);
        if (this.#takesImages) this.#setImages([...this.#images, image]);
      } catch {
        announce("The browser cannot read this image");
      }
    }
  }

  #setImages(images) {
    this.#images = images;
    hold(this.shown, ...images.map((image) => {
      const remove = () => this.#setImages(this.#images.filter((each) => each !== image));
      return h("button", { class: "quiet", type: "button", "aria-label": "Remove this image", onclick: remove }, image.canvas);
    }));
  }
}
