// Numbers and elements as people read them.

export function count(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value >= 1e9) return (value / 1e9).toFixed(2) + " G";
  if (value >= 1e6) return (value / 1e6).toFixed(2) + " M";
  if (value >= 1e4) return (value / 1e3).toFixed(1) + " k";
  return value >= 100 || Number.isInteger(value) ? Math.round(value).toString() : value.toFixed(1);
}

export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value < 1e-3) return (value * 1e6).toFixed(value < 1e-4 ? 1 : 0) + " µs";
  if (value < 1) return (value * 1e3).toFixed(value < 0.1 ? 1 : 0) + " ms";
  if (value < 120) return value.toFixed(1) + " s";
  if (value < 7200) return Math.floor(value / 60) + " min " + Math.floor(value % 60) + " s";
  return (value / 3600).toFixed(1) + " h";
}

export function bytes(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (value >= size) return (value / size).toFixed(value >= 100 * size ? 0 : 1) + " " + unit;
  }
  return value + " B";
}

export function percent(value) {
  return value === null || value === undefined || !Number.isFinite(value) ? "–" : (100 * value).toFixed(value < 0.1 ? 1 : 0) + " %";
}

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Rebuild only what changed, so that a screen reader and a selection are left in peace.
const shown = new Map();
export function show(id, content, build) {
  const key = JSON.stringify(content);
  if (shown.get(id) === key) return;
  shown.set(id, key);
  document.getElementById(id).replaceChildren(...build(content));
}

export const pairs = (rows) => rows.map(([term, value]) => element("div", {}, element("dt", {}, term), element("dd", {}, value)));

// columns: [title, is a number]; rows: arrays of texts.
export function table({ columns, rows, empty }) {
  if (!rows.length) return [element("caption", { class: "note" }, empty)];
  const kind = (index) => (columns[index][1] ? { class: "number" } : {});
  const head = element("tr", {}, ...columns.map(([title], index) => element("th", { scope: "col", ...kind(index) }, title)));
  const body = rows.map((row) => element("tr", {}, ...row.map((text, index) => element("td", kind(index), text))));
  return [element("thead", {}, head), element("tbody", {}, ...body)];
}
