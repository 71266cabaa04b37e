// Tokens per expert: a canvas of layers x experts that the pointer and the keyboard can read.
import { count } from "./format.js";

export class HeatMap {
  constructor(canvas, cell) {
    this.canvas = canvas;
    this.cell = cell;
    this.table = [];
    this.cursor = null;
    canvas.addEventListener("keydown", (event) => this.#key(event));
    canvas.addEventListener("mousemove", (event) => this.#point(event));
    canvas.addEventListener("focus", () => this.#move(...(this.cursor ?? [0, 0])));
    canvas.addEventListener("mouseleave", () => this.#move(null));
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  // table: one array of counts per layer, experts of every rank side by side.
  set(table) {
    this.table = table;
    this.max = Math.max(1, ...table.map((row) => Math.max(0, ...row)));
    this.columns = Math.max(1, ...table.map((row) => row.length));
    this.canvas.setAttribute("aria-label", `tokens per expert: ${table.length} layers, ${this.columns} experts`);
    this.draw();
    this.#tell();
  }

  draw() {
    if (!this.table.length) return;
    const side = Math.max(4, Math.min(22, Math.floor(420 / this.table.length)));
    const scale = window.devicePixelRatio || 1;
    const width = this.canvas.clientWidth;
    this.canvas.style.height = side * this.table.length + "px";
    this.canvas.width = Math.max(1, width * scale);
    this.canvas.height = side * this.table.length * scale;
    const context = this.canvas.getContext("2d");
    const style = getComputedStyle(document.documentElement);
    const ends = [rgb(style.getPropertyValue("--heat-0")), rgb(style.getPropertyValue("--heat-1"))];
    const [w, h] = [this.canvas.width / this.columns, this.canvas.height / this.table.length];
    const gap = w > 6 && h > 6 ? 1 : 0;
    this.table.forEach((row, layer) => row.forEach((value, expert) => {
      // By the square root: the few hot experts do not drown the many.
      context.fillStyle = mix(ends, Math.sqrt(value / this.max));
      const [left, top] = [Math.floor(expert * w), Math.floor(layer * h)];
      context.fillRect(left, top, Math.floor((expert + 1) * w) - left - gap, Math.floor((layer + 1) * h) - top - gap);
    }));
    if (this.cursor) {
      context.strokeStyle = style.getPropertyValue("--heat-cursor");
      context.lineWidth = 2 * scale;
      context.strokeRect(this.cursor[1] * w, this.cursor[0] * h, Math.max(w, 4), Math.max(h, 4));
    }
  }

  #key(event) {
    const [layer, expert] = this.cursor ?? [0, 0];
    const target = {
      ArrowUp: [layer - 1, expert], ArrowDown: [layer + 1, expert], ArrowLeft: [layer, expert - 1],
      ArrowRight: [layer, expert + 1], Home: [layer, 0], End: [layer, this.columns - 1],
    }[event.key];
    if (!target) return;
    event.preventDefault();
    this.#move(...target);
  }

  #point(event) {
    const box = this.canvas.getBoundingClientRect();
    this.#move(
      Math.floor(((event.clientY - box.top) / box.height) * this.table.length),
      Math.floor(((event.clientX - box.left) / box.width) * this.columns),
    );
  }

  #move(layer, expert) {
    const clamp = (value, length) => Math.max(0, Math.min(length - 1, value));
    this.cursor = layer === null ? null : [clamp(layer, this.table.length), clamp(expert, this.columns)];
    this.draw();
    this.#tell();
  }

  #tell() {
    if (!this.cursor || !this.table[this.cursor[0]]) {
      this.cell.textContent = "";
      return;
    }
    const [layer, expert] = this.cursor;
    const row = this.table[layer];
    const mean = row.reduce((sum, value) => sum + value, 0) / row.length;
    const share = mean > 0 ? `, ${(row[expert] / mean).toFixed(2)} times the layer's mean` : "";
    this.cell.textContent = `MoE layer ${layer}, expert ${expert}: ${count(row[expert])} tokens${share}`;
  }
}

function rgb(text) {
  const value = parseInt(text.trim().slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}

function mix([low, high], share) {
  return `rgb(${low.map((start, index) => Math.round(start + (high[index] - start) * share)).join(",")})`;
}
