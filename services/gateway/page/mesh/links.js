import { h, hold, s } from "../dom.js";
import { milliseconds } from "./numbers.js";

const MAX_LABELS = 12;

/** Draws the links between cards that stand in columns. `places` has the element of each service. */
export class Links {
  lines = s("svg", { class: "links", "aria-hidden": "true" });
  labels = h("div", { class: "link-labels" });

  draw(services, places, origin) {
    const links = services.flatMap((from) => from.links.map((link) => ({ from: nameOf(from), to: nameOf(link), link })));
    const drawn = links.filter(({ from, to }) => places.has(from) && places.has(to)).map((each) => {
      const start = places.get(each.from).getBoundingClientRect();
      const end = places.get(each.to).getBoundingClientRect();
      return { ...each, x1: start.right - origin.left, y1: middle(start) - origin.top, x2: end.left - origin.left, y2: middle(end) - origin.top };
    });
    hold(this.lines, ...drawn.map(line));
    hold(this.labels, ...(drawn.length > MAX_LABELS ? [] : drawn.map(label)));
  }
}

export function nameOf({ role, instance }) {
  return `${role} ${instance}`;
}

function middle({ top }) {
  return top + 18;
}

function line({ x1, y1, x2, y2 }) {
  const bend = (x2 - x1) / 2;
  return s("path", { d: `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}` });
}

function label({ x1, y1, x2, y2, link, from, to }) {
  const text = milliseconds(link.round_trip_ms);
  return h("span", { "--x": `${(x1 + x2) / 2}px`, "--y": `${(y1 + y2) / 2}px`, title: `round trip from ${from} to ${to}` }, text);
}
