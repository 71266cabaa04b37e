// Asks local rank 0 for all ranks of its node, once a second, and shows what it says.
import { bytes, count, element, pairs, percent, seconds, show, table } from "./format.js";
import { HeatMap } from "./heatmap.js";
import { Rates } from "./rates.js";

const PERIOD_MS = 1000;
const EXPERTS_EVERY = 3;
const PHASES = ["starting", "loading", "pairing", "capturing", "ready", "draining", "stopped"];
const byId = (id) => document.getElementById(id);
const heat = new HeatMap(byId("heat"), byId("heat-cell"));
const rates = new Map();
let last = null;
let lastAt = 0;
let turn = 0;

async function poll() {
  try {
    const withExperts = turn++ % EXPERTS_EVERY === 0;
    const options = { cache: "no-store", signal: AbortSignal.timeout(5000) };
    const answer = await fetch(`node?experts=${withExperts ? 1 : 0}`, options);
    if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
    last = await answer.json();
    lastAt = Date.now();
    render(last.ranks, withExperts);
  } catch (error) {
    away(error);
  }
  setTimeout(poll, PERIOD_MS);
}

function away(error) {
  badge("unreachable", "bad");
  const before = last ? ` Last seen ${new Date(lastAt).toLocaleTimeString()}, then ${last.ranks[0]?.phase ?? "unknown"}.` : "";
  const why = error instanceof TypeError ? "" : ` (${error.message})`; // a TypeError is fetch's: no connection
  banner(`F does not answer${why}.${before} ${last ? "What stands below is from then. " : ""}This page goes on by itself when F is back.`);
  document.body.dataset.state = "unreachable";
  age();
  turn = 0;
}

function render(ranks, withExperts) {
  const here = ranks.find((rank) => rank.phase) ?? ranks[0];
  if (!here?.phase) return away(new Error(here?.unreachable ?? "no rank answers"));
  for (const status of ranks) {
    if (!rates.has(status.rank)) rates.set(status.rank, new Rates());
    if (status.phase) rates.get(status.rank).add(status);
  }
  const now = new Map(ranks.map((status) => [status.rank, rates.get(status.rank).now()]));
  standing(ranks, here);
  steps(here, now);
  ranksTable(ranks, now);
  sessionsTable(ranks);
  if (withExperts) experts(ranks);
  memory(ranks);
  about(here);
}

function standing(ranks, here) {
  const problem = ranks.find((rank) => rank.unreachable || rank.phase === "failed") ?? ranks.find((rank) => rank.reason);
  const worst = ranks.find((rank) => rank.phase !== "ready") ?? here;
  const phase = worst.phase ?? "unreachable";
  const bad = phase === "failed" || phase === "unreachable" || (phase === "ready" && problem);
  badge(phase === "ready" && problem ? "stuck" : phase, bad ? "bad" : phase === "ready" ? "good" : "busy");
  banner(problem ? `F rank ${problem.rank}: ${problem.reason ?? problem.unreachable}` : "");
  document.body.dataset.state = phase;
  age();
  byId("model").textContent = here.model;
  const names = worst.phase === "failed" ? [...Object.keys(worst.phase_seconds)] : PHASES.filter((name) => name !== "pairing" || name in (worst.phase_seconds ?? {}));
  const own = worst.phase_seconds ?? {};
  show("phases", names.map((name) => [name, name in own ? own[name].toFixed(1) + " s" : "", name === worst.phase]), (items) =>
    items.map(([name, time, current]) => {
      const kind = name === "failed" ? "bad" : name === "ready" ? "" : "busy";
      const attributes = { class: `${time ? "done" : ""} ${kind}` };
      if (current) attributes["aria-current"] = "step";
      return element("li", attributes, name, element("small", {}, time || "–"));
    }));
  const loading = worst.phase === "loading";
  byId("progress").hidden = !loading;
  byId("progress").value = loading ? worst.progress : 0;
}

function steps(here, all) {
  const now = all.get(here.rank);
  const idle = here.steps?.idle_s;
  show("now", [
    ["steps/s", count(now?.steps_per_s)], ["rows/s", count(now?.rows_per_s)], ["busy", percent(now?.busy)],
    ["compute/step", seconds(now?.compute_s)], ["wait/step", seconds(now?.wait_s)], ["send/step", seconds(now?.send_s)],
    ["rows/step", count(now?.rows_per_step)], ["posts/step", count(now?.posts_per_step)],
    ["since last step", here.steps?.steps ? seconds(idle) : "–"],
  ], pairs);
  const points = rates.get(here.rank).history();
  const top = Math.max(1, ...points.map((point) => point[1]));
  const end = points.at(-1)?.[0] ?? 0;
  const line = points.map(([at, value]) => `${(600 - (end - at) * 5).toFixed(1)},${(78 - (value / top) * 74).toFixed(1)}`);
  const spark = byId("spark");
  spark.replaceChildren();
  if (line.length > 1) {
    const start = line[0].split(",")[0];
    for (const [name, shape] of [["polygon", [`${start},80`, ...line, "600,80"]], ["polyline", line]]) {
      const drawn = document.createElementNS("http://www.w3.org/2000/svg", name);
      drawn.setAttribute("points", shape.join(" "));
      spark.append(drawn);
    }
  }
  const most = Math.max(0, ...points.map((point) => point[1]));
  const seen = most ? `rows/s over the last two minutes, up to ${count(most)}` : "no rows in the last two minutes";
  byId("spark-caption").textContent = points.length ? `F rank ${here.rank}: ${seen}` : here.steps?.steps ? "No steps since this page was opened" : "No steps yet";
}

