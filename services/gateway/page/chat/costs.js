import { h } from "../dom.js";

const MIN_TOKENS = 16, MIN_MS = 200; // below these a speed says nothing

/** What an answer took: tokens, time, drafts, and how much of its prompt was cached. */
export function costs({ usage, finish, startedMs, firstMs, endedMs }) {
  if (usage === null) return [];
  const { prompt_tokens: prompt, completion_tokens: written } = usage;
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const { accepted_prediction_tokens: accepted, rejected_prediction_tokens: rejected } = usage.completion_tokens_details ?? {};
  const parts = [
    cost(`${count(prompt)} in${cached ? `, ${count(cached)} cached` : ""}`, "tokens of the prompt"),
    cost(`${count(written)} out`, "tokens that were written"),
    firstMs !== null && cost(`${seconds(firstMs - startedMs)} to first`, "time to the first token"),
    firstMs !== null && written >= MIN_TOKENS && endedMs - firstMs >= MIN_MS && cost(`${Math.round((1000 * (written - 1)) / (endedMs - firstMs))} tok/s`, "tokens a second after the first"),
    accepted !== undefined && cost(`${Math.round((100 * accepted) / Math.max(accepted + rejected, 1))} % of drafts`, `${count(accepted)} of ${count(accepted + rejected)} verified drafts were accepted`),
    finish === "length" && cost("cut at the limit", "the limit of tokens was reached"),
  ];
  return [h("span", { class: "costs" }, ...parts.filter(Boolean))];
}

function cost(text, title) {
  return h("span", { title }, text);
}

function count(number) {
  return number.toLocaleString("en");
}

function seconds(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}
