export function count(number) {
  return Math.round(number).toLocaleString("en");
}

export function share(part, whole) {
  return whole ? `${Math.round((100 * part) / whole)} %` : "–";
}

export function milliseconds(ms) {
  if (ms === null || ms === undefined) return "–";
  return `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
}

export function duration(s) {
  if (s === null) return "–";
  if (s < 120) return `${Math.round(s)} s`;
  return s < 7200 ? `${Math.round(s / 60)} min` : `${Math.round(s / 3600)} h`;
}

export function gigabytes(bytes) {
  return bytes >= 1e9 ? `${(bytes / 1e9).toFixed(1)} GB` : `${Math.round(bytes / 1e6)} MB`;
}
