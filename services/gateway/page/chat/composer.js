import { icon } from "../icons.js";
import { h } from "../dom.js";
import { readImage, showRemovable } from "./image.js";

const NO_IMAGES = "The model takes no images";

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
    this.problem = h("div", { class: "problem", role: "alert", hidden: true });
    this.element = h("form", { class: "composer", onsubmit: (event) => this.#submitted(event), onpaste: (event) => this.#pasted(event) },
      this.problem, this.shown, this.adder, this.area, this.button, this.picker);
    this.#send = send;
    this.#stop = stop;
    this.setBusy(false);
  }

  #send;
  #stop;
  #isBusy = false;
  #takesImages = false;
  #images = [];
  #reading = null; // becomes whether all files that were added are read

  get images() {
    return [...this.#images];
  }

  get hasMessage() {
    return this.area.value.trim() !== "" || this.#images.length > 0;
  }

  setTakesImages(takesImages) {
    this.#takesImages = takesImages;
    this.adder.hidden = !takesImages;
    this.#refuse(!takesImages && this.#images.length ? NO_IMAGES : "");
    if (!takesImages) this.#setImages([]);
  }

  /** Adds the files in what was dropped or pasted; otherwise the browser would open a dropped one. */
  take(event, transfer) {
    const files = [...transfer.files];
    if (files.length === 0) return;
    event.preventDefault();
    this.#add(files);
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
    this.button.disabled = !this.#isBusy && !this.hasMessage;
  }

  async #submitted(event) {
    event.preventDefault();
    if (this.#isBusy) return this.#stop();
    while (this.#reading) if (!(await this.#reading)) return;
    if (this.#isBusy || !this.hasMessage || !this.#send(this.area.value.trim(), this.images)) return;
    this.area.value = "";
    this.#refuse("");
    this.#setImages([]);
  }

  /** Cells of a table are copied as a text and as an image: the text is meant. */
  #pasted(event) {
    if (!event.clipboardData.types.includes("text/plain")) this.take(event, event.clipboardData);
  }

  #picked() {
    this.#add([...this.picker.files]);
    this.picker.value = "";
  }

  #add(files) {
    if (!this.#takesImages) return this.#refuse(NO_IMAGES);
    this.#refuse("");
    const reading = this.#read(files, this.#reading).finally(() => {
      if (this.#reading === reading) this.#reading = null;
    });
    this.#reading = reading;
  }

  async #read(files, before) {
    let isRead = (await before) ?? true;
    for (const file of files) {
      try {
        const image = await readImage(file);
        if (this.#takesImages) this.#setImages([...this.#images, image]);
        else isRead = false;
      } catch {
        isRead = false;
        this.#refuse(`The browser cannot read ${file.name || "this image"}`);
      }
    }
    return isRead;
  }

  #refuse(why) {
    this.problem.hidden = why === "";
    this.problem.textContent = why;
  }

  #setImages(images) {
    this.#images = images;
    showRemovable(this.shown, images, (left) => this.#setImages(left));
    this.#offer();
  }
}
