import { s } from "./dom.js";

const PATHS = {
  image: "M4 5h16v14H4zM4 16l5-5 4 4 3-3 4 4M15 9h.01",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  retry: "M4 12a8 8 0 1 1 2.5 5.8M4 19v-5h5",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  copy: "M9 9h10v10H9zM5 15V5h10",
  tokens: "M4 7h5M11 7h9M4 12h9M15 12h5M4 17h3M9 17h6M17 17h3",
  trace: "M4 6h9M8 12h8M12 18h8",
  settings: "M4 7h9M17 7h3M15 5v4M4 17h3M11 17h9M9 15v4",
  close: "M6 6l12 12M18 6L6 18",
  theme: "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16",
  key: "M14 10a4 4 0 1 0-3 3.9l1.5 1.6H15V18h2.5v2H20v-3.5l-6.2-5.3z",
  plus: "M12 5v14M5 12h14",
  code: "M8 7l-5 5 5 5M16 7l5 5-5 5",
};

export function icon(name) {
  return s("svg", { class: "icon", viewBox: "0 0 24 24", "aria-hidden": "true" }, s("path", { d: PATHS[name] }));
}
