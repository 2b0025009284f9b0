// What happened lately: the difference between what is counted now and what was counted some seconds ago.

const SPAN_MS = 8000;
// The last known round trip stays on show while nothing runs.
const shapeOf = (status) => (status.stages ?? []).map((stage) => `${stage.host}${stage.address}${stage.layers}`).join();

export class Recent {
  #seen = [];
  #trip = null;

  /** Takes note of a status and the time in ms when it came. */
  add(status, nowMs) {
    const shape = shapeOf(status);
    const counted = { nowMs, shape, trips: status.round_trips ?? null, tokens: status.tokens?.generated ?? 0 };
    const last = this.#seen.at(-1);
    if (last && (last.shape !== shape || (last.trips?.windows ?? 0) > (counted.trips?.windows ?? 0))) {
      // Another ring: it counts from 0.
      this.#seen = [];
      this.#trip = null;
    }
    this.#seen.push(counted);
    while (this.#seen.length > 2 && nowMs - this.#seen[0].nowMs > SPAN_MS) this.#seen.shift();
    this.#trip = this.#tripOf(counted) ?? this.#trip;
  }

  /** Mean times of a trip, in ms, with `isLive` if windows came lately; null before the first. */
  get trip() {
    return this.#trip;
  }

  /** Tokens per second of all answers together. */
  get tokensPerS() {
    const [first, last] = [this.#seen[0], this.#seen.at(-1)];
    if (!first || last.nowMs === first.nowMs) return 0;
    return (1000 * Math.max(0, last.tokens - first.tokens)) / (last.nowMs - first.nowMs);
  }

  #tripOf(now) {
    const before = this.#seen[0];
    if (!now.trips) return null;
    // What came before this page was opened is better than nothing.
    const base = before === now || !before.trips ? null : before.trips;
    const count = now.trips.windows - (base?.windows ?? 0);
    if (count <= 0) return this.#trip && { ...this.#trip, isLive: false };
    const mean = (name) => now.trips[name].map((sum, index) => (sum - (base?.[name][index] ?? 0)) / count);
    const trip = { wire: mean("wire_ms"), queue: mean("queue_ms"), compute: mean("compute_ms"), isLive: base !== null };
    trip.total = [...trip.wire, ...trip.queue, ...trip.compute].reduce((sum, value) => sum + value, 0);
    return trip;
  }
}
