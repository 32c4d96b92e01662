// The live page: everything here is drawn from the API that clients use, with the key that is typed in.

const COLOURS = ["device", "host", "disk", "peer", "recomputed", "dropped"];
const SOURCES = {
  device: "on the device", host: "from host memory", disk: "from the disk", peer: "from another node",
  recomputed: "computed", dropped: "computed again",
};
const TERMS = {
  queue: "queue", compute: "compute", load: "load", late_load: "late loads", decode: "decodes beside", overhead: "overhead",
  batch: "larger batch", work: "work taken from others", move: "a session's move",
};
const $ = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const count = (value) => Math.round(value).toLocaleString("en");
const ms = (value) => value == null ? "" : value < 1000 ? `${value.toFixed(value < 10 ? 1 : 0)} ms` : `${(value / 1000).toFixed(2)} s`;
const seconds = (value) => value < 60 ? `${value.toFixed(0)} s` : value < 3600 ? `${(value / 60).toFixed(0)} min` : `${(value / 3600).toFixed(1)} h`;
const bytes = (value) => value < 1e6 ? `${(value / 1e3).toFixed(0)} kB` : value < 1e9 ? `${(value / 1e6).toFixed(0)} MB` : `${(value / 1e9).toFixed(1)} GB`;
const percent = (part, whole) => whole ? `${(100 * part / whole).toFixed(0)}%` : "";

let model = "";

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made[name] = value;
  }
  made.append(...children);
  return made;
}

function headers() {
  const key = sessionStorage.getItem("mneme-key");
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

async function ask(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: headers() });
  $("key-form").hidden = answer.status !== 401;
  if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error?.message ?? `status ${answer.status}`);
  return answer;
}

const json = async (path) => (await ask(path)).json();

function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// `columns`: [title, cell of a row (text or element), class]
function table(target, columns, rows) {
  const head = element("tr", {}, ...columns.map(([title, , kind]) => element("th", { class: kind ?? "" }, title)));
  const body = rows.map((row) => element("tr", {}, ...columns.map(([, cell, kind]) => element("td", { class: kind ?? "" }, cell(row)))));
  target.replaceChildren(element("thead", {}, head), element("tbody", {}, ...body));
}

function bar(parts, whole) {
  const made = element("div", { class: "bar" });
  for (const [name, value, colour] of parts) {
    if (!(value > 0)) continue;
    const part = element("i", { title: name });
    part.style.width = `${100 * value / whole}%`;
    part.style.background = colour;
    made.append(part);
  }
  return made;
}

function legend(parts) {
  return element("ul", { class: "legend" }, ...parts.map(([name, colour]) => {
    const mark = element("i");
    mark.style.background = colour;
    return element("li", {}, mark, name);
  }));
}

// ---- figures, tiers, replicas

let before = null;

function drawFigures(cluster, tiers) {
  const sum = (name) => cluster.replicas.reduce((total, each) => total + each[name], 0);
  const now = { at: performance.now(), generated: sum("generated_tokens") };
  const rate = before && now.at > before.at ? Math.max(now.generated - before.generated, 0) / (now.at - before.at) * 1000 : 0;
  before = now;
  const prompt = sum("prompt_tokens"), cached = sum("cached_tokens");
  const shown = [
    ["generated now", `${count(rate)} tokens/s`],
    ["running / waiting", `${sum("running")} / ${sum("waiting")}`],
    ["prompt tokens found", percent(cached, prompt) || "none yet"],
    [tiers.saved.since > midnight() ? `prefill saved since ${new Date(tiers.saved.since * 1000).toLocaleTimeString()}` : "prefill saved today", `${count(tiers.saved.tokens)} tokens`],
    ["generated since the start", `${count(sum("generated_tokens"))} tokens`],
  ];
  $("figures").replaceChildren(...shown.map(([name, value]) => element("div", {}, element("b", {}, value), element("span", {}, name))));
  const state = cluster.models.map((each) => `${each.model}: ${each.state}${each.reason ? ` (${each.reason})` : ""}, ${each.ready} ready`).join("; ");
  $("about").textContent = `${state}; ${[...new Set(cluster.replicas.map((each) => each.device ?? "?"))].join(", ")}`;
  model = cluster.models[0].model;
  table($("replicas"), [
    ["replica", (each) => each.replica], ["device", (each) => each.device ?? ""],
    ["running", (each) => `${each.running}`, "number"], ["waiting", (each) => `${each.waiting}`, "number"],
    ["backlog", (each) => each.backlog_s == null ? "" : ms(each.backlog_s * 1000), "number"],
    ["KV in use", (each) => percent(each.kv_usage, 1), "number"], ["found", (each) => percent(each.cached_tokens, each.prompt_tokens), "number"],
    ["heard of", (each) => `${each.age_s.toFixed(1)} s ago`, "number"],
  ], cluster.replicas);
  const amount = (each, value) => each.unit === "bytes" ? bytes(value) : `${count(value)} tokens`;
  $("tiers").replaceChildren(
    ...tiers.tiers.flatMap((each) => {
      const colour = css(kindOf(each));
      const whole = each.total || each.in_use + each.cached || 1;
      const label = `${each.replica ?? each.node}, ${each.tier}: ${amount(each, each.in_use + each.cached)} of ${each.total == null ? "no bound" : amount(each, each.total)}`;
      const used = bar([["in use", each.in_use, css("ink")], ["cached", each.cached, colour]], whole);
      return [element("div", {}, label), used];
    }),
  );
  $("sources").replaceChildren(sourceBar(tiers.prompt_tokens));
  flow.tiers = tiers.tiers;
  if (flow.samples.length && now.at - flow.samples.at(-1).at > 60_000) flow.samples = []; // a hidden tab asked for nothing
  flow.samples.push({ at: performance.now(), moved: tiers.moved_bytes });
  while (flow.samples.length > 2 && now.at - flow.samples[1].at > 60_000) flow.samples.shift();
  drawFlow();
}

