import { icon } from "../icons.js";
import { h } from "../dom.js";
import { EFFORTS, EXAMPLE_SCHEMA, EXAMPLE_TOOLS, NUMBERS } from "./fields.js";
import { JsonField } from "./json_field.js";
import { NumberField } from "./number_field.js";
import { defaultValues } from "./request.js";

const ALTERNATIVES = [[-1, "not asked for"], [0, "of the token alone"], [3, "with 3 alternatives"], [5, "with 5 alternatives"], [10, "with 10 alternatives"], [20, "with 20 alternatives"]];

/** What goes along with each request: instructions, sampling, tools, a schema. `values` is what
 * the user has set; what is no JSON or out of range has a problem, and `problem` says which. */
export class Panel {
  constructor(close) {
    this.values = defaultValues();
    this.#make(close);
  }

  /** The fields that only some models have. */
  adapt(traits) {
    this.effort.hidden = !traits.reasoning_parser;
    this.tools.element.hidden = !traits.tool_parser;
  }

  /** Shows these numbers, tools and schema in place of those that were set before. */
  set(values) {
    for (const field of this.numbers) field.set(values[field.name]);
    this.tools.set(values.tools ?? null);
    this.schema.set(values.schema ?? null);
    this.extra.set(null);
  }

  get problem() {
    const broken = this.#broken;
    return broken ? `${broken.label}: ${broken.problem}` : null;
  }

  /** Brings the user to the field that has the problem. */
  focusProblem() {
    this.#broken.focus();
  }

  get #broken() {
    return [...this.numbers, this.tools, this.schema, this.extra].find((field) => field.problem);
  }

  #make(close) {
    const note = (name) => (value) => (value === undefined ? delete this.values[name] : (this.values[name] = value));
    this.numbers = NUMBERS.map((each) => new NumberField(each, note(each.name)));
    this.tools = new JsonField({
      name: "tools", label: "Tools", explanation: "an array of functions, as the API takes them",
      example: EXAMPLE_TOOLS, isRight: Array.isArray, controls: [toolChoice(note("toolChoice"))],
    }, note("tools"));
    this.schema = new JsonField({
      name: "schema", label: "JSON schema", explanation: "an object; the answer is held to it",
      example: EXAMPLE_SCHEMA, isRight: isObject,
    }, note("schema"));
    this.extra = new JsonField({
      name: "extra", label: "More fields", explanation: "an object, joined to the request as it is",
      example: { min_tokens: 20 }, isRight: isObject,
    }, note("extra"));
    this.effort = select("effort", "Reasoning effort", EFFORTS.map((each) => [each, each || "the model's"]), note("effort"));
    const often = this.numbers.filter((field) => !field.isRare);
    const rare = this.numbers.filter((field) => field.isRare);
    this.element = h("aside", { class: "panel", id: "panel", "aria-label": "Request" },
      h("div", { class: "panel-head" },
        h("h2", {}, "Request"),
        h("button", { class: "quiet only-narrow", type: "button", onclick: close, "aria-label": "Close the request's panel" }, icon("close"))),
      area("system", "System prompt", 3, "instructions for the whole conversation", note("system")),
      h("div", { class: "group" }, ...often.map((field) => field.element)),
      h("details", { class: "more" },
        h("summary", {}, "More sampling"),
        h("div", { class: "group" }, ...rare.map((field) => field.element)),
        area("stop", "Stop strings, one a line", 2, "", note("stop"))),
      this.effort,
      select("alternatives", "Probabilities", ALTERNATIVES, (value) => note("numAlternatives")(Number(value)), "5"),
      this.tools.element,
      this.schema.element,
      this.extra.element);
  }
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function area(name, label, rows, placeholder, note) {
  return h("div", { class: "field" },
    h("label", { for: `field-${name}` }, label),
    h("textarea", { id: `field-${name}`, rows, placeholder, oninput: (event) => note(event.target.value) }));
}

function select(name, label, options, note, chosen = "") {
  return h("div", { class: "field row" },
    h("label", { for: `field-${name}` }, label),
    h("select", { id: `field-${name}`, onchange: (event) => note(event.target.value) },
      ...options.map(([value, text]) => h("option", { value, selected: String(value) === chosen }, text))));
}

function toolChoice(note) {
  const options = ["auto", "required", "none"].map((each) => h("option", {}, each));
  return h("label", {}, "choice ", h("select", { "aria-label": "Tool choice", onchange: (event) => note(event.target.value) }, ...options));
}
