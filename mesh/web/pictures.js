// Pictures that go with a message: made smaller here, and drawn here, so that no address of one is ever fetched.

import { byId, el, focusByMouse, setText } from "./dom.js";

// Pixels of the longer side. Models take no more of a picture, and a server takes bodies of a bounded size.
const MOST_SIDE = 1536;
const QUALITY = 0.85;
// Of one message; the server takes no more.
const MOST_PICTURES = 8;
const TEXT_ONLY = "This model reads text only: choose one that reads pictures, or serve this one with --mmproj.";

/** Pictures of the message that is being written. */
export class PictureTray {
  #pictures = [];
  #isAllowed = false;
  #numReading = 0;
  // One after the other, so that they keep their order and their bound.
  #last = Promise.resolve();
  #said;

  /** Takes files by the button, dropped onto `area` or pasted into it; `said` is told what became of them. */
  constructor(area, said) {
    this.#said = said;
    const files = byId("picture-files");
    byId("attach").addEventListener("click", () => files.click());
    files.addEventListener("change", () => {
      this.#add([...files.files]);
      files.value = "";
    });
    // The browser would leave the page for a file that is dropped anywhere on it.
    for (const kind of ["dragover", "drop"]) {
      window.addEventListener(kind, (event) => {
        if (event.dataTransfer?.types.includes("Files")) event.preventDefault();
      });
    }
    area.addEventListener("drop", (event) => this.#take(event, event.dataTransfer));
    area.addEventListener("paste", (event) => this.#take(event, event.clipboardData));
  }

  /** Whether the model reads pictures. */
  setAllowed(isAllowed) {
    this.#isAllowed = isAllowed;
    byId("attach").hidden = !isAllowed;
  }

  /** Whether some are still being read. */
  get isBusy() {
    return this.#numReading > 0;
  }

  /** Whether there are any. */
  get isEmpty() {
    return this.#pictures.length === 0;
  }

  /** The pictures, as `data:` URLs; they belong to a message now. */
  takeAll() {
    const found = this.#pictures;
    this.#pictures = [];
    this.#show();
    return found;
  }

  // A text is pasted as ever, also where a program put a picture of it beside it.
  #take(event, transfer) {
    const files = [...(transfer?.files ?? [])];
    if (!files.length || transfer.types.includes("text/plain")) return;
    event.preventDefault();
    if (this.#isAllowed) this.#add(files);
    else this.#said(TEXT_ONLY);
  }

  #add(files) {
    this.#numReading += 1;
    this.#last = this.#last.then(() => this.#read(files));
  }

  async #read(files) {
    const notes = [];
    for (const file of files) {
      if (this.#pictures.length >= MOST_PICTURES) {
        notes.push(`A message has at most ${MOST_PICTURES} pictures.`);
        break;
      }
      try {
        this.#pictures.push(await madeSmaller(file));
      } catch {
        notes.push(`${file.name} is no picture that this browser can read.`);
      }
    }
    this.#numReading -= 1;
    this.#show();
    this.#said(notes.join(" "));
  }

  #show() {
    const list = byId("pictures");
    list.replaceChildren(...this.#pictures.map((url, index) => this.#item(url, index)));
    list.hidden = this.isEmpty;
  }

  #item(url, index) {
    const name = `Picture ${index + 1}`;
    const remove = () => {
      this.#pictures.splice(index, 1);
      this.#show();
      focusByMouse(byId("prompt"));
    };
    const button = el("button", { class: "quiet", type: "button", "aria-label": `Remove picture ${index + 1}`, onclick: remove }, "×");
    return el("li", {}, pictureView(url, name), button);
  }
}

/** A picture on the page. */
export function pictureView(url, name) {
  const canvas = el("canvas", { class: "picture", role: "img", "aria-label": name });
  draw(canvas, url).catch(() => setText(canvas, name));
  return canvas;
}

async function draw(canvas, url) {
  const bytes = Uint8Array.from(atob(url.slice(url.indexOf(",") + 1)), (char) => char.charCodeAt(0));
  const bitmap = await createImageBitmap(new Blob([bytes]));
  [canvas.width, canvas.height] = [bitmap.width, bitmap.height];
  canvas.getContext("2d").drawImage(bitmap, 0, 0);
  bitmap.close();
}

async function madeSmaller(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, MOST_SIDE / Math.max(bitmap.width, bitmap.height));
  const [width, height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * scale)));
  const canvas = el("canvas", { width, height });
  const context = canvas.getContext("2d");
  // JPEG knows nothing transparent.
  context.fillStyle = "white";
  context.fillRect(0, 0, width, height);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, width, height);
  bitmap.close();
  return canvas.toDataURL("image/jpeg", QUALITY);
}
