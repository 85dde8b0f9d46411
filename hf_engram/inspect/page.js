"use strict";
// Text reaches the page through textContent alone, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// --- Data -----------------------------------------------------------------------------------------------------------

function unpack({ type, data: text }) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new { float32: Float32Array, float64: Float64Array, uint32: Uint32Array }[type](bytes.buffer);
}

const tokens = unpack(data.tokens);
const compressed = unpack(data.compressed);
const piece = (position) => data.pieces[tokens[position]];
for (const model of data.models) {
  model.reach = unpack(model.reach);
  for (const layer of model.layers)
    for (const name of ["gates", "shares", "values", "parts", "rows"]) layer[name] = unpack(layer[name]);
}
const layerIds = [...new Set(data.models.flatMap((model) => model.layers.map((layer) => layer.id)))].sort((a, b) => a - b);
const mostCopies = Math.max(...data.models.map((model) => model.copies));
const layerOf = (model, id) => model.layers.find((layer) => layer.id === id);

// Of an n-gram size, the pieces that are hashed at a position: fewer than the size where look-back stops.
function ngram(model, position, size) {
  const length = Math.min(size, model.reach[position]);
  return Array.from({ length }, (_, index) => position + 1 - length + index);
}

// `copy` counts from 1; 0 is the mean of all.
function ofCopies(array, model, position, copy) {
  const own = array.subarray(position * model.copies, (position + 1) * model.copies);
  return copy ? own[copy - 1] : own.reduce((sum, value) => sum + value, 0) / own.length;
}

const percent = (value, digits = 0) => (Number.isFinite(value) ? `${(100 * value).toFixed(digits)} %` : "∞");
const measures = {
  gate: {
    label: "Gate",
    at: (model, layer, position, copy) => ofCopies(layer.gates, model, position, copy),
    show: (value) => value.toFixed(3),
    ticks: ["0 shut", "½", "1 open"],
    title: "the gate, from 0 to 1",
  },
  share: {
    label: "Share of the stream",
    at: (model, layer, position, copy) => ofCopies(layer.shares, model, position, copy),
    show: (value) => percent(value, 1),
    title: "the norm of what is written, over the norm of the stream afterwards",
  },
  value: {
    label: "Value norm",
    at: (model, layer, position) => layer.values[position],
    show: (value) => value.toPrecision(3),
    title: "the norm of the value, before the gate",
  },
};
// One scale for all layers and models, so that colours can be compared. A few outliers do not flatten the rest.
for (const [name, measure] of Object.entries(measures)) {
  if (name === "gate") continue;
  const values = data.models.flatMap((model) => model.layers.flatMap((layer) => [...layer[`${name}s`]]));
  const sorted = values.filter(Number.isFinite).sort((a, b) => a - b);
  measure.top = sorted[Math.floor(0.99 * (sorted.length - 1))] || 1;
  measure.ticks = ["0", measure.show(measure.top / 2), `${measure.show(measure.top)} and more`];
}

// Colour of a value: how strong, and on which side.
function shade(name, value) {
  if (Number.isNaN(value)) return [0, "open"];
  if (name === "gate") return [0.85 * Math.min(1, Math.abs(value - 0.5) / 0.45), value < 0.5 ? "shut" : "open"];
  return [0.85 * Math.min(1, value / measures[name].top), "open"];
}

// --- State, also in the address: #layer=3&copy=0&measure=gate&token=17&theme=dark ------------------------------------

const state = { layer: layerIds[0], copy: 0, measure: "gate", token: null };

function readAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  const number = (name) => (wanted.has(name) ? Number(wanted.get(name)) : NaN);
  if (layerIds.includes(number("layer"))) state.layer = number("layer");
  if (number("copy") >= 0 && number("copy") <= mostCopies) state.copy = Math.floor(number("copy"));
  if (Object.hasOwn(measures, wanted.get("measure"))) state.measure = wanted.get("measure");
  if (number("token") >= 0 && number("token") < tokens.length) state.token = Math.floor(number("token"));
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = { dark: "dark", light: "light" }[wanted.get("theme")] ?? (dark ? "dark" : "light");
}

