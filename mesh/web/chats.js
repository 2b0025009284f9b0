// Chats that this browser keeps: each in an entry of its own, so that two tabs do not overwrite one another's.

const PREFIX = "spanmesh.chat.";
const MOST_CHATS = 100;
const TITLE_CHARS = 48;

/** A chat without a message, which is not kept yet. */
export function newChat() {
  const id = [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, title: "", changedMs: 0, model: null, settings: null, tokens: null, messages: [] };
}

/** The beginning of a question, in one line. */
export function titleOf(question) {
  const line = question.replace(/\s+/g, " ").trim();
  return line.length > TITLE_CHARS ? `${line.slice(0, TITLE_CHARS - 1)}…` : line;
}

/** All that are kept, the latest first. */
export function keptChats() {
  return keys()
    .map((key) => parsed(read(key)))
    .filter(Boolean)
    .sort((one, other) => other.changedMs - one.changedMs);
}

/** One that is kept, or null. */
export const keptChat = (id) => parsed(read(PREFIX + id));

/**
 * Keeps a chat; pictures of the oldest others go, and then these others, if that makes room for it. None of them goes for
 * its pictures. Returns what is kept: "all", "texts" without its pictures, or "".
 */
export function keepChat(chat, nowMs) {
  chat.changedMs = nowMs;
  const others = keptChats().filter(({ id }) => id !== chat.id);
  while (others.length >= MOST_CHATS) dropChat(others.pop().id);
  const whole = JSON.stringify(chat);
  if (write(chat.id, whole)) return "all";
  for (const other of others.filter(hasPictures).reverse()) {
    if (write(other.id, JSON.stringify(withoutPictures(other))) && write(chat.id, whole)) return "all";
  }
  if (!hasPictures(chat)) return keepText(chat, whole, others) ? "all" : "";
  return keepText(chat, JSON.stringify(withoutPictures(chat)), others) ? "texts" : "";
}

function keepText(chat, text, others) {
  const dropped = [];
  while (!write(chat.id, text)) {
    // Full, or not allowed to keep anything.
    if (!others.length) {
      for (const [id, before] of dropped) if (before !== null) write(id, before);
      return false;
    }
    const { id } = others.pop();
    dropped.push([id, read(PREFIX + id)]);
    dropChat(id);
  }
  return true;
}

const hasPictures = ({ messages }) => messages.some(({ pictures }) => pictures?.length);

function withoutPictures(chat) {
  const messages = chat.messages.map(({ pictures, ...message }) =>
    pictures?.length ? { ...message, numLost: (message.numLost ?? 0) + pictures.length } : message,
  );
  return { ...chat, messages };
}

export function dropChat(id) {
  try {
    localStorage.removeItem(PREFIX + id);
  } catch {
    // What could not be kept need not go.
  }
}

/** Calls a function when another tab has changed what is kept. */
export function onKeptElsewhere(listener) {
  addEventListener("storage", ({ key }) => {
    if (key === null || key.startsWith(PREFIX)) listener();
  });
}

function write(id, text) {
  try {
    localStorage.setItem(PREFIX + id, text);
    return true;
  } catch {
    return false;
  }
}

function keys() {
  try {
    return Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  } catch {
    return [];
  }
}

function read(key) {
  try {
    return localStorage.getItem(key);
  } catch {
    return null;
  }
}

const isPicture = (url) => typeof url === "string" && url.startsWith("data:image/");

// Another version of this page, or a person, may have written something else.
function parsed(text) {
  let chat = null;
  try {
    chat = JSON.parse(text);
  } catch {
    return null;
  }
  const isWhole =
    typeof chat?.id === "string" &&
    typeof chat.title === "string" &&
    Number.isFinite(chat.changedMs) &&
    Array.isArray(chat.messages) &&
    chat.messages.every((message) => ["user", "assistant"].includes(message?.role) && typeof message.content === "string") &&
    chat.messages.every(({ pictures }) => pictures === undefined || (Array.isArray(pictures) && pictures.every(isPicture)));
  return isWhole ? chat : null;
}
