import { askForKey } from "./key.js";
import { dataOf } from "./server_sent_events.js";

const KEY = "shoal-api-key";

/** What the server refused: its own words, its `code`, and the seconds after which to try again. */
export class ApiError extends Error {
  constructor(status, error = {}, retryAfterS = null) {
    super(error.message ?? `the server answered with status ${status}`);
    this.status = status;
    this.code = error.code ?? "";
    this.param = error.param ?? null;
    this.retryAfterS = retryAfterS;
  }
}

/** The response of a request that succeeded. Asks for an API key when the server wants one, until
 * one is right. Throws ApiError; what `fetch` throws where no server is reached or `signal` fires. */
export async function call(path, { body, signal } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers: {
        ...(body === undefined ? {} : { "Content-Type": "application/json" }),
        ...(key === null ? {} : { Authorization: `Bearer ${key}` }),
      },
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
    });
    if (response.ok) return response;
    const error = await errorOf(response);
    if (error.status !== 401) throw error;
    if (sessionStorage.getItem(KEY) === key) {
      const given = await askForKey(key === null ? null : error.message);
      if (given === null) throw error;
      sessionStorage.setItem(KEY, given);
    }
  }
}

export async function getJson(path, options) {
  return (await call(path, options)).json();
}

/** Sends a chat and yields each chunk of its stream. Calls `onStart` with the request's id and how
 * many of the oldest turns are not in its prompt. */
export async function* streamChat(body, signal, onStart) {
  const response = await call("v1/chat/completions", { body, signal });
  onStart(response.headers.get("X-Request-Id"), Number(response.headers.get("X-Shoal-Dropped-Turns")));
  for await (const data of dataOf(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(response.status, chunk.error);
    yield chunk;
  }
  throw new ApiError(response.status, { message: "the stream ended before the answer did" });
}

async function errorOf(response) {
  const retryAfter = response.headers.get("Retry-After");
  const reply = await response.json().catch(() => ({}));
  return new ApiError(response.status, reply.error, retryAfter === null ? null : Number(retryAfter));
}