function writeAddress() {
  const shown = new URLSearchParams({ layer: state.layer, copy: state.copy, measure: state.measure });
  if (state.token !== null) shown.set("token", state.token);
  history.replaceState(null, "", `#${shown}`);
}

// --- Text -----------------------------------------------------------------------------------------------------------

const MARKS = { "\n": "⏎", "\t": "⇥", "\r": "⟨cr⟩" };
// Control characters, and those that turn the direction of text around.
const INVISIBLE = /[\u0000-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]/;

// The nodes of a piece of text. Marks are style alone, so that white space is copied as it was.
function written(text, isChip = false) {
  const nodes = [];
  let plain = "";
  const mark = (shown, content) => {
    if (plain) nodes.push(plain);
    plain = "";
    const element = make("i", { textContent: content });
    element.dataset.mark = shown;
    nodes.push(element);
  };
  for (const character of text) {
    if (character === " " && isChip) mark("·", "");
    else if (MARKS[character]) mark(MARKS[character], isChip ? "" : character);
    else if (INVISIBLE.test(character)) mark(`⟨${character.codePointAt(0).toString(16).padStart(4, "0")}⟩`, "");
    else plain += character;
  }
  if (plain) nodes.push(plain);
  return nodes;
}

function chips(model, position, size) {
  const places = ngram(model, position, size);
  const gram = make("span", { className: "gram" });
  if (places.length < size) gram.append(make("span", { className: "none", textContent: "nothing before" }));
  gram.append(...places.map((place) => make("span", {}, ...written(piece(place), true))));
  return gram;
}

// --- Panels ---------------------------------------------------------------------------------------------------------

const panels = data.models.map((model) => {
  const starts = new Set(model.windows.slice(1));
  const spans = Array.from(tokens, (_, position) => {
    const span = make("span", { className: "t", tabIndex: -1 }, ...written(piece(position)));
    span.dataset.token = position;
    if (!model.reach[position]) span.classList.add("dead");
    return span;
  });
  if (spans.length) spans[0].tabIndex = 0;
  const text = make("div", { className: "text" });
  text.setAttribute("role", "group");
  text.setAttribute("aria-label", `The text, as ${model.name} reads it`);
  spans.forEach((span, position) => {
    if (starts.has(position)) text.append(make("span", { className: "anew", textContent: "The model reads no more at once: here it begins anew." }));
    text.append(span);
  });
  if (data.cut)
    text.append(make("span", { className: "anew", textContent: `${data.cut.toLocaleString("en")} more tokens were left out.` }));
  const facts = make("div", { className: "facts" });
  const absent = make("p", { className: "text absent", hidden: true });
  const top = make("aside", { className: "top" });
  const element = make("section", { className: "panel" }, facts, absent, text, top);
  element.setAttribute("aria-label", model.name);
  byId("panels").append(element);
  return { model, spans, text, facts, absent, top };
});
byId("panels").classList.toggle("pair", panels.length > 1);

function fact(label, value) {
  return make("span", {}, `${label} `, make("b", { textContent: value }));
}

function paint() {
  const measure = measures[state.measure];
  for (const panel of panels) {
    const { model } = panel;
    const layer = layerOf(model, state.layer);
    const missing = !layer
      ? `${model.name} has no Engram layer ${state.layer}.`
      : state.copy > model.copies ? `${model.name} has no copy ${state.copy - 1} of the stream.` : null;
    panel.absent.hidden = missing === null;
    panel.absent.textContent = missing ?? "";
    panel.text.hidden = panel.top.hidden = missing !== null;
    panel.facts.replaceChildren(make("h2", { textContent: model.name }));
    if (missing) continue;

    const values = panel.spans.map((_, position) => measure.at(model, layer, position, state.copy));
    panel.spans.forEach((span, position) => {
      const [alpha, side] = shade(state.measure, values[position]);
      span.style.setProperty("--a", alpha.toFixed(3));
      span.dataset.side = side;
    });
    paintFacts(panel, layer);
    paintTop(panel, layer, values);
  }
  paintScale();
}

