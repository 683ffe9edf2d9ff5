import { h } from "../dom.js";

const MAX_SIDE = 2048;
const QUALITY = 0.9;

/** An image of the user: its `url` holds its data, its `canvas` shows it. The browser turns it
 * upright, and metadata stay behind. Rejects what it cannot read. */
export async function readImage(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  const side = (length) => Math.max(1, Math.round(length * scale));
  const canvas = h("canvas", { class: "image", role: "img", "aria-label": file.name || "Image" });
  canvas.width = side(bitmap.width);
  canvas.height = side(bitmap.height);
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  const type = file.type === "image/jpeg" ? "image/jpeg" : "image/png";
  return { url: canvas.toDataURL(type, QUALITY), canvas };
}

/** The files among what was pasted or dropped that may be images. */
export function imagesIn(transfer) {
  return [...(transfer?.files ?? [])].filter(({ type }) => type.startsWith("image/"));
}
