import { messagesOf } from "./conversation.js";
import { NUMBERS } from "./fields.js";

/** The values of the panel before anybody changes them; numbers are absent. */
export function defaultValues() {
  return { system: "", stop: "", effort: "", numAlternatives: 5, tools: null, toolChoice: "auto", schema: null, extra: null };
}

/** The body of a chat's request. What the user wrote under `extra` wins over all else. */
export function requestOf(model, values, turns) {
  const body = {
    model,
    messages: messagesOf(values.system, turns),
    stream: true,
    stream_options: { include_usage: true },
  };
  if (values.numAlternatives >= 0) {
    Object.assign(body, { logprobs: true, top_logprobs: values.numAlternatives, include_draft_logprobs: true });
  }
  for (const { name } of NUMBERS) if (values[name] !== undefined) body[name] = values[name];
  const stop = values.stop.split("\n").filter((line) => line !== "");
  if (stop.length) body.stop = stop;
  if (values.effort) body.reasoning_effort = values.effort;
  if (values.tools?.length) Object.assign(body, { tools: values.tools, tool_choice: values.toolChoice });
  if (values.schema) {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: values.schema } };
  }
  return { ...body, ...values.extra };
}

/** The same request for a terminal, at this page's address. An image is too long for an argument. */
export function curlOf(body) {
  const json = JSON.stringify(body, null, 2);
  const key = sessionStorage.getItem("shoal-api-key") === null ? "" : ' \\\n  -H "Authorization: Bearer $SHOAL_API_KEY"';
  return `curl -N ${new URL("v1/chat/completions", location.href.split("#")[0])} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d @- <<'END'\n${json}\nEND`;
}
