const SVG = "http://www.w3.org/2000/svg";

/** An element of HTML. `on…` are listeners, `--…` custom properties; what is null or false is left
 * out. Children are nodes or texts: no text is ever read as HTML. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same of SVG. */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || (value === false && !name.startsWith("aria-"))) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else element.setAttribute(name, value === true && !name.startsWith("aria-") ? "" : value);
  }
  return hold(element, ...children);
}

/** Makes `children` all that `element` holds; null and undefined are none. */
export function hold(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Calls `draw` at most once a frame, however often the result is called. */
export function oncePerFrame(draw) {
  let isDue = false;
  return () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      draw();
    });
  };
}

/** Says `text` to screen readers. */
export function announce(text) {
  document.getElementById("announcer").textContent = text;
}
