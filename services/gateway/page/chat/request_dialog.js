import { h } from "../dom.js";
import { codeBlock } from "../text/code.js";
import { curlOf } from "./request.js";

/** Shows a request for a terminal. */
export function showRequest(body) {
  const dialog = h("dialog", { class: "dialog wide", closedby: "any", "aria-labelledby": "curl-title", onclose: () => dialog.remove() },
    h("form", { method: "dialog" },
      h("h2", { id: "curl-title" }, "This request, with curl"),
      codeBlock(curlOf(body), "bash"),
      h("div", { class: "dialog-end" }, h("button", { class: "button" }, "Close"))));
  document.body.append(dialog);
  dialog.showModal();
}
