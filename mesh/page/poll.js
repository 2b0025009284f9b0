// Asks again and again how the mesh is, while somebody looks.

import { ApiError, getJson } from "./api.js";

const EVERY_MS = 1000;
// While something is wrong.
const SOON_MS = 400;
const PATIENCE_MS = 6000;

/** Calls `onStatus` with each answer, `onAway` while nobody answers, and `onLocked` if the key is not good. */
export function watchStatus({ onStatus, onAway, onLocked }) {
  let timer = null;
  let isAsking = false;
  let isCalm = true;

  async function look() {
    clearTimeout(timer);
    timer = null;
    if (isAsking || document.hidden) return;
    isAsking = true;
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
      onAway();
    }
    isAsking = false;
    timer ??= setTimeout(look, isCalm ? EVERY_MS : SOON_MS);
  }

  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) look();
  });
  look();
  return { again: () => look() };
}
