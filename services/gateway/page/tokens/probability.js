/** From likely to unlikely; each begins at its probability. */
export const LEVELS = [
  { from: 0.9, label: "≥ 90 %" },
  { from: 0.5, label: "≥ 50 %" },
  { from: 0.2, label: "≥ 20 %" },
  { from: 0.05, label: "≥ 5 %" },
  { from: 0, label: "less" },
];

export function levelOf(logprob) {
  const probability = Math.exp(logprob);
  return LEVELS.findIndex(({ from }) => probability >= from);
}

export function percent(logprob) {
  const value = 100 * Math.exp(logprob);
  if (value < 0.01) return "< 0.01 %";
  return `${value < 10 ? value.toFixed(2) : value.toFixed(1)} %`;
}

/** A token as it can be seen: line ends and tabs have signs. */
export function shown(text) {
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";
}