const midnight = () => Math.floor(new Date().setHours(0, 0, 0, 0) / 1000);
const kindOf = ({ tier }) => tier.includes("disk") ? "disk" : tier === "device" ? "device" : "host";

// ---- the tiers as a flow: what each holds, and the bytes that went from one to another in the last minute

const flow = { tiers: [], samples: [] };
const TIERS = { device: "device", host: "host memory", disk: "disk", peers: "other nodes" };

// Places of the tiers, [x, y, width, height], and of the arrows, [x, y, x, y]: beside each other, or below.
function flowPlaces(width) {
  if (width >= 560) {
    const gap = 110, box = (width - 2 * gap) / 3, left = box + 5, right = 2 * box + gap + 5, long = gap - 10;
    return {
      height: 200,
      boxes: { device: [0, 30, box, 140], host: [box + gap, 0, box, 200], disk: [2 * (box + gap), 0, box, 92], peers: [2 * (box + gap), 108, box, 92] },
      arrows: {
        device_to_host: [left, 80, left + long, 80], host_to_device: [left + long, 140, left, 140], host_to_disk: [right, 34, right + long, 34],
        disk_to_host: [right + long, 78, right, 78], peers_to_host: [right + long, 162, right, 162],
      },
    };
  }
  const half = width / 2 - 6, at = (part) => part * width;
  return {
    height: 330,
    boxes: { device: [0, 0, width, 70], host: [0, 130, width, 70], disk: [0, 260, half, 70], peers: [width - half, 260, half, 70] },
    arrows: {
      device_to_host: [at(0.08), 74, at(0.08), 126], host_to_device: [at(0.56), 126, at(0.56), 74], host_to_disk: [at(0.03), 204, at(0.03), 256],
      disk_to_host: [at(0.33), 256, at(0.33), 204], peers_to_host: [at(0.66), 256, at(0.66), 204],
    },
  };
}