function paintFacts(panel, layer) {
  const { model } = panel;
  const live = [...panel.spans.keys()].filter((position) => model.reach[position]);
  const mean = (name) => live.reduce((sum, position) => sum + measures[name].at(model, layer, position, state.copy), 0) / live.length;
  const open = live.filter((position) => measures.gate.at(model, layer, position, state.copy) > 0.5).length / live.length;
  panel.facts.append(
    fact("mean gate", mean("gate").toFixed(3)),
    fact("above ½ at", percent(open)),
    fact("mean share of the stream", percent(mean("share"))),
  );
  if (model.ablation) {
    const { loss, without_layer: without, without_memory: none } = model.ablation;
    const worth = (other) => `${other.toFixed(3)} (${other < loss ? "−" : "+"}${Math.abs(other - loss).toFixed(3)})`;
    panel.facts.append(fact("loss", loss.toFixed(3)), fact(`without layer ${layer.id}`, worth(without[layer.id])),
      fact("without memory", worth(none)));
  }
}

// The n-gram size whose rows make up most of the value at a position; null where nothing is written.
function writerAt(model, layer, position) {
  const own = [...layer.parts.subarray(position * model.sizes.length, (position + 1) * model.sizes.length)];
  return own.every((part) => part === 0) ? null : model.sizes[own.indexOf(Math.max(...own))];
}

function paintTop(panel, layer, values) {
  const { model } = panel;
  const measure = measures[state.measure];
  const grams = new Map();
  values.forEach((value, position) => {
    const size = writerAt(model, layer, position);
    if (size === null || Number.isNaN(value)) return;
    const key = `${size}:${ngram(model, position, size).map((place) => compressed[place])}`;
    const gram = grams.get(key) ?? { size, position, sum: 0, count: 0 };
    gram.sum += value;
    gram.count += 1;
    grams.set(key, gram);
  });
  const ranked = [...grams.values()].sort((a, b) => b.sum / b.count - a.sum / a.count).slice(0, 18);
  const items = ranked.map((gram) => {
    const count = make("span", { className: "count", textContent: gram.count > 1 ? `×${gram.count}` : "" });
    const value = make("span", { className: "value", textContent: measure.show(gram.sum / gram.count) });
    const button = make("button", { type: "button" }, chips(model, gram.position, gram.size), count, value);
    button.addEventListener("click", (event) => {
      event.stopPropagation();
      panel.spans[gram.position].scrollIntoView({ block: "center" });
      pin(gram.position, panel);
    });
    return make("li", {}, button);
  });
  panel.top.replaceChildren(make("h3", { textContent: `N-grams with the highest ${measure.label.toLowerCase()}` }), make("ol", {}, ...items));
}

function paintScale() {
  const measure = measures[state.measure];
  const color = (alpha, side) => `rgb(var(--${side}) / ${alpha})`;
  const stops = state.measure === "gate"
    ? [color(0.85, "shut"), `${color(0.85, "shut")} 5%`, `${color(0, "shut")} 50%`, `${color(0, "open")} 50%`, `${color(0.85, "open")} 95%`, color(0.85, "open")]
    : [color(0, "open"), color(0.85, "open")];
  byId("scale").setAttribute("aria-label", `Colours: ${measure.title}`);
  byId("scale").title = measure.title;
  byId("scale").querySelector(".bar").style.background = `linear-gradient(90deg, ${stops.join(", ")}), var(--surface)`;
  byId("scale").querySelector(".ticks").replaceChildren(...measure.ticks.map((tick) => make("span", { textContent: tick })));
}

// --- Controls -------------------------------------------------------------------------------------------------------

function choices(fieldset, name, options, change) {
  for (const [value, label] of options) {
    const input = make("input", { type: "radio", name, value, checked: String(state[name]) === String(value) });
    input.addEventListener("change", () => { change(value); paint(); writeAddress(); if (shown) show(shown.position, shown.panel); });
    byId(fieldset).append(make("label", {}, input, label));
  }
}

