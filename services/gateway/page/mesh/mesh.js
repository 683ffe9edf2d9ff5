import { getJson } from "../api.js";
import { announce, h, hold } from "../dom.js";
import { History } from "./history.js";
import { Links, nameOf } from "./links.js";
import { count, share } from "./numbers.js";
import { ServiceCard } from "./service_card.js";
import { Streams } from "./streams.js";

const ROLES = ["gateway", "tokenizer", "scheduler", "worker"];
const PERIOD_MS = 1000;

/** All services of the mesh, asked for once a second while somebody looks. */
export class Mesh {
  constructor(modelOf) {
    this.summary = h("dl", { class: "totals" });
    this.problem = h("p", { class: "problem", role: "alert", hidden: true });
    this.columns = new Map(ROLES.map((role) => [role, h("ul", { "aria-label": `${role}s` })]));
    this.chart = h("div", { class: "chart" },
      this.#links.lines,
      ...ROLES.map((role) => h("section", { class: "column", "data-role": role, "aria-label": role }, h("h2", {}, role), this.columns.get(role))),
      this.#links.labels,
      new Streams(modelOf).element);
    this.element = h("section", { class: "mesh", "aria-label": "Mesh", hidden: true },
      this.summary, this.problem, this.chart);
    new ResizeObserver(() => this.#drawLinks()).observe(this.chart);
  }

  #links = new Links();
  #cards = new Map();
  #history = new History();
  #services = [];
  #states = new Map();
  #isWatching = false;

  setVisible(isVisible) {
    this.element.hidden = !isVisible;
    if (isVisible && !this.#isWatching) this.#watch();
  }

  async #watch() {
    this.#isWatching = true;
    while (!this.element.hidden) {
      if (!document.hidden) await this.#look();
      await new Promise((resolve) => setTimeout(resolve, PERIOD_MS));
    }
    this.#isWatching = false;
  }

  async #look() {
    try {
      this.#show((await getJson("v1/mesh")).services);
      this.#noteProblem(null);
    } catch (error) {
      this.#noteProblem(`The mesh cannot be seen: ${error.message}`);
    }
  }

  /** What was seen last stays, and is shown as old. */
  #noteProblem(problem) {
    this.problem.hidden = problem === null;
    if (this.problem.textContent !== problem) this.problem.textContent = problem;
    this.element.classList.toggle("old", problem !== null);
  }

  #show(services) {
    this.#services = services;
    this.#sayChanges(services);
    hold(this.summary, ...totals(services).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
    const names = new Set(services.map(nameOf));
    for (const [name, card] of this.#cards) {
      if (!names.has(name)) {
        card.element.remove();
        this.#cards.delete(name);
      }
    }
    for (const service of services) this.#showService(service);
    this.#drawLinks();
  }

  #showService(service) {
    const name = nameOf(service);
    if (!this.#cards.has(name)) {
      this.#cards.set(name, new ServiceCard(service));
      this.columns.get(service.role).append(this.#cards.get(name).element);
    }
    this.#cards.get(name).update(service, this.#history.note(name, service.stats.tokens_per_s));
  }

  #drawLinks() {
    const places = new Map([...this.#cards].map(([name, card]) => [name, card.element]));
    this.#links.draw(this.#services, places, this.chart.getBoundingClientRect());
    this.chart.classList.toggle("busy", sum(this.#services, "running") > 0);
  }

  #sayChanges(services) {
    const states = new Map(services.map((service) => [nameOf(service), service.state]));
    const changed = [...states].filter(([name, state]) => this.#states.size && this.#states.get(name) !== state);
    if (changed.length) announce(changed.map(([name, state]) => `${name} is ${state}`).join(", "));
    this.#states = states;
  }
}

function totals(services) {
  const [drafted, accepted] = [sum(services, "drafted"), sum(services, "accepted")];
  const lost = services.filter(({ state }) => state === "lost").length;
  return [
    ["tokens/s", count(sum(services, "tokens_per_s"))],
    ["running", count(sum(services, "running"))],
    ["waiting", count(sum(services, "waiting"))],
    ["KV cache in use", share(sum(services, "kv_blocks_used"), sum(services, "kv_blocks"))],
    ["drafts accepted", share(accepted, drafted)],
    ["services", lost ? `${services.length - lost} and ${lost} lost` : count(services.length)],
  ];
}

function sum(services, name) {
  return services.filter(({ state }) => state !== "lost").reduce((all, { stats }) => all + (stats[name] ?? 0), 0);
}
