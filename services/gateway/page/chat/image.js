import { h, hold } from "../dom.js";
import { icon } from "../icons.js";

const MAX_SIDE = 2048;
const QUALITY = 0.9;

/** An image of the user: its `url` holds its data, its `canvas` shows it under its `name`. The browser turns it
 * upright, and metadata stay behind. Rejects what it cannot read. */
export async function readImage(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  const side = (length) => Math.max(1, Math.round(length * scale));
  const name = file.name || "an image";
  const canvas = h("canvas", { class: "image", role: "img", "aria-label": name });
  canvas.width = side(bitmap.width);
  canvas.height = side(bitmap.height);
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  const type = file.type === "image/jpeg" ? "image/jpeg" : "image/png";
  return { url: canvas.toDataURL(type, QUALITY), canvas, name };
}

/** Shows `images` in `element`, each with a way to remove it: `keep` gets the ones that are left. */
export function showRemovable(element, images, keep) {
  hold(element, ...images.map((image) => {
    const remove = () => keep(images.filter((each) => each !== image));
    return h("button", { class: "quiet", type: "button", "aria-label": `Remove ${image.name}`, onclick: remove }, image.canvas, icon("close"));
  }));
}