function drawFlow() {
  const first = flow.samples[0], last = flow.samples.at(-1), width = $("flow").clientWidth;
  if (!first || !width) return;
  const minutes = (last.at - first.at) / 60_000, { height, boxes, arrows } = flowPlaces(width);
  const rate = (name) => minutes ? Math.max(last.moved[name] - first.moved[name], 0) / minutes : 0; // what counted may be gone
  const largest = Math.max(...Object.keys(arrows).map(rate), 1), isUpright = width < 560, said = [];
  const text = (x, y, words, more = {}) => svg("text", { x, y, fill: css("ink"), "font-size": 13, ...more }, words);
  const drawn = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  for (const [kind, [x, y, wide, high]] of Object.entries(boxes)) {
    const own = flow.tiers.filter((each) => kindOf(each) === kind), sum = (value) => own.reduce((total, each) => total + value(each) * (each.token_bytes ?? 1), 0);
    const used = sum((each) => each.in_use + each.cached), whole = own.some((each) => each.total == null) ? null : sum((each) => each.total);
    const others = new Set(flow.tiers.map((each) => each.node).filter(Boolean)).size - 1;
    const words = kind === "peers" ? (others > 0 ? `${others}` : "none") : !own.length ? "none" : whole == null ? `${bytes(used)}, no bound` : `${bytes(used)} of ${bytes(whole)} (${percent(used, whole) || "0%"})`;
    const share = whole ? Math.min(used / whole, 1) : 0;
    drawn.append(
      svg("rect", { x: x + 0.5, y: y + 0.5, width: wide - 1, height: high - 1, rx: 6, fill: css("paper"), stroke: css("line") }),
      svg("rect", { class: "fill", x: x + 1, y: y + 1 + (high - 2) * (1 - share), width: wide - 2, height: (high - 2) * share, rx: 5, fill: css(kind === "peers" ? "peer" : kind), opacity: 0.4 }),
      text(x + 10, y + 24, TIERS[kind], { "font-weight": 600 }), text(x + 10, y + 44, words),
    );
    said.push(`${TIERS[kind]}: ${words}`);
  }
  for (const [name, [x, y, toX, toY]] of Object.entries(arrows)) {
    const now = rate(name), thick = now ? 2 + 10 * now / largest : 1, colour = css(now ? "link" : "line"), head = 4 + thick / 2;
    const [alongX, alongY] = [Math.sign(toX - x), Math.sign(toY - y)], backX = toX - alongX * head, backY = toY - alongY * head;
    drawn.append(
      svg("line", { x1: x, y1: y, x2: backX, y2: backY, stroke: colour, "stroke-width": thick }),
      svg("polygon", { points: `${toX},${toY} ${backX + alongY * head},${backY + alongX * head} ${backX - alongY * head},${backY - alongX * head}`, fill: colour }),
      isUpright ? text(x + 12, (y + toY) / 2 + 4, `${bytes(now)}/min`, { "font-size": 12 }) : text((x + toX) / 2, y - 12, `${bytes(now)}/min`, { "font-size": 12, "text-anchor": "middle" }),
    );
    const [from, to] = name.split("_to_");
    said.push(`from ${TIERS[from]} to ${TIERS[to]} ${bytes(now)} a minute`);
  }
  drawn.setAttribute("aria-label", said.join("; "));
  $("flow").replaceChildren(drawn);
}

function sourceBar(tokens) {
  const parts = COLOURS.map((name) => [name, tokens[name] ?? 0]).filter(([, value]) => value > 0);
  const whole = parts.reduce((total, [, value]) => total + value, 0) || 1;
  const drawn = bar(parts.map(([name, value]) => [SOURCES[name], value, css(name)]), whole);
  return element("div", {}, drawn, legend(parts.map(([name, value]) => [`${SOURCES[name]}: ${count(value)}`, css(name)])));
}

// ---- the prefix forest as an icicle

const forest = { trees: [], shown: null, boxes: [], root: -1 };
const ROW = 22, ROWS = 24, LEAST = 1; // pixels, rows, pixels: siblings that are narrower are drawn as one box

