import { icon } from "../icons.js";
import { announce, h } from "../dom.js";

const MAX_COLOURED = 50_000;

/** A block of code with its language, colours and a button to copy it. */
export function codeBlock(source, info = "") {
  const language = (info ?? "").trim().split(/\s/)[0].toLowerCase();
  return h("figure", { class: "code" },
    h("figcaption", {},
      h("code", {}, language || "text"),
      copyButton(source)),
    h("pre", { tabindex: "0", role: "region", "aria-label": language ? `Code, ${language}` : "Code" },
      h("code", {}, ...coloured(source, language))));
}

/** Null where the browser lets no page copy: without HTTPS, and not on this machine. */
export function copyButton(source) {
  const copy = async () => {
    await navigator.clipboard.writeText(source);
    announce("Copied");
  };
  return isSecureContext ? h("button", { class: "quiet", type: "button", onclick: copy }, icon("copy"), "Copy") : null;
}

export function coloured(source, language) {
  const grammar = Object.hasOwn(window.Prism.languages, language) ? window.Prism.languages[language] : null;
  if (typeof grammar !== "object" || grammar === null || source.length > MAX_COLOURED) return [source];
  return nodes(window.Prism.tokenize(source, grammar));
}

function nodes(tokens) {
  return [tokens].flat().map((token) =>
    typeof token === "string" ? token : h("span", { class: `code-${token.type}` }, ...nodes(token.content)));
}
