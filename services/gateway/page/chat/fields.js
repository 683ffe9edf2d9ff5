/** The numbers of a request that the panel offers. An empty one leaves the choice to the model. */
export const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, hasSlider: true, note: "0 always takes the likeliest token" },
  { name: "top_p", label: "Top p", min: 0.01, max: 1, step: 0.01, hasSlider: true, note: "share of probability to sample from" },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1, note: "" },
  { name: "seed", label: "Seed", min: 0, step: 1, note: "the same answer again" },
  { name: "top_k", label: "Top k", min: 0, step: 1, isRare: true },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, isRare: true },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1, isRare: true },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1, isRare: true },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.01, max: 10, step: 0.01, isRare: true },
  { name: "history_limit", label: "History limit", min: -1, step: 1, isRare: true, note: "tokens above which the oldest turns are left out; -1: as the context asks" },
];

export const EFFORTS = ["", "none", "low", "medium", "high"];

export const EXAMPLE_TOOLS = [
  {
    type: "function",
    function: {
      name: "multiply",
      description: "Multiplies two numbers.",
      parameters: {
        type: "object",
        properties: { a: { type: "integer" }, b: { type: "integer" } },
        required: ["a", "b"],
      },
    },
  },
];

export const EXAMPLE_SCHEMA = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" }, city: { type: "string" } },
  required: ["name", "age", "city"],
};

/** What a newcomer may ask, with what the panel then shows. */
export const EXAMPLES = [
  { title: "Ask", text: "How do the services of Shoal work together?", values: { temperature: 0 } },
  { title: "Compute", text: "What is 12 + 30?", values: { temperature: 0 } },
  { title: "Call a tool", text: "What is 1234 * 56?", values: { temperature: 0, tools: EXAMPLE_TOOLS } },
  { title: "Fill a schema", text: "As JSON: Ada is 31 and lives in Rome.", values: { temperature: 0, schema: EXAMPLE_SCHEMA } },
];
