// Requests to the server that sent this page, with the key that its user entered.

const KEY = "spanmesh.key";

export class ApiError extends Error {
  constructor(message, status, retryAfterS = null) {
    super(message);
    this.status = status;
    this.retryAfterS = retryAfterS;
  }
}

// Of this tab only, and gone with it.
export const keptKey = () => sessionStorage.getItem(KEY) ?? "";
export const keepKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));

let perMinute = Infinity;

/** How many requests a minute the key may send; Infinity where nothing limits it. */
export const requestsPerMinute = () => perMinute;

/** The JSON that a path answers. Throws ApiError, or TypeError where nobody answers. */
export async function getJson(path, options = {}) {
  const response = await ask(path, options);
  return response.json();
}

/** Events of a streamed answer, as objects. Throws as above, and for an error event in the stream. */
export async function* streamJson(path, body, signal) {
  const response = await ask(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const line of lines(response.body)) {
    if (!line.startsWith("data: ")) continue; // an empty line, or a ping
    const data = line.slice("data: ".length);
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message, response.status);
    yield event;
  }
  throw new ApiError("The server ended the answer before its end.", response.status);
}

async function ask(path, options) {
  const key = keptKey();
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  perMinute = Number(response.headers.get("X-Ratelimit-Limit-Requests")) || Infinity;
  if (response.ok) return response;
  let message = `The server answered ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // Whatever stands between here and the server may answer in another way.
  }
  throw new ApiError(message, response.status, Number(response.headers.get("Retry-After")) || null);
}

async function* lines(stream) {
  const decoder = new TextDecoder();
  const reader = stream.getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += decoder.decode(value, { stream: true });
      const whole = rest.split("\n");
      rest = whole.pop();
      yield* whole;
    }
  } finally {
    reader.releaseLock();
  }
}