function drawForest() {
  const canvas = $("tree"), tree = forest.shown, began = performance.now();
  if (!tree) return;
  const runs = tree.runs, children = runs.map(() => []), tops = [], sizes = runs.map(() => 1);
  runs.forEach((run, index) => (run.parent < 0 ? tops : children[run.parent]).push(index));
  for (let index = runs.length - 1; index >= 0; index--) if (runs[index].parent >= 0) sizes[runs[index].parent] += sizes[index];
  const total = (indices, value) => indices.reduce((sum, index) => sum + value(index), 0);
  const first = forest.root >= 0 && forest.root < runs.length ? [forest.root] : tops;
  for (const each of children) each.sort((a, b) => runs[b].below - runs[a].below);
  first.sort((a, b) => runs[b].below - runs[a].below);
  const width = canvas.clientWidth, boxes = [];
  let depth = 1, together = 0, deeper = 0;
  const place = (indices, x, each, row) => {
    if (row === ROWS) deeper += total(indices, (index) => sizes[index]);
    else for (const [at, index] of indices.entries()) {
      const wide = runs[index].below * each;
      depth = Math.max(depth, row + 1);
      if (wide < LEAST) { // and all behind it, the largest stands first
        const merged = indices.slice(at), sum = (name) => total(merged, (one) => runs[one][name]);
        const run = { tokens: sum("tokens"), device: sum("device"), host: sum("host"), running: sum("running"), uses: Math.max(...merged.map((one) => runs[one].uses)) };
        const num = total(merged, (one) => sizes[one]);
        boxes.push({ index, run, num, x, row, wide: Math.max(sum("below") * each, LEAST) });
        together += num;
        return;
      }
      boxes.push({ index, run: runs[index], num: 1, x, row, wide });
      place(children[index], x, each, row + 1);
      x += wide;
    }
  };
  place(first, 0, width / (total(first, (index) => runs[index].below) || 1), 0);
  const ratio = devicePixelRatio || 1, high = depth * ROW;
  canvas.height = high * ratio;
  canvas.width = width * ratio;
  canvas.style.height = `${high}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  const ink = css("ink"), paper = css("paper"), colour = { device: css("device"), host: css("host"), none: css("dropped") };
  const most = Math.log(1 + runs.reduce((largest, run) => Math.max(largest, run.uses), 1));
  for (const { index, run, num, x, row, wide } of boxes) {
    const y = row * ROW, gap = wide > 3 ? 1 : 0;
    const missing = run.tokens - run.device - run.host;
    context.globalAlpha = 0.3 + 0.7 * Math.log(1 + run.uses) / most;
    let left = x;
    for (const [tokens, fill] of [[run.device, colour.device], [run.host, colour.host], [missing, colour.none]]) {
      if (tokens <= 0) continue;
      const part = (wide - gap) * tokens / Math.max(run.tokens, 1);
      context.fillStyle = fill;
      context.fillRect(left, y, part, ROW - 1);
      left += part;
    }
    context.globalAlpha = 1;
    if (wide > 24) {
      const marks = `${run.running ? "\u25B6" : ""}${run.pinned ? "\u25C6" : ""}${run.sessions ? "\u25CF" : ""}`;
      const text = num > 1 ? `+${num}` : `${marks} ${(tree.texts[index] ?? "").replace(/\s+/g, " ")}`.trim();
      context.save();
      context.beginPath();
      context.rect(x, y, wide - 3, ROW);
      context.clip();
      context.lineWidth = 3;
      context.strokeStyle = paper;
      context.strokeText(text, x + 4, y + ROW / 2);
      context.fillStyle = ink;
      context.fillText(text, x + 4, y + ROW / 2);
      context.restore();
    }
  }
  forest.boxes = boxes;
  $("tree-up").disabled = forest.root < 0;
  const alone = boxes.filter((box) => box.num === 1 && box.run === runs[box.index]).length;
  $("tree-size").textContent = [
    `${count(tree.num_tokens)} tokens in ${count(tree.num_runs)} runs${runs.length < tree.num_runs ? `, the ${count(runs.length)} largest shown` : ""}`,
    `${count(alone)} drawn one by one`, together && `${count(together)} too narrow and drawn together`, deeper && `${count(deeper)} below the last row`,
  ].filter(Boolean).join("; ");
  performance.clearMeasures("forest");
  performance.measure("forest", { start: began });
}

function describeRun({ index, run, num }) {
  if (run !== forest.shown.runs[index]) return `${count(num)} runs that are too narrow to be drawn one by one; their first ones have ${count(run.tokens)} tokens, used up to ${count(run.uses)} times`;
  const where = [[run.device, "on the device"], [run.host, "in host memory"], [run.tokens - run.device - run.host, "not kept"]];
  const places = where.filter(([tokens]) => tokens > 0).map(([tokens, name]) => `${count(tokens)} ${name}`).join(", ");
  const marks = [run.running && `${run.running} running`, run.pinned && "pinned", run.sessions && `${run.sessions} session(s) end here`, run.kind !== "prompt" && run.kind];
  return `${count(run.tokens)} tokens from position ${count(run.start)} (${places}); used ${count(run.uses)} times, ${run.running ? "now" : `last ${seconds(run.idle_s)} ago`}${marks.filter(Boolean).map((each) => `; ${each}`).join("")}`;
}

function boxAt(event) {
  const area = $("tree").getBoundingClientRect(), x = event.clientX - area.left, row = Math.floor((event.clientY - area.top) / ROW);
  return forest.boxes.find((each) => each.row === row && each.x <= x && x < each.x + each.wide);
}

function zoom(root) {
  forest.root = root;
  drawForest();
}

async function updateForest() {
  forest.trees = (await json("/v1/kv/tree?depth=60&max_runs=10000")).replicas;
  const select = $("tree-replica"), names = forest.trees.map((each) => each.replica);
  if ([...select.options].map((each) => each.value).join() !== names.join()) {
    select.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
  }
  const chosen = forest.trees.find((each) => each.replica === select.value) ?? forest.trees[0];
  if (forest.root >= 0 && forest.shown?.runs[forest.root]?.start !== chosen?.runs[forest.root]?.start) forest.root = -1;
  forest.shown = chosen ?? null;
  drawForest();
  if (!chosen) return;
  const largest = chosen.runs.map((run, index) => ({ ...run, index })).sort((a, b) => b.tokens - a.tokens).slice(0, 50);
  table($("tree-table"), [
    ["begins", (run) => chosen.texts[run.index] ?? "", "text"], ["position", (run) => count(run.start), "number"],
    ["tokens", (run) => count(run.tokens), "number"], ["device", (run) => count(run.device), "number"], ["host", (run) => count(run.host), "number"],
    ["uses", (run) => count(run.uses), "number"], ["idle", (run) => run.running ? "in use" : seconds(run.idle_s), "number"],
    ["marks", (run) => [run.pinned && "pinned", run.sessions && "session"].filter(Boolean).join(", ")],
  ], largest);
}

// ---- requests, explained

const requests = [];

function drawRequests() {
  table($("requests"), [
    ["request", (each) => element("button", { class: "plain", type: "button", onclick: () => explain(each) }, each.id.slice(0, 12))],
    ["ended", (each) => new Date(each.ended_at * 1000).toLocaleTimeString()], ["path", (each) => each.path],
    ["outcome", (each) => each.outcome], ["prompt", (each) => count(each.prompt_tokens), "number"],
    ["found", (each) => percent(each.prompt_tokens - each.kv_details.recomputed - each.kv_details.dropped, each.prompt_tokens), "number"],
    ["output", (each) => count(each.completion_tokens), "number"], ["first token", (each) => ms(each.first_token_ms), "number"],
    ["total", (each) => ms(each.total_ms), "number"], ["replica", (each) => each.replica ?? ""],
  ], requests);
}

function addRequest(request) {
  if (requests.some((each) => each.id === request.id)) return;
  requests.unshift(request);
  requests.length = Math.min(requests.length, 100);
  drawRequests();
}

async function explain(request) {
  const target = $("explained");
  let found;
  try {
    found = await json(`/v1/kv/explain/${encodeURIComponent(request.id)}`);
  } catch (error) {
    target.replaceChildren(element("p", {}, `${request.id}: ${error.message}`));
    return;
  }
  const parts = [element("h2", {}, `Request ${request.id}`)];
  for (const choice of found.choices) {
    const drawn = choice.ranges.map((each) => [`${each.start} to ${each.end}: ${SOURCES[each.source] ?? each.source}`, each.end - each.start, css(each.source)]);
    parts.push(
      element("p", { class: "hint" }, `Its prompt of ${count(choice.prompt_tokens)} tokens, from the first to the last, by where the KV came from (replica ${choice.replica}):`),
      bar(drawn, choice.prompt_tokens || 1),
      legend([...new Set(choice.ranges.map((each) => each.source))].map((name) => [`${SOURCES[name] ?? name}: ${count(choice.kv_details[name] ?? 0)}`, css(name)])),
    );
  }
  for (const route of found.routes) {
    const names = Object.keys(TERMS).filter((name) => route.candidates.some((each) => each.ms[name] > 0));
    const sum = (each) => names.reduce((total, name) => total + Math.max(each.ms[name] ?? 0, 0), 0);
    const largest = Math.max(...route.candidates.map(sum), 0.001);
    parts.push(element("p", { class: "hint" }, `The router chose ${route.replica} (${route.reason}). Its price of each replica:`));
    const colours = names.map((_, index) => css(COLOURS[index % COLOURS.length]));
    for (const each of route.candidates) {
      parts.push(element("div", {}, `${each.replica}: first token predicted after ${ms(each.ms.ttft)}, price ${ms(each.ms.total)}`));
      parts.push(bar(names.map((name, index) => [`${TERMS[name] ?? name}: ${ms(each.ms[name])}`, each.ms[name], colours[index]]), largest));
    }
    if (names.length) parts.push(legend(names.map((name, index) => [TERMS[name] ?? name, colours[index]])));
  }
  const actual = found.times?.tokens[0]?.[1] ?? request.first_token_ms, predicted = predictionOf(found.routes.at(-1));
  if (predicted != null && actual != null) {
    const compared = [["first token predicted after", predicted, css("soft")], ["first token came after", actual, css("device")]];
    parts.push(element("p", { class: "hint" }, "The router's prediction beside what came:"));
    for (const [name, value, colour] of compared) parts.push(element("div", {}, `${name} ${ms(value)}`), bar([[`${name} ${ms(value)}`, value, colour]], Math.max(predicted, actual)));
  } else if (!found.routes.length) parts.push(element("p", { class: "hint" }, "Nothing was predicted: no replica was chosen, or another ingress chose it."));
  target.replaceChildren(...parts, ...timeline(found.times, found.choices.filter((each) => each.choice === 0)));
}

const predictionOf = (route) => route?.candidates.find((each) => each.replica === route.replica)?.ms.ttft;

// When the first choice came how far: a strip from the whole request to the end of its answer, a piece for each time that is known.
function timeline(times, attempts) {
  if (!times?.tokens.length) return [element("p", { class: "hint" }, times ? "No token came." : "When its tokens came is known at the ingress that answered it.")];
  const { queued, begun, tokens, ended } = times, [, first] = tokens[0];
  const gaps = tokens.slice(1).map(([number, at], index) => ({ number, past: tokens[index][0], took: at - tokens[index][1] }));
  const each = ({ number, past, took }) => took / (number - past), sorted = gaps.map(each).sort((a, b) => a - b), usual = sorted[sorted.length >> 1];
  const isLong = (gap) => each(gap) > 4 * usual, longest = gaps.reduce((a, b) => a && a.took >= b.took ? a : b, null);
  const drawn = bar([
    ["before the engine took it", queued, css("soft")], ["queue", begun - queued, css("host")], ["prompt", first - begun, css("peer")],
    ...gaps.map((gap) => [`tokens ${gap.past + 1} to ${gap.number}: ${ms(gap.took)}`, gap.took, css(isLong(gap) ? "recomputed" : "device")]),
    ["the end", ended - tokens.at(-1)[1], css("dropped")],
  ], ended);
  drawn.classList.add("ticks");
  const marks = attempts.flatMap((attempt) => [
    ...(attempt.resumed_at ? [{ after: attempt.resumed_at, mark: "\u21B7", words: `went on at replica ${attempt.replica}` }] : []),
    ...attempt.suspended_at.map((after) => ({ after, mark: "\u2016", words: "gave way to earlier requests" })),
  ]);
  const line = element("div", { class: "marks" }, ...marks.map(({ after, mark, words }) => {
    const shown = element("span", { title: `${words} after token ${after}` }, mark);
    shown.style.left = `${100 * (tokens.findLast(([number]) => number <= after)?.[1] ?? begun) / ended}%`;
    return shown;
  }));
  const said = [
    `${count(tokens.at(-1)[0])} tokens in ${ms(ended)}`, usual != null && `${ms(usual)} between two (median)`,
    longest && `the longest gap ${ms(longest.took)} behind token ${longest.past}`, ...marks.map(({ after, words }) => `${words} after token ${after}`),
  ];
  const names = [["before the engine", "soft"], ["queue", "host"], ["prompt", "peer"], ["tokens", "device"], ["gaps of over 4 medians", "recomputed"], ["the end", "dropped"]];
  return [element("p", { class: "hint" }, `The first answer over time: ${said.filter(Boolean).join("; ")}.`), ...(marks.length ? [line] : []), drawn, legend(names.map(([name, colour]) => [name, css(colour)]))];
}

// ---- sessions, events

// Sessions with their place in the forest of forks: what goes on from one stands below it, and farther in where that is several.
function forks(sessions) {
  const byId = new Map(sessions.map((each) => [each.id, each])), below = new Map(), placed = new Set(), rows = [];
  const place = (each, depth, mark) => {
    if (placed.has(each.id)) return;
    placed.add(each.id);
    rows.push({ ...each, depth, mark });
    const next = below.get(each.id) ?? [];
    for (const child of next) place(child, depth + (next.length > 1), next.length > 1 ? "\u21B3" : "\u2193");
  };
  const top = (each, seen = new Set()) => { // a name may be used again, so that two come from each other
    seen.add(each.id);
    const before = byId.get(each.forked_from);
    return before && !seen.has(before.id) ? top(before, seen) : each;
  };
  for (const each of sessions) if (byId.has(each.forked_from)) below.set(each.forked_from, [...(below.get(each.forked_from) ?? []), each]);
  for (const first of sessions.map((each) => top(each))) place(first, 0, first.forked_from && !byId.has(first.forked_from) ? "\u2026" : "");
  return rows;
}

function sessionName({ id, depth, mark, forked_from }) {
  const name = element("span", { title: forked_from ? `goes on from ${forked_from}` : "" }, `${mark} ${id}`.trim());
  name.style.paddingLeft = `${depth * 1.2}em`;
  return name;
}

const placesOf = ({ kv }) => [["on the device", kv.device, css("device")], ["in host memory", kv.host, css("host")], ["not on this replica", kv.absent, css("dropped")]];

async function updateSessions() {
  const { data } = await json("/v1/sessions?limit=100");
  table($("sessions"), [
    ["session", sessionName], ["where its KV is", (each) => bar(placesOf(each), each.tokens - each.truncated || 1), "bars"], ["turns", (each) => `${each.turns}`, "number"], ["tokens", (each) => count(each.tokens), "number"],
    ["device", (each) => count(each.kv.device), "number"], ["host", (each) => count(each.kv.host), "number"], ["elsewhere", (each) => count(each.kv.absent), "number"],
    ["idle", (each) => each.answering ? "answering" : seconds(each.idle_s), "number"], ["replica", (each) => each.replica],
  ], forks(data));
}

function say(event) {
  const data = event.data;
  const text = {
    "request.ended": () => `request ${data.id.slice(0, 12)}: ${data.outcome}, ${count(data.completion_tokens)} tokens in ${ms(data.total_ms)}`,
    "replica.state": () => `${data.model}: ${data.state}${data.reason ? ` (${data.reason})` : ""}, ${data.ready} replicas ready`,
    "replica.came": () => `${data.model}: replica ${data.replica} has been started`,
    "replica.left": () => `${data.model}: replica ${data.replica} was drained, replaced or lost`,
    fault: () => `fault: ${Object.entries(data).map(([name, value]) => `${name.replaceAll("_", " ")} ${count(value)}`).join(", ")}`,
    "kv.moved": () => Object.entries(data).map(([name, value]) => `${name.replace("_", " ")}: ${count(value)}`).join(", "),
    lost: () => `${data.events} events were lost: this page was too slow`,
  }[event.type];
  if (event.type === "request.ended") addRequest(data);
  const list = $("events");
  const isFault = event.type === "fault" || event.type === "replica.left" || data.state === "failed" || data.state === "stalled";
  list.prepend(element("li", { class: isFault ? "fault" : "" }, element("time", {}, new Date(event.at * 1000).toLocaleTimeString()), text ? text() : event.type));
  while (list.children.length > 200) (list.querySelector("li:not(.fault):last-of-type") ?? list.lastChild).remove();
}

// Yields the data of server-sent events.
async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const pieces = (rest + value).split("\n\n");
    rest = pieces.pop();
    for (const piece of pieces) {
      const data = piece.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data) yield data;
    }
  }
}

async function listen() {
  for (;;) {
    const hidden = new AbortController(), hide = () => { if (document.hidden) hidden.abort(); };
    document.addEventListener("visibilitychange", hide);
    try {
      if (document.hidden) throw new Error("the tab is hidden");
      const known = await json("/v1/requests?last=100");
      known.data.reverse().forEach(addRequest);
      for await (const data of eventsOf(await ask("/v1/events", { signal: hidden.signal }))) say(JSON.parse(data));
    } catch (error) {
      if (!document.hidden) $("about").textContent = `not connected: ${error.message}`;
    } finally {
      hidden.abort();
      document.removeEventListener("visibilitychange", hide);
    }
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

// ---- chat

// `crypto.randomUUID` is there only on pages that came over TLS or from this machine.
const newSession = () => Array.from(crypto.getRandomValues(new Uint8Array(16)), (each) => each.toString(16).padStart(2, "0")).join("");

let session = newSession(), hasTurns = false;

function showSession() {
  $("chat-session").textContent = `session ${session.slice(0, 8)}`;
}

// What is said beside a question: texts between lines of dashes.
function documents() {
  return $("chat-documents").value.split(/^---+$/m).map((each) => each.trim()).filter(Boolean);
}

async function chat(event) {
  event.preventDefault();
  const content = $("chat-text").value.trim();
  if (!content) return;
  const given = documents(), beside = given.length > 0 && $("chat-beside").checked;
  $("chat-text").value = "";
  $("chat").append(element("p", { class: "said" }, element("b", {}, "you: "), content));
  const body = { model, messages: [{ role: "user", content }], stream: true, stream_options: { include_usage: true } };
  if (given.length) body.documents = given;
  if (!beside) {
    const answer = element("div", {});
    $("chat").append(answer);
    if (await sayInto(answer, model, { ...body, session: { id: session, append: hasTurns } })) hasTurns = true;
    $("chat-fork").disabled = !hasTurns;
    return;
  }
  const columns = element("div", { class: "columns" }, element("div", {}), element("div", {}));
  $("chat").append(columns);
  const modes = [[columns.children[0], "blend: selective", "selective"], [columns.children[1], "blend: off", "off"]];
  for (const [answer, title, mode] of modes) await sayInto(answer, title, { ...body, temperature: 0, blend: { mode } });
}

// Streams an answer, and says below it where its prompt's KV came from; returns whether it ended well.
async function sayInto(target, title, body) {
  const answer = element("p", { class: "said" }, element("b", {}, `${title}: `)), text = document.createTextNode("");
  answer.append(text);
  target.append(answer);
  const began = performance.now();
  let first = null, id = "", usage = null;
  try {
    for await (const data of eventsOf(await ask("/v1/chat/completions", { method: "POST", body: JSON.stringify(body) }))) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      id = chunk.id ?? id;
      usage = chunk.usage ?? usage;
      const piece = chunk.choices?.[0]?.delta?.content;
      if (piece) {
        first ??= performance.now() - began;
        text.data += piece;
      }
    }
  } catch (error) {
    answer.append(element("small", {}, error.message));
    return false;
  }
  const known = usage?.kv_details;
  answer.append(element("small", {}, `first token after ${ms(first)}; ${usage ? `${count(usage.prompt_tokens)} prompt tokens, ${count(usage.prompt_tokens_details.cached_tokens)} found` : ""} `,
    element("button", { class: "plain", type: "button", onclick: () => explain({ id: id.replace(/^chatcmpl-/, ""), first_token_ms: first }) }, "explain")));
  if (known) target.append(sourceBar(known));
  for (const each of known?.blend?.documents ?? []) {
    const places = [["exact", each.exact, css("device")], ["reused", each.reused, css("peer")], ["computed", each.tokens - each.exact - each.reused, css("recomputed")]];
    target.append(element("div", { class: "hint" }, `${each.id}: ${each.outcome}${each.why ? ` (${each.why})` : ""}`), bar(places, each.tokens), legend(places.filter(([, value]) => value > 0).map(([name, value, colour]) => [`${name}: ${count(value)}`, colour])));
  }
  return true;
}

// ---- begin

async function repeat(work, pauseMs) {
  for (;;) {
    const began = performance.now();
    if (!document.hidden) await work().catch((error) => { $("about").textContent = error.message; });
    const took = performance.now() - began; // a large answer may cost the server as long: 3% of its time at most
    await new Promise((resolve) => setTimeout(resolve, Math.max(pauseMs, Math.min(35 * took, 30_000))));
  }
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("mneme-key", $("key").value);
  $("key-form").hidden = true;
});
$("chat-form").addEventListener("submit", chat);
$("chat-text").addEventListener("keydown", (event) => { if (event.key === "Enter" && !event.shiftKey) chat(event); });
$("chat-new").addEventListener("click", () => {
  session = newSession();
  hasTurns = false;
  $("chat-fork").disabled = true;
  $("chat").replaceChildren();
  showSession();
});
$("chat-fork").addEventListener("click", async () => {
  try {
    session = (await (await ask(`/v1/sessions/${session}/fork`, { method: "POST", body: "{}" })).json()).id;
    $("chat").append(element("p", { class: "hint" }, "From here on it is another session with the same past."));
    showSession();
  } catch (error) {
    $("chat").append(element("p", { class: "hint" }, error.message));
  }
});
$("faults-alone").addEventListener("change", (event) => $("events").classList.toggle("faults", event.target.checked));
$("tree").addEventListener("mousemove", (event) => {
  const box = boxAt(event);
  $("tree-tip").textContent = box ? describeRun(box) : "\u00A0";
});
$("tree").addEventListener("click", (event) => {
  const box = boxAt(event), runs = forest.shown?.runs;
  if (box) zoom(box.run === runs[box.index] || runs[box.index].parent === forest.root ? box.index : runs[box.index].parent); // of narrow ones what they follow
});
$("tree").addEventListener("keydown", (event) => { if (event.key === "Escape") zoom(-1); });
$("tree-up").addEventListener("click", () => zoom(-1));
$("tree-replica").addEventListener("change", () => { forest.root = -1; updateForest(); });
for (const draw of [drawForest, drawFlow]) {
  addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}
$("sessions-legend").append(...legend(placesOf({ kv: {} }).map(([name, , colour]) => [name, colour])).children);
$("tree-legend").replaceWith(Object.assign(legend([["on the device", css("device")], ["in host memory only", css("host")], ["not kept", css("dropped")]]), { id: "tree-legend" }));
showSession();
drawRequests();
listen();
repeat(async () => drawFigures(await json("/v1/cluster"), await json(`/v1/kv/tiers?since=${midnight()}`)), 2000);
repeat(updateForest, 3000);
repeat(updateSessions, 4000);
