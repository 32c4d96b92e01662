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
    ["prefill saved since the start", `${count(cached)} tokens`],
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
      const colour = css(each.tier.includes("disk") ? "disk" : each.tier === "device" ? "device" : "host");
      const whole = each.total || each.in_use + each.cached || 1;
      const label = `${each.replica ?? each.node}, ${each.tier}: ${amount(each, each.in_use + each.cached)} of ${each.total == null ? "no bound" : amount(each, each.total)}`;
      const used = bar([["in use", each.in_use, css("ink")], ["cached", each.cached, colour]], whole);
      return [element("div", {}, label), used];
    }),
    element("p", { class: "hint" }, "Where the KV of all prompts came from:"),
    sourceBar(tiers.prompt_tokens),
  );
}

function sourceBar(tokens) {
  const parts = COLOURS.map((name) => [name, tokens[name] ?? 0]).filter(([, value]) => value > 0);
  const whole = parts.reduce((total, [, value]) => total + value, 0) || 1;
  const drawn = bar(parts.map(([name, value]) => [SOURCES[name], value, css(name)]), whole);
  return element("div", {}, drawn, legend(parts.map(([name, value]) => [`${SOURCES[name]}: ${count(value)}`, css(name)])));
}

// ---- the prefix forest as an icicle

const forest = { trees: [], shown: null, boxes: [], root: -1 };
const ROW = 22;

function drawForest() {
  const canvas = $("tree"), tree = forest.shown;
  if (!tree) return;
  const runs = tree.runs, children = runs.map(() => []), tops = [];
  runs.forEach((run, index) => (run.parent < 0 ? tops : children[run.parent]).push(index));
  const first = forest.root >= 0 && forest.root < runs.length ? [forest.root] : tops;
  for (const each of children) each.sort((a, b) => runs[b].below - runs[a].below);
  first.sort((a, b) => runs[b].below - runs[a].below);
  const width = canvas.clientWidth, boxes = [];
  let depth = 1;
  const place = (indices, x, each, row) => {
    for (const index of indices) {
      const wide = runs[index].below * each;
      if (wide >= 0.5) {
        boxes.push({ index, x, row, wide });
        depth = Math.max(depth, row + 1);
        place(children[index], x, each, row + 1);
      }
      x += wide;
    }
  };
  const whole = first.reduce((total, index) => total + runs[index].below, 0) || 1;
  place(first, 0, width / whole, 0);
  const ratio = devicePixelRatio || 1, high = Math.min(depth, 24) * ROW;
  canvas.height = Math.max(high, ROW) * ratio;
  canvas.width = width * ratio;
  canvas.style.height = `${Math.max(high, ROW)}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  const ink = css("ink"), paper = css("paper"), colour = { device: css("device"), host: css("host"), none: css("dropped") };
  for (const { index, x, row, wide } of boxes) {
    const run = runs[index], y = row * ROW, gap = wide > 3 ? 1 : 0;
    const missing = run.tokens - run.device - run.host;
    context.globalAlpha = run.running ? 1 : Math.max(0.35, 0.95 - Math.log10(1 + run.idle_s) * 0.17);
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
      const text = `${marks} ${(tree.texts[index] ?? "").replace(/\s+/g, " ")}`.trim();
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
  $("tree-size").textContent = `${count(tree.num_tokens)} tokens in ${count(tree.num_runs)} runs${tree.runs.length < tree.num_runs ? `, the ${count(tree.runs.length)} largest shown` : ""}`;
}

function describeRun(index) {
  const tree = forest.shown, run = tree.runs[index];
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
  forest.trees = (await json("/v1/kv/tree?depth=60&max_runs=4000")).replicas;
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
    ["", (run) => [run.pinned && "pinned", run.sessions && "session"].filter(Boolean).join(", ")],
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
    parts.push(element("p", { class: "hint" }, `The router chose ${route.replica} (${route.reason}). Its price of each replica; the first token took ${ms(request.first_token_ms)}:`));
    const colours = names.map((_, index) => css(COLOURS[index % COLOURS.length]));
    for (const each of route.candidates) {
      parts.push(element("div", {}, `${each.replica}: first token predicted after ${ms(each.ms.ttft)}, price ${ms(each.ms.total)}`));
      parts.push(bar(names.map((name, index) => [`${TERMS[name] ?? name}: ${ms(each.ms[name])}`, each.ms[name], colours[index]]), largest));
    }
    if (names.length) parts.push(legend(names.map((name, index) => [TERMS[name] ?? name, colours[index]])));
  }
  target.replaceChildren(...parts);
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
    if (!document.hidden) await work().catch((error) => { $("about").textContent = error.message; });
    await new Promise((resolve) => setTimeout(resolve, pauseMs));
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
  $("tree-tip").textContent = box ? describeRun(box.index) : "\u00A0";
});
$("tree").addEventListener("click", (event) => { const box = boxAt(event); if (box) zoom(box.index); });
$("tree").addEventListener("keydown", (event) => { if (event.key === "Escape") zoom(-1); });
$("tree-up").addEventListener("click", () => zoom(-1));
$("tree-replica").addEventListener("change", () => { forest.root = -1; updateForest(); });
addEventListener("resize", drawForest);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawForest);
$("sessions-legend").append(...legend(placesOf({ kv: {} }).map(([name, , colour]) => [name, colour])).children);
$("tree-legend").replaceWith(Object.assign(legend([["on the device", css("device")], ["in host memory only", css("host")], ["not kept", css("dropped")]]), { id: "tree-legend" }));
showSession();
drawRequests();
listen();
repeat(async () => drawFigures(await json("/v1/cluster"), await json("/v1/kv/tiers")), 2000);
repeat(updateForest, 3000);
repeat(updateSessions, 4000);