function ranksTable(ranks, now) {
  const rows = ranks.map((status) => {
    const rate = now.get(status.rank);
    return [String(status.rank), status.phase ?? "unreachable", count(rate?.steps_per_s), count(rate?.rows_per_s), seconds(rate?.compute_s), percent(rate?.busy), status.experts_per_rank ? String(status.experts_per_rank[status.rank]) : "–", count(status.steps?.rows)];
  });
  const columns = [["rank"], ["phase"], ["steps/s", 1], ["rows/s", 1], ["compute/step", 1], ["busy", 1], ["experts", 1], ["rows in all", 1]];
  show("ranks", { columns, rows, empty: "No ranks" }, table);
}

function sessionsTable(ranks) {
  const rows = (ranks[0].sessions ?? []).map((session) => {
    const peers = [...new Set(Object.values(session.attention_ranks))];
    return [session.instance.slice(0, 12), `${Object.keys(session.attention_ranks).length} of ${session.num_attention_ranks}`, String(session.capacity), String(session.stages), peers.join(", ") || "attaching"];
  });
  const columns = [["instance"], ["A ranks", 1], ["capacity", 1], ["stages", 1], ["peer"]];
  show("sessions", { columns, rows, empty: "No Attention is attached" }, table);
}

function experts(ranks) {
  const tables = ranks.map((status) => status.expert_rows ?? []);
  const layers = Math.max(0, ...tables.map((rows) => rows.length));
  const joined = Array.from({ length: layers }, (_, layer) => tables.flatMap((rows) => rows[layer] ?? []));
  const total = joined.flat().reduce((sum, value) => sum + value, 0);
  byId("experts").hidden = !total;
  const counted = ranks.some((status) => status.expert_rows !== undefined);
  const never = !counted && ranks.some((status) => status.phase === "ready");
  byId("experts-note").textContent = total ? "" : never ? "Not counted by this backend." : "No tokens yet.";
  if (!total) return;
  heat.set(joined);
  byId("heat-max").textContent = `${count(heat.max)} tokens (colour by square root)`;
  const skews = joined.filter((row) => row.some((value) => value > 0)).map((row) => Math.max(...row) / (row.reduce((a, b) => a + b, 0) / row.length));
  const perRank = tables.map((rows) => rows.flat().reduce((sum, value) => sum + value, 0));
  const meanRank = perRank.reduce((a, b) => a + b, 0) / perRank.length;
  const idle = joined.flat().filter((value) => !value).length;
  const cards = [
    ["tokens × experts", count(total)], ["worst layer: max ÷ mean", Math.max(...skews).toFixed(2)],
    ["mean layer: max ÷ mean", (skews.reduce((a, b) => a + b, 0) / skews.length).toFixed(2)], ["experts never hit", count(idle)],
  ];
  if (ranks.length > 1) cards.push(["busiest rank ÷ mean", (Math.max(...perRank) / meanRank).toFixed(2)]);
  show("imbalance", cards, pairs);
}

function memory(ranks) {
  const rows = ranks.filter((status) => status.phase).map((status) => [
    String(status.rank), bytes(status.weights_bytes), bytes(status.window_bytes), bytes(status.memory?.rss_bytes),
    bytes(status.memory?.host_available_bytes), bytes(status.memory?.host_total_bytes),
  ]);
  const columns = [["rank"], ["weights", 1], ["windows", 1], ["process", 1], ["host, free", 1], ["host, all", 1]];
  show("memory", { columns, rows, empty: "No rank answers" }, table);
}

function about(here) {
  const print = here.fingerprint;
  show("about", [
    ["model", here.model], ["architecture", print.architecture],
    ["experts", `${print.num_experts} in ${print.num_moe_layers} layers, top ${print.top_k}, ${print.dtype}`],
    ["shape", `hidden ${print.hidden_size}, intermediate ${print.intermediate_size}`],
    ["backend", `${here.backend}, kernel ${here.moe_kernel || "–"}`], ["F ranks", String(here.world_size)],
    ["addresses", here.addresses.filter(Boolean).join(", ")], ["checkpoint", print.checkpoint.slice(0, 16)],
    ["version", `${here.version}, protocol ${here.protocol_version}`],
    ["time to ready", seconds(here.time_to_ready_s)],
  ], pairs);
}

function badge(text, kind) {
  const shown = byId("badge");
  shown.className = `badge ${kind}`;
  if (shown.textContent !== text) shown.textContent = text;
  document.title = `${text} · ffn_faas`;
}

function banner(text) {
  const shown = byId("banner");
  shown.hidden = !text;
  if (shown.textContent !== text) shown.textContent = text;
}

function age() {
  const since = (Date.now() - lastAt) / 1000;
  const live = since < 2.5 && document.body.dataset.state !== "unreachable";
  byId("age").textContent = !lastAt ? "" : live ? "live" : `last answer ${seconds(since)} ago`;
}

const THEMES = ["auto", "light", "dark"];
function theme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  byId("theme").textContent = `theme: ${name}`;
  byId("theme").dataset.name = name;
  heat.draw();
}
byId("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(byId("theme").dataset.name) + 1) % THEMES.length];
  localStorage.setItem("theme", next);
  theme(next);
});
theme(THEMES.includes(localStorage.getItem("theme")) ? localStorage.getItem("theme") : "auto");
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => heat.draw());
setInterval(age, 500);
poll();
