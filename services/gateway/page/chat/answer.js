/** What an assistant's turn knows of itself: the parts of its message, its tokens, and what it cost. */
export function newAnswer({ model, response_format: format }) {
  return {
    role: "assistant", model, isJson: /^json/.test(format?.type), status: "waiting", error: null, requestId: null, numDroppedTurns: 0,
    content: "", reasoning: "", calls: [], tokens: [], drafts: [], finish: null, usage: null,
    startedMs: performance.now(), firstMs: null, endedMs: null,
  };
}

/** Adds a chunk of the stream. */
export function absorb(answer, chunk) {
  if (chunk.usage) answer.usage = chunk.usage;
  const choice = chunk.choices[0];
  if (choice === undefined) return;
  const { delta } = choice;
  answer.content += delta.content ?? "";
  answer.reasoning += delta.reasoning ?? delta.reasoning_content ?? "";
  for (const call of delta.tool_calls ?? []) absorbCall(answer.calls, call);
  for (const entry of choice.logprobs?.content ?? []) answer.tokens.push(token(entry));
  for (const entry of choice.draft_logprobs?.content ?? []) note(answer, entry);
  answer.finish = choice.finish_reason ?? answer.finish;
  if (answer.firstMs === null && (delta.content || delta.tool_calls || delta.reasoning || choice.logprobs)) {
    answer.firstMs = performance.now();
    answer.status = "streaming";
  }
}

/** Ends an answer: `done`, `stopped` by the user, or `failed` with an error. */
export function end(answer, status, error = null) {
  Object.assign(answer, { status, error, endedMs: performance.now() });
}

export function isOpen(answer) {
  return answer.status === "waiting" || answer.status === "streaming";
}

function absorbCall(calls, { index, id, function: called }) {
  const call = (calls[index] ??= { id, name: "", arguments: "", result: "" });
  call.name += called.name ?? "";
  call.arguments += called.arguments ?? "";
}

function token(entry) {
  return {
    text: entry.token, logprob: entry.logprob, rank: entry.rank, draft: null,
    top: entry.top_logprobs.map(({ token, logprob }) => ({ text: token, logprob })),
  };
}

/** Drafts name their token by its place in the answer. One that was rejected stands beside the
 * token that came instead. */
function note(answer, { token, logprob, accepted, position }) {
  if (answer.tokens[position]) answer.tokens[position].draft = { text: token, logprob, accepted };
}
