import { h, hold } from "../dom.js";
import { icon } from "../icons.js";

const MAX_SIDE = 2048;
const SHOWN_WIDTH = 320; // twice the style's size, for dense screens
const SHOWN_HEIGHT = 192;
const QUALITY = 0.9;

/** An image of the user: its `url` holds its data, its `canvas` shows it small under its `name`. The browser turns
 * it upright, and metadata stay behind. Rejects what it cannot read. */
export async function readImage(file) {
  const bitmap = await createImageBitmap(file);
  const name = file.name || "an image";
  const type = file.type === "image/jpeg" ? "image/jpeg" : "image/png";
  const url = drawn(bitmap, MAX_SIDE, MAX_SIDE, {}).toDataURL(type, QUALITY);
  const canvas = drawn(bitmap, SHOWN_WIDTH, SHOWN_HEIGHT, { class: "image", role: "img", "aria-label": name });
  bitmap.close();
  return { url, canvas, name };
}

function drawn(bitmap, maxWidth, maxHeight, attributes) {
  const scale = Math.min(1, maxWidth / bitmap.width, maxHeight / bitmap.height);
  const canvas = h("canvas", attributes);
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high"; // otherwise lines of a screenshot's text are skipped
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas;
}

/** Shows `images` in `element`, each with a way to remove it: `keep` gets the ones that are left. */
export function showRemovable(element, images, keep) {
  hold(element, ...images.map((image) => {
    const remove = () => keep(images.filter((each) => each !== image));
    return h("button", { class: "quiet", type: "button", "aria-label": `Remove ${image.name}`, onclick: remove }, image.canvas, icon("close"));
  }));
}
