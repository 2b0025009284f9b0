// Asks again and again how the mesh is, while somebody looks.

import { ApiError, getJson, requestsPerMinute } from "./api.js";

const EVERY_MS = 1000;
// While something is wrong.
const SOON_MS = 400;
const PATIENCE_MS = 6000;
// Of the requests that a key may send: the others are for the chat.
const SHARE = 0.25;

/** Calls `onStatus` with each answer, `onAway` with the error while none comes, and `onLocked` if the key is not good. */
export function watchStatus({ onStatus, onAway, onLocked }) {
  let timer = null;
  let isAsking = false;
  let isCalm = true;

  async function look() {
    clearTimeout(timer);
    timer = null;
    if (isAsking || document.hidden) return;
    isAsking = true;
    let restMs = 0;
    try {
      const status = await getJson("/mesh/status", { signal: AbortSignal.timeout(PATIENCE_MS) });
      isCalm = status.ready !== false;
      onStatus(status, performance.now());
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) {
        isAsking = false;
        onLocked(error.message);
        return;
      }
      restMs = 1000 * (error.retryAfterS ?? 0);
      onAway(error);
    }
    isAsking = false;
    const paceMs = Math.max(isCalm ? EVERY_MS : SOON_MS, 60000 / (SHARE * requestsPerMinute()));
    timer ??= setTimeout(look, Math.max(paceMs, restMs));
  }

  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) look();
  });
  look();
  return { again: () => look() };
}
