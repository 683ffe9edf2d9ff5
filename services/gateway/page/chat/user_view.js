import { icon } from "../icons.js";
import { h } from "../dom.js";
import { onSendKey } from "./composer.js";
import { showRemovable } from "./image.js";

/** What the user said, which can be said otherwise: `edit` gets the new text and the images left. */
export class UserView {
  constructor(turn, edit) {
    this.turn = turn;
    this.#edit = edit;
    this.element = h("article", { class: "turn user", "aria-label": "You" });
    this.#show();
  }

  #edit;

  update() {}

  #images() {
    const { images = [] } = this.turn;
    return images.length ? [h("div", { class: "images" }, ...images.map(({ canvas }) => canvas))] : [];
  }

  #show() {
    this.element.replaceChildren(
      h("div", { class: "said" }, ...this.#images(), this.turn.content),
      h("button", { class: "quiet", type: "button", onclick: () => this.#open() }, icon("edit"), "Edit"));
  }

  #open() {
    const area = h("textarea", { rows: 1, "aria-label": "Your message" });
    area.value = this.turn.content;
    let images = [];
    const shown = h("div", { class: "images" });
    const keep = (left) => {
      images = left;
      showRemovable(shown, images, keep);
    };
    keep(this.turn.images ?? []);
    const send = () => (area.value.trim() || images.length) && this.#edit(area.value.trim(), images);
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.#close();
      onSendKey(event, send);
    });
    this.element.replaceChildren(
      h("div", { class: "said" }, shown, area),
      h("div", { class: "turn-end" },
        h("button", { class: "button primary", type: "button", onclick: send }, "Send instead"),
        h("button", { class: "button", type: "button", onclick: () => this.#close() }, "Cancel")));
    area.focus();
  }

  #close() {
    this.#show();
    this.element.querySelector("button").focus();
  }
}
