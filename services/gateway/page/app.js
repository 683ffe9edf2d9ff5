import { getJson } from "./api.js";
import { Chat } from "./chat/chat.js";
import { h, hold } from "./dom.js";
import { icon } from "./icons.js";
import { Mesh } from "./mesh/mesh.js";

const THEMES = ["auto", "light", "dark"];
const RETRY_MS = 2000;

let model = null;
let hasTraces = false;
let hasMesh = false;

const chat = new Chat(() => model, () => hasTraces);
const mesh = new Mesh(() => model);
document.getElementById("main").append(chat.element, mesh.element);
document.getElementById("bar-end").append(themeButton());
window.addEventListener("hashchange", showView);
showModel();
chat.composer.focus();

/** The view that the address names: the chat, or the mesh where the server shows it. */
function showView() {
  const isMesh = hasMesh && location.hash === "#mesh";
  chat.element.hidden = isMesh;
  mesh.setVisible(isMesh);
  hold(document.getElementById("views"), ...(hasMesh ? [link("chat", "Chat", !isMesh), link("mesh", "Mesh", isMesh)] : []));
}

function link(name, text, isCurrent) {
  return h("a", { href: `#${name}`, "aria-current": isCurrent ? "page" : null }, text);
}

/** Servers may be without these. */
async function findFeatures() {
  const answers = (path) => getJson(path).then(() => true, () => false);
  [hasMesh, hasTraces] = await Promise.all([answers("v1/mesh"), answers("v1/traces?limit=1")]);
  showView();
}

/** Asks which models there are, until there is one or the user has no key. */
async function showModel() {
  for (;;) {
    try {
      offer((await getJson("v1/models")).data);
      return findFeatures();
    } catch (error) {
      if (error.status === 401) return shown(h("button", { class: "button", type: "button", onclick: showModel }, icon("key"), "Enter the API key"));
      shown(h("span", { class: "tag" }, "waiting for a model"));
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }
}

function offer(models) {
  const choose = () => {
    model = models[names.selectedIndex];
    chat.adapt(model);
  };
  const names = h("select", { "aria-label": "Model", disabled: models.length < 2, onchange: choose }, ...models.map(({ id }) => h("option", {}, id)));
  shown(names);
  choose();
}

function shown(element) {
  hold(document.getElementById("model"), element);
}

function themeButton() {
  const root = document.documentElement;
  const button = h("button", { class: "quiet", type: "button", onclick: () => {
    root.dataset.theme = THEMES[(THEMES.indexOf(root.dataset.theme) + 1) % THEMES.length];
    localStorage.setItem("shoal-theme", root.dataset.theme);
    name();
  } }, icon("theme"));
  const name = () => {
    button.title = `Theme: ${root.dataset.theme}`;
    button.setAttribute("aria-label", button.title);
  };
  name();
  return button;
}