function buildControls() {
  choices("layers", "layer", layerIds.map((id) => [id, String(id)]), (value) => { state.layer = value; });
  const copies = Array.from({ length: mostCopies }, (_, index) => [index + 1, String(index)]);
  choices("copies", "copy", [[0, "mean"], ...copies], (value) => { state.copy = value; });
  byId("copies").hidden = mostCopies < 2;
  choices("measures", "measure", Object.entries(measures).map(([name, { label }]) => [name, label]), (value) => { state.measure = value; });
  byId("about").textContent = `${data.models.map((model) => model.name).join(" and ")} · ${tokens.length.toLocaleString("en")} tokens`;
  byId("theme").addEventListener("click", () => {
    const root = document.documentElement;
    root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  });
}

// --- Card -----------------------------------------------------------------------------------------------------------

const card = byId("card");
let shown = null;

function meter(value, kind) {
  const bar = make("span", { className: kind });
  bar.style.width = `${100 * Math.max(0, Math.min(1, value))}%`;
  return make("div", { className: "meter" }, bar);
}

function side(panel, position) {
  const { model } = panel;
  const layer = layerOf(model, state.layer);
  const box = make("div", { className: "side" });
  if (panels.length > 1) box.append(make("h4", { textContent: model.name }));
  if (!layer) return box.append(`no Engram layer ${state.layer}`), box;
  if (!model.reach[position]) return box.append("Not text to the memory: it neither reads nor writes here."), box;
  const list = make("dl");
  const row = (name, fill, kind, value) =>
    list.append(make("dt", { textContent: name }), meter(fill, kind), make("dd", { textContent: value }));
  for (let copy = 1; copy <= model.copies; copy++) {
    const gate = measures.gate.at(model, layer, position, copy);
    row(model.copies > 1 ? `gate, copy ${copy - 1}` : "gate", gate, gate < 0.5 ? "shut" : "open", measures.gate.show(gate));
  }
  for (const name of ["share", "value"]) {
    const value = measures[name].at(model, layer, position, state.copy);
    row(name === "share" ? "share of stream" : "value norm", value / (name === "share" ? 1 : measures.value.top), "plain", measures[name].show(value));
  }
  const writer = writerAt(model, layer, position);
  const grams = make("ul", { className: "grams" });
  model.sizes.forEach((size, index) => {
    const part = layer.parts[position * model.sizes.length + index];
    const columns = model.sizes.length * model.heads;
    const rows = layer.rows.subarray(position * columns + index * model.heads, position * columns + (index + 1) * model.heads);
    const line = make("div", { className: "line" }, chips(model, position, size),
      make("span", { className: "part", textContent: writer === null ? "nothing written" : `${percent(part)} of the value` }));
    const item = make("li", { className: size === writer ? "writer" : "" }, line,
      make("div", { className: "rows", textContent: `rows ${[...rows].join(" ")}` }));
    item.dataset.size = size;
    grams.append(item);
  });
  box.append(list, grams);
  return box;
}

// The tokens that are marked. There are thousands of others.
let marked = [];

function mark(span, kind) {
  span.classList.add(kind);
  marked.push(span);
}

function clearMarks() {
  for (const span of marked) span.classList.remove("here", "same");
  marked = [];
}

function show(position, panel) {
  shown = { position, panel };
  clearMarks();
  for (const { model, spans } of panels) {
    mark(spans[position], "here");
    const largest = model.sizes[model.sizes.length - 1];
    for (const place of ngram(model, position, largest)) if (place !== position) mark(spans[place], "same");
  }
  const own = make("span", { className: "gram" }, make("span", {}, ...written(piece(position), true)));
  card.replaceChildren(
    make("div", { className: "head" }, own, `token ${position.toLocaleString("en")} · layer ${state.layer}`),
    make("div", { className: "sides" }, ...panels.map((each) => side(each, position))),
  );
  card.classList.toggle("pair", panels.length > 1);
  card.classList.toggle("pinned", state.token !== null);
  card.hidden = false;
  place(panel.spans[position]);
}

