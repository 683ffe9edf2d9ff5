/** The messages of a request, of the system prompt and the turns. */
export function messagesOf(system, turns) {
  const first = system.trim() ? [{ role: "system", content: system }] : [];
  return [...first, ...turns.flatMap((turn) => (turn.role === "user" ? [userMessage(turn)] : assistantMessages(turn)))];
}

function userMessage({ content, images = [] }) {
  if (images.length === 0) return { role: "user", content };
  const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return { role: "user", content: content ? [...parts, { type: "text", text: content }] : parts };
}

/** An answer that failed before it began is none, and calls of one that was cut short are not whole. */
function assistantMessages({ status, content, reasoning, calls }) {
  if (content === "" && (calls.length === 0 || status !== "done")) return [];
  const message = { role: "assistant", content };
  if (reasoning) message.reasoning = reasoning;
  if (calls.length === 0 || status !== "done") return [message];
  message.tool_calls = calls.map(({ id, name, arguments: text }) => ({
    id, type: "function", function: { name, arguments: text },
  }));
  const results = calls.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result }));
  return [message, ...results];
}
