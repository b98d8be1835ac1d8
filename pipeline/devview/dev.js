// The Dev view: draws what /dev/events sends. Every text goes in through textContent; there is no figure of its own here.
"use strict";

const STATES = ["received", "validated", "image_fetched", "queued", "admitted", "prefilling", "decoding"];
const COUNTS = ["waiting", "running", "served", "refused", "errors", "timeouts", "abandoned"];
const ENDS_SHOWN = 6;

const $ = (id) => document.getElementById(id);
const short = (request) => request.name.slice(0, 8);
const calm = matchMedia("(prefers-reduced-motion: reduce)");

let view = null;       // the newest state
let arrived = 0;       // when it came, on this page's clock
let chosen = null;     // the request whose history is shown
const cards = new Map();

function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== "") element.textContent = text;
  return element;
}

function put(element, text) {
  if (element.textContent !== String(text)) element.textContent = text;
}

function duration(seconds) {
  if (!Number.isFinite(seconds)) return "";
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

function bytes(n) {
  if (!n) return "";
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = Math.min(units.length - 1, Math.floor(Math.log10(n) / 3));
  const value = n / 1000 ** power;
  return `${value.toFixed(value < 10 && power ? 2 : value < 100 && power ? 1 : 0)} ${units[power]}`;
}

const count = (n) => Number(n).toLocaleString("en").replaceAll(",", "\u202f");
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
const share = (done, total) => (total > 0 ? Math.min(100, (100 * done) / total) : 0);

// -- the lanes ---------------------------------------------------------------------------------------------------

const lanes = {};

function buildLanes() {
  for (const state of [...STATES, "finished"]) {
    const lane = make("div", `lane ${state}${state === "finished" ? " ends" : ""}`);
    const station = make("div", "station");
    station.append(make("span", "", state.replace("_", " ")), make("b"));
    const inside = make("div", "cards");
    lane.append(station, inside);
    lanes[state] = { lane, inside, number: station.lastChild };
    $("lanes").append(lane);
  }
}

function makeCard(request) {
  const card = make("button", "card");
  const who = make("div", "who");
  who.append(make("b"), make("span"));
  const bar = make("div", "bar");
  bar.append(make("i"));
  card.append(who, make("div", "what"), bar, make("div", "row"));
  card.onclick = () => choose(request.id);
  return card;
}

function says(request) {
  const prompt = request.prompt_tokens ? plural(request.prompt_tokens, "token") : "";
  if (request.state === "queued") return [`${request.position} in line`, prompt].filter(Boolean).join(" · ");
  if (request.state === "prefilling") return `${count(request.done)} of ${plural(request.total, "token")}${cached(request)}`;
  if (request.state === "guest") return `guest in slot 0 · ${plural(request.completion_tokens, "token")} · prompt ${prompt}`;
  if (request.state === "decoding") {
    const rate = request.tokens_s ? ` · ${request.tokens_s.toFixed(1)}/s` : "";
    const choice = request.choices > 1 ? `choice ${request.choice + 1} of ${request.choices} · ` : "";
    const thought = request.reasoning_tokens ? ` · ${count(request.reasoning_tokens)} thought` : "";
    const calls = request.calls ? ` · ${plural(request.calls, "call")}` : "";
    return `${choice}${plural(request.completion_tokens, "token")}${thought}${calls}${rate}`;
  }
  return prompt;
}

function cached(request) {
  return request.cached_tokens ? ` · ${count(request.cached_tokens)} cached (${request.source})` : "";
}

function drafted({ drafts }) {
  return drafts.drafted ? `, ${count(drafts.accepted)} of ${plural(drafts.drafted, "draft token")} taken in ${plural(drafts.rounds, "round")}` : "";
}

function stored({ entries, rows, bytes: size }) {
  return entries ? `${plural(rows, "row")} of ${plural(entries, "prompt")}${size ? `, ${bytes(size)}` : ""}` : "";
}

function progress(request) {
  if (request.state === "prefilling") return share(request.done, request.total);
  if (request.state === "decoding") return share(request.completion_tokens, request.max_tokens);
  return null;
}

function fillCard(card, request) {
  const [who, what, bar, row] = card.children;
  put(who.firstChild, short(request));
  put(who.lastChild, duration(request.age_s));
  card.title = `${request.route} ${request.name}, ${request.stream ? "streamed" : "whole"}`;
  put(what, says(request));
  const done = progress(request);
  bar.hidden = done === null;
  bar.firstChild.style.width = `${done ?? 0}%`;
  put(row, request.row);
  card.classList.toggle("on", request.id === chosen);
}

function drawLanes() {
  const before = new Map([...cards].map(([id, card]) => [id, card.getBoundingClientRect()]));
  const live = new Set(view.requests.map((request) => request.id));
  for (const [id, card] of cards) if (!live.has(id)) { card.remove(); cards.delete(id); }
  for (const state of STATES) {
    const here = view.requests.filter((request) => request.state === state || (state === "decoding" && request.state === "guest"));
    if (state === "queued") here.sort((a, b) => a.position - b.position);
    here.forEach((request, index) => {
      if (!cards.has(request.id)) cards.set(request.id, makeCard(request));
      const card = cards.get(request.id);
      fillCard(card, request);
      const inside = lanes[state].inside;
      if (inside.children[index] !== card) inside.insertBefore(card, inside.children[index] ?? null);
    });
    lanes[state].lane.classList.toggle("lit", here.length > 0);
    put(lanes[state].number, here.length || "");
  }
  // What is there when the page opens does not fly in.
  if (!calm.matches && document.body.classList.contains("moving")) for (const [id, card] of cards) glide(card, before.get(id));
}

function glide(card, from) {
  if (!from) { card.animate([{ opacity: 0, transform: "translateY(6px)" }, {}], { duration: 220, easing: "ease-out" }); return; }
  const to = card.getBoundingClientRect();
  const [dx, dy] = [from.left - to.left, from.top - to.top];
  if (Math.abs(dx) + Math.abs(dy) > 2) {
    card.animate([{ transform: `translate(${dx}px, ${dy}px)` }, {}], { duration: 380, easing: "cubic-bezier(.2,.8,.2,1)" });
  }
}

function tone(request) {
  if (request.state === "abandoned") return "away";
  if (request.outcome === "stop" || request.outcome === "tool_calls") return "good";
  return request.outcome === "length" ? "cut" : "bad";
}

const newest = () => [...view.recent].sort((a, b) => endOf(b) - endOf(a));
const endOf = (request) => (request.history.length ? request.history[request.history.length - 1][0] : 0);
const outcome = (request) => (request.state === "abandoned" ? "abandoned" : request.outcome || request.row);

function drawEnds() {
  const { lane, inside } = lanes.finished;
  const ends = newest();
  inside.replaceChildren(...ends.slice(0, ENDS_SHOWN).map((request) => {
    const end = make("button", `end ${tone(request)}`);
    end.append(make("span", "", `${short(request)} ${outcome(request)}`));
    end.title = `the row that ended it: ${request.row}`;
    end.classList.toggle("on", request.id === chosen);
    end.onclick = () => choose(request.id);
    return end;
  }));
  lane.classList.toggle("lit", ends.length > 0);
  put(lane.firstChild.firstChild, "finished, abandoned");
}

// -- the panels --------------------------------------------------------------------------------------------------

function drawCounts() {
  $("counts").replaceChildren(...COUNTS.filter((name) => name in view.counts).map((name) => {
    const item = make("li", view.counts[name] ? "" : "zero");
    item.append(make("b", "", count(view.counts[name])), make("span", "", name));
    return item;
  }));
}

function facts(list, pairs) {
  list.replaceChildren(...pairs.filter(([, value]) => value !== "" && value !== undefined && value !== null).map(([name, value]) => {
    const pair = make("div");
    pair.append(make("dt", "", name), make("dd", "", value));
    return pair;
  }));
}

function drawRefusal(last, times) {
  $("memory-error").hidden = !last;
  if (!last) return;
  put($("memory-error"), `Too little memory for ${short(last)}: its prompt needs ${bytes(last.workspace)} beside `
    + `${bytes(last.allocated)} allocated, ${bytes(last.reserved)} reserved. ${plural(times, "request")} refused so far.`);
}

function drawEngine() {
  const engine = view.engine;
  put($("model"), engine.model || "no model yet");
  document.title = `${engine.model || "TandemLLM"} · ${plural(view.requests.length, "request")}`;
  const pill = $("engine-state");
  pill.className = `pill ${engine.state}`;
  put(pill, engine.state === "starting" ? "loading" : engine.state);
  const loading = engine.state === "starting";
  $("load").hidden = !loading;
  const part = share(engine.load_done, engine.load_total);
  $("load").firstChild.firstChild.style.width = `${part}%`;
  put($("load").lastChild, engine.load_total
    ? `${bytes(engine.load_done)} of ${bytes(engine.load_total)} read, ${Math.floor(part)} %. Requests queue meanwhile.`
    : "The process starts. Requests queue meanwhile.");
  drawRefusal(view.memory.last_refused, view.memory.refused);
  const rate = (n) => (n ? `${count(Math.round(n))} tokens/s` : "");
  facts($("engine-facts"), [
    ["device", engine.device && `${engine.device}${engine.threads ? `, ${plural(engine.threads, "thread")}` : ""}`],
    ["computed by", engine.path],
    ["own work", engine.own_work.join(", ")],
    ["window", engine.window ? plural(engine.window, "row") : ""],
    ["weights", bytes(engine.weights_bytes)],
    ["KV cache", bytes(engine.kv_bytes)],
    ["state of a sequence", bytes(engine.state_bytes)],
    ["parked", stored(view.cache.park)],
    ["on disk", stored(view.cache.disk)],
    ["process", bytes(engine.rss_bytes)],
    ["memory", view.memory.allocated ? `${bytes(view.memory.allocated)} allocated, ${bytes(view.memory.reserved)} reserved` : ""],
    ["ceiling and peak", view.memory.ceiling ? `${bytes(view.memory.ceiling)}, ${bytes(view.memory.peak_limit)}` : ""],
    ["side lane", view.lane.offered ? `${count(view.lane.served)} served inside, ${count(view.lane.outgrown)} outgrown, ${count(view.lane.declined)} declined` : ""],
    ["loaded in", engine.load_s ? duration(engine.load_s) : ""],
    ["self-check", engine.selfcheck_ms ? duration(engine.selfcheck_ms / 1000) : ""],
    ["prefill at load", rate(engine.prefill_rate)],
    ["decode at load", rate(engine.decode_rate)],
    ["prefill step", engine.safe_rows ? plural(engine.safe_rows, "row") : ""],
    ["started", engine.epoch > 1 ? `${engine.epoch} times` : ""],
    ["server's lag", duration(view.lag_ms / 1000)],
    ["up", duration(view.uptime_s + (performance.now() - arrived) / 1000)],
  ]);
}

function drawSlots() {
  const byId = new Map(view.requests.map((request) => [request.id, request]));
  const kept = new Map(view.cache.slots.map(({ slot, rows }) => [slot, rows]));
  $("slots").replaceChildren(...view.slots.map((slot) => {
    const request = byId.get(slot.request);
    const reading = request && request.state !== "decoding";
    const box = make("div", `slot ${slot.state}${reading ? " reading" : ""}`);
    box.append(
      make("b", "", `slot ${slot.slot}`),
      make("span", "mono", request ? short(request) : slot.state === "ending" ? "its request is over" : ""),
      make("span", "", request ? request.state + (slot.state === "lent" ? ", a guest is inside" : "") : slot.state + (kept.get(slot.slot) ? `, keeps ${plural(kept.get(slot.slot), "row")}` : "")),
    );
    const done = request ? progress(request) : null;
    if (done !== null) {
      const bar = make("div", "bar");
      bar.append(make("i"));
      bar.firstChild.style.width = `${done}%`;
      box.append(bar);
    }
    return box;
  }));
}

function drawQueue() {
  const byId = new Map(view.requests.map((request) => [request.id, request]));
  const items = view.queue.map((id) => byId.get(id)).filter(Boolean).map((request, index) => {
    const item = make("li");
    item.append(
      make("span", "place", index + 1),
      make("span", "mono", short(request)),
      make("span", "tokens", `${plural(request.prompt_tokens, "token")} · ${duration(request.age_s)}`),
    );
    if (request.waits) item.append(make("span", "says", request.waits));
    if (request.line) item.append(make("span", "says", `: ${request.line}`));
    return item;
  });
  $("queue").replaceChildren(...(items.length ? items : [make("li", "empty", "Nobody waits.")]));
}

function choose(id) {
  chosen = chosen === id ? null : id;
  draw();
}

function drawStory() {
  const all = [...view.requests, ...newest()];
  const request = all.find((one) => one.id === chosen) ?? view.requests.find((one) => one.state === "decoding") ?? all[0];
  put($("story-of"), request ? `${short(request)}, ${request.route}, ${request.stream ? "streamed" : "whole"}` : "");
  if (!request) { $("story").replaceChildren(make("li", "empty", "No request yet. Send one to /v1/chat/completions.")); return; }
  // Times count from its arrival, which is its end or now less its age.
  const live = view.requests.includes(request);
  const start = (live ? view.now : endOf(request)) - request.age_s;
  $("story").replaceChildren(...request.history.map(([time, row]) => {
    const item = make("li");
    item.append(make("time", "", duration(Math.max(0, time - start))), make("code", "", row));
    return item;
  }));
}

function drawRecent() {
  const ends = newest();
  const longest = Math.max(1, ...ends.map((request) => request.total_ms));
  $("recent").replaceChildren(...(ends.length ? ends.map((request) => {
    const line = make("button", `done ${tone(request)}`);
    const stack = make("span", "stack");
    for (const [kind, ms, word] of [["q", request.queue_ms, "queue"], ["p", request.prompt_ms, "prefill"], ["d", request.decode_ms, "decode"]]) {
      if (!ms) continue;
      const part = make("i", kind);
      part.style.width = `${(100 * ms) / longest}%`;
      part.title = `${word} ${duration(ms / 1000)}`;
      stack.append(part);
    }
    line.append(
      make("span", "id", short(request)), make("span", "how", outcome(request)), stack,
      make("span", "num", duration(request.total_ms / 1000)),
      make("span", "num tok", `${count(request.prompt_tokens)} → ${count(request.completion_tokens)} tokens`),
      make("span", "num rate", request.tokens_s ? `${request.tokens_s.toFixed(1)} tok/s` : ""),
    );
    line.title = `${request.route} ${request.name}: ${request.row}${cached(request)}${drafted(request)}`;
    line.classList.toggle("on", request.id === chosen);
    line.onclick = () => choose(request.id);
    return line;
  }) : [make("p", "empty", "No request has ended yet.")]));
}

function drawSettings() {
  facts($("settings"), Object.entries(view.settings).map(([name, value]) => [
    `--${name.replaceAll("_", "-")}`, Array.isArray(value) ? value.join(", ") || "–" : value === "" ? "–" : String(value),
  ]));
}

// Rebuilding a list takes the focus from a button in it: only lists that changed are rebuilt.
const drawn = new Map();

function once(name, value, draw) {
  const key = JSON.stringify([value, chosen]);
  if (drawn.get(name) !== key) { drawn.set(name, key); draw(); }
}

function draw() {
  drawLanes();
  once("ends", view.recent, drawEnds);
  once("counts", view.counts, drawCounts);
  drawEngine();
  once("slots", [view.slots, view.requests, view.cache.slots], drawSlots);
  once("queue", [view.queue, view.requests], drawQueue);
  drawStory();
  once("recent", view.recent, drawRecent);
  once("settings", view.settings, drawSettings);
}

// -- the data ----------------------------------------------------------------------------------------------------

function take(text) {
  view = JSON.parse(text);
  arrived = performance.now();
  draw();
  setTimeout(() => document.body.classList.add("moving"), 100);
}

function status(word, className = "") {
  put($("link"), word);
  $("link").className = className;
}

async function snapshot() {
  const answer = await fetch("/dev/state");
  if (!answer.ok) throw new Error(String(answer.status));
  take(await answer.text());
}

async function poll() {
  try { await snapshot(); status("polling", "live"); } catch { status("no connection", "off"); }
  setTimeout(poll, 2000);
}

function listen() {
  const source = new EventSource("/dev/events");
  source.onmessage = (event) => { take(event.data); status("live", "live"); };
  source.onopen = () => status("live", "live");
  source.onerror = () => {
    status("no connection", "off");
    // Closed for good: four readers are there already, or the server said no. A snapshot now and then will do.
    if (source.readyState === EventSource.CLOSED) poll();
  };
}

buildLanes();
if (new URLSearchParams(location.search).has("snapshot")) snapshot().then(() => status("snapshot"));
else listen();