// Below the token if there is room, else above; within the window.
function place(span) {
  if (!span.offsetParent) return;
  const boxes = span.getClientRects();
  const box = boxes[boxes.length - 1];
  const { width, height } = card.getBoundingClientRect();
  const below = box.bottom + 8;
  const fits = below + height < innerHeight || box.top < height + 16;
  const left = Math.max(8, Math.min(box.left, innerWidth - width - 8));
  const top = Math.max(8, Math.min(fits ? below : box.top - height - 8, innerHeight - height - 8));
  card.style.left = `${left}px`;
  card.style.top = `${top}px`;
}

function hide() {
  shown = null;
  card.hidden = true;
  clearMarks();
}

function pin(position, panel) {
  state.token = position;
  for (const { text, spans } of panels) {
    text.querySelector('.t[tabindex="0"]').tabIndex = -1;
    spans[position].tabIndex = 0;
  }
  show(position, panel);
  writeAddress();
}

function unpin() {
  state.token = null;
  hide();
  writeAddress();
}

// The nearest token on the line above or below.
function onNextLine(spans, position, step) {
  const { top, left } = spans[position].getBoundingClientRect();
  const line = (index) => spans[index].getBoundingClientRect();
  let index = position + step;
  while (spans[index] && (step < 0 ? line(index).top >= top : line(index).top <= top)) index += step;
  if (!spans[index]) return position;
  const target = line(index).top;
  let best = index;
  for (; spans[index] && line(index).top === target; index += step)
    if (Math.abs(line(index).left - left) < Math.abs(line(best).left - left)) best = index;
  return best;
}

function listen(panel) {
  const { text, spans } = panel;
  const at = (event) => {
    const span = event.target.closest?.(".t");
    return span ? Number(span.dataset.token) : null;
  };
  text.addEventListener("pointerover", (event) => {
    const position = at(event);
    if (position !== null && state.token === null && event.pointerType !== "touch") show(position, panel);
  });
  text.addEventListener("pointerleave", () => { if (state.token === null) hide(); });
  text.addEventListener("click", (event) => {
    const position = at(event);
    if (position === null || String(getSelection())) return;
    event.stopPropagation();
    if (state.token === position) unpin();
    else pin(position, panel);
  });
  text.addEventListener("focusin", (event) => {
    const position = at(event);
    if (position !== null && event.target.matches(":focus-visible")) {
      if (state.token === null) show(position, panel);
    }
  });
  text.addEventListener("focusout", () => { if (state.token === null) hide(); });
  text.addEventListener("keydown", (event) => {
    const position = at(event);
    if (position === null) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      if (state.token === position) unpin();
      else pin(position, panel);
      return;
    }
    const next = {
      ArrowLeft: () => position - 1,
      ArrowRight: () => position + 1,
      ArrowUp: () => onNextLine(spans, position, -1),
      ArrowDown: () => onNextLine(spans, position, 1),
      Home: () => 0,
      End: () => spans.length - 1,
    }[event.key]?.();
    if (next === undefined || !spans[next]) return;
    event.preventDefault();
    const wasPinned = state.token !== null;
    state.token = null;
    text.querySelector('.t[tabindex="0"]').tabIndex = -1;
    spans[next].tabIndex = 0;
    spans[next].focus();
    if (wasPinned) pin(next, panel);
    else show(next, panel);
  });
}

readAddress();
buildControls();
panels.forEach(listen);
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && shown) unpin(); });
document.addEventListener("click", (event) => {
  if (state.token !== null && !card.contains(event.target) && !byId("controls").contains(event.target) && event.target.id !== "theme") unpin();
});
for (const event of ["scroll", "resize"])
  addEventListener(event, () => { if (shown) place(shown.panel.spans[shown.position]); }, { passive: true });
paint();
if (state.token !== null) {
  panels[0].spans[state.token].scrollIntoView({ block: "nearest" });
  show(state.token, panels[0]);
}
