import { h, hold, s } from "../dom.js";
import { count, duration, gigabytes, milliseconds, share } from "./numbers.js";

const WIDTH = 100;
const HEIGHT = 26;

/** One service of the mesh. A card is updated in place, so that what moves is its figures. */
export class ServiceCard {
  constructor({ role, instance }) {
    this.head = h("div", { class: "service-head" });
    this.body = h("div", { class: "service-body" });
    this.element = h("li", { class: "service", "data-role": role, "aria-label": `${role} ${instance}` }, this.head, this.body);
  }

  update(service, rates) {
    const { instance, state, reason, uptime_s: uptimeS, stats } = service;
    this.element.dataset.state = state;
    hold(this.head,
      h("b", {}, instance),
      h("span", { class: "state" }, state),
      h("span", { class: "uptime", title: "uptime" }, state === "lost" ? "" : duration(uptimeS)));
    hold(this.body,
      reason ? h("p", { class: "reason" }, reason) : null,
      ...BODIES[service.role](stats, rates),
      fact("memory", stats.memory_bytes && gigabytes(stats.memory_bytes)));
  }
}

const BODIES = {
  gateway: (stats) => [figure(stats.open_requests, "open requests")],
  tokenizer: (stats) => [figure(stats.open_prompts, "open prompts"), fact("threads", stats.threads)],
  scheduler: (stats) => [
    figure(stats.waiting, "waiting"),
    fact("running", stats.running),
    fact("prefix hits", stats.prefix_queries && share(stats.prefix_hits, stats.prefix_queries)),
    fact("preemptions", stats.preemptions),
  ],
  worker: (stats, rates) => [
    figure(stats.tokens_per_s, "tokens/s", sparkline(rates)),
    meter("slots", stats.slots_used, stats.slots),
    meter("KV blocks", stats.kv_blocks_used, stats.kv_blocks),
    fact("step", stats.step_ms && milliseconds(stats.step_ms)),
    fact("drafts accepted", stats.drafted && share(stats.accepted, stats.drafted)),
  ],
};

function figure(value, label, beside = null) {
  if (value === undefined) return null;
  return h("div", { class: "figure" }, h("strong", {}, count(value)), h("span", {}, label), beside);
}

function fact(label, value) {
  return value === undefined || value === 0 && label !== "running" ? null : h("div", { class: "fact" }, h("span", {}, label), h("span", {}, String(value)));
}

function meter(label, used, whole) {
  if (whole === undefined) return null;
  return h("div", { class: "fact" },
    h("span", {}, label),
    h("span", { class: "tank", "--share": `${(100 * used) / whole}%` }),
    h("span", {}, `${count(used)} / ${count(whole)}`));
}

/** The last values of a rate, newest at the right. */
function sparkline(values) {
  const highest = Math.max(...values, 1);
  const step = WIDTH / (values.length - 1 || 1);
  const points = values.map((value, index) => `${index * step},${HEIGHT - (value / highest) * (HEIGHT - 2) - 1}`);
  return s("svg", { class: "sparkline", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    s("polygon", { points: `0,${HEIGHT} ${points.join(" ")} ${WIDTH},${HEIGHT}` }),
    s("polyline", { points: points.join(" ") }));
}
