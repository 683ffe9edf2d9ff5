import { h } from "./dom.js";

let asked = null;

/** The API key that the user types, or null. `problem` says what was wrong with the last one.
 * Requests that need one at the same time share the question. */
export function askForKey(problem) {
  asked ??= ask(problem).finally(() => {
    asked = null;
  });
  return asked;
}

function ask(problem) {
  const input = h("input", {
    id: "key", type: "password", required: true, autocomplete: "off", spellcheck: "false",
    "aria-describedby": "key-note",
  });
  const dialog = h("dialog", { class: "dialog", "aria-labelledby": "key-title" },
    h("form", { method: "dialog" },
      h("h2", { id: "key-title" }, "API key"),
      h("p", { id: "key-note" }, "This server answers to those who have a key. It stays in this tab until you close it."),
      problem && h("p", { class: "problem", role: "alert" }, problem),
      h("label", { for: "key" }, "Key"),
      input,
      h("div", { class: "dialog-end" },
        h("button", { type: "button", class: "button", onclick: () => dialog.close("") }, "Cancel"),
        h("button", { class: "button primary", value: "use" }, "Use this key"))));
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "use" ? input.value.trim() : null);
    });
  });
}
