"use strict";
// Draws both graphs from the data in the page, and shows what is clicked: a region, a node, a miss. The address's
// fragment (#region-3, #node-NAME, #misses) names what is shown, so that a view can be linked to.
const { report, before, after, kernels } = JSON.parse(document.getElementById("data").textContent);
const KINDS = ["attention", "contraction", "row", "scan"];
const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 24, LAYER = 46;
const byId = (id) => document.getElementById(id);
const kindOf = (kind) => (KINDS.includes(kind) ? kind : "other");
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const missed = new Map(report.misses.map((miss, index) => [miss.node, index]));

// An element with attributes, listeners ("onclick") and children; strings become text, never markup.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  if (element.classList.contains("link")) { // also for those who have no mouse
    element.tabIndex = 0;
    element.setAttribute("role", element.tagName === "TR" ? "row" : "link");
    element.addEventListener("keydown", (event) => { if (event.key === "Enter") element.click(); });
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function draw(tag, attributes, parent) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  parent.append(element);
  return element;
}

// -- one graph --------------------------------------------------------------------------------------------------------

class Graph {
  constructor(section, title, data) {
    this.data = data;
    this.zoom = 1;
    this.view = make("div", { class: "view", tabindex: "0" });
    this.canvas = make("canvas");
    this.frame = make("div");
    this.map = make("div", { class: "map", title: "the whole graph" }, this.canvas, this.frame);
    section.append(
      make("div", { class: "bar-top" }, make("b", {}, title),
        make("button", { title: "smaller", onclick: () => this.scale(this.zoom / 1.25) }, "−"),
        make("button", { title: "larger", onclick: () => this.scale(this.zoom * 1.25) }, "+"),
        make("button", { title: "the whole width", onclick: () => this.fit() }, "fit")),
      make("div", { class: "body" }, this.view, this.map));
    this.svg = draw("svg", { viewBox: `0 0 ${data.width} ${data.height}` }, this.view);
    this.stubs = new Map();
    const lines = draw("g", {}, this.svg), boxes = draw("g", {}, this.svg); // boxes cover the ends of lines
    this.edges = this.drawEdges(lines);
    this.boxes = this.drawBoxes(boxes);
    this.drawStubs();
    this.listen();
  }

  drawEdges(parent) {
    return this.data.edges.map(([, , , points]) => {
      if (points === null) return null; // a stub
      const corners = [];
      for (let i = 0; i < points.length; i += 2) corners.push([points[i], points[i + 1]]);
      corners[0][1] += HEIGHT / 2;
      corners[corners.length - 1][1] -= HEIGHT / 2;
      let path = `M${corners[0]}`;
      for (let i = 1; i < corners.length; i++) {
        const [x0, y0] = corners[i - 1], [x1, y1] = corners[i], middle = (y0 + y1) / 2;
        path += `C${x0},${middle} ${x1},${middle} ${x1},${y1}`;
      }
      return draw("path", { d: path, class: "edge" }, parent);
    });
  }

  drawStubs() {
    for (const [source, target, name, points] of this.data.edges) {
      if (points === null) this.drawStub(source, target, name);
    }
  }

  // An edge that spans many layers: a mark at the reader's corner, which names the value and leads to its maker.
  drawStub(source, target, name) {
    const [x, y, width] = this.data.boxes[target];
    const count = this.stubs.get(target) ?? 0;
    this.stubs.set(target, count + 1);
    const at = x + width / 2 - 4 - 12 * count;
    if (at < x - width / 2) return; // no room for more; the node's details list all of its inputs
    const group = draw("g", { class: "stub" }, this.svg);
    draw("circle", { cx: at, cy: y - HEIGHT / 2 - 1, r: 6 }, group);
    draw("path", { d: `M${at},${y - HEIGHT / 2 + 2.5}v-6m-2.5,2.5l2.5,-2.5l2.5,2.5` }, group);
    draw("title", {}, group).textContent = `reads ${name}, made further up: click to go there`;
    group.addEventListener("click", () => this.show([source]));
  }

  drawBoxes(parent) {
    return this.data.boxes.map(([x, y, width, label, name, kind, region], index) => {
      const classes = ["box", kind];
      if (region !== null) classes.push("region", kindOf(report.regions[region].kind));
      if (missed.has(name) && region === null) classes.push("miss");
      const group = draw("g", { class: classes.join(" "), "data-index": index }, parent);
      const round = kind === "input" || kind === "output" ? HEIGHT / 2 : 5;
      draw("rect", { x: x - width / 2, y: y - HEIGHT / 2, width, height: HEIGHT, rx: round }, group);
      draw("text", { x, y: y + 4 }, group).textContent = label;
      draw("title", {}, group).textContent = name;
      return group;
    });
  }

  listen() {
    let from = null, moved = false;
    this.view.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      from = [event.clientX + this.view.scrollLeft, event.clientY + this.view.scrollTop];
      moved = false;
    });
    window.addEventListener("pointermove", (event) => {
      if (from === null) return;
      const left = from[0] - event.clientX, top = from[1] - event.clientY;
      moved ||= Math.hypot(left - this.view.scrollLeft, top - this.view.scrollTop) > 4;
      if (!moved) return;
      this.view.classList.add("drag");
      this.view.scrollTo(left, top);
    });
    window.addEventListener("pointerup", () => { from = null; this.view.classList.remove("drag"); });
    this.view.addEventListener("click", (event) => {
      const box = event.target.closest(".box");
      if (box && !moved) choose(this, Number(box.dataset.index));
    });
    this.view.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.scale(this.zoom * Math.exp(-event.deltaY / 300), event.clientX, event.clientY);
    }, { passive: false });
    this.view.addEventListener("scroll", () => this.mark());
    this.map.addEventListener("pointerdown", (event) => {
      const place = (event.clientY - this.map.getBoundingClientRect().top) / this.map.clientHeight;
      this.view.scrollTop = place * this.data.height * this.zoom - this.view.clientHeight / 2;
    });
  }

  // Zoom so that the point at (x, y) of the window, by default the middle of the view, stays where it is.
  scale(zoom, x = null, y = null) {
    const area = this.view.getBoundingClientRect();
    const dx = x === null ? area.width / 2 : x - area.left, dy = y === null ? area.height / 2 : y - area.top;
    const px = (this.view.scrollLeft + dx) / this.zoom, py = (this.view.scrollTop + dy) / this.zoom;
    this.zoom = Math.min(3, Math.max(0.05, zoom));
    this.svg.setAttribute("width", this.data.width * this.zoom);
    this.svg.setAttribute("height", this.data.height * this.zoom);
    this.svg.style.marginLeft = `${Math.max(0, (area.width - this.data.width * this.zoom) / 2)}px`;
    this.view.scrollTo(px * this.zoom - dx, py * this.zoom - dy);
    this.paint();
  }

  fit() {
    this.scale(Math.min(1.25, this.view.clientWidth / this.data.width));
  }

  // The strip at the side: one line per layer that a region takes part in, in its colour.
  paint() {
    const { clientWidth: width, clientHeight: height } = this.map;
    this.canvas.width = width;
    this.canvas.height = height;
    const pen = this.canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    const thick = Math.max(1, (height * LAYER) / this.data.height);
    for (const [, y, , , name, , region] of this.data.boxes) {
      const miss = region === null && missed.has(name);
      if (region === null && !miss) continue;
      pen.fillStyle = style.getPropertyValue(miss ? "--miss" : `--${kindOf(report.regions[region].kind)}`);
      pen.fillRect(2, ((y - LAYER / 2) / this.data.height) * height, width - 4, thick);
    }
    this.mark();
  }

  mark() {
    const total = this.data.height * this.zoom, height = this.map.clientHeight;
    this.frame.style.top = `${(this.view.scrollTop / total) * height}px`;
    this.frame.style.height = `${Math.min(1, this.view.clientHeight / total) * height}px`;
  }

  // Highlight boxes and the edges between them, and scroll to them.
  show(indices, scroll = true) {
    const wanted = new Set(indices);
    this.svg.classList.toggle("faded", wanted.size > 0);
    this.boxes.forEach((box, index) => box.classList.toggle("chosen", wanted.has(index)));
    this.data.edges.forEach(([source, target], index) =>
      this.edges[index]?.classList.toggle("chosen", wanted.has(source) && wanted.has(target)));
    if (!scroll || wanted.size === 0) return;
    const points = indices.map((index) => this.data.boxes[index]).sort((a, b) => a[1] - b[1]);
    const [top, bottom] = [points[0][1], points.at(-1)[1]], xs = points.map((box) => box[0]);
    const tall = (bottom - top) * this.zoom > this.view.clientHeight - 60; // then its first node is shown
    const wide = (Math.max(...xs) - Math.min(...xs)) * this.zoom > this.view.clientWidth - 120;
    const x = tall || wide ? points[0][0] : (Math.max(...xs) + Math.min(...xs)) / 2;
    const y = tall ? top + (this.view.clientHeight / 2 - 40) / this.zoom : (top + bottom) / 2;
    this.view.scrollTo(x * this.zoom - this.view.clientWidth / 2, y * this.zoom - this.view.clientHeight / 2);
  }

  inRegion(region) {
    return this.data.boxes.flatMap((box, index) => (box[6] === region ? [index] : []));
  }

  named(name) {
    return this.data.boxes.flatMap((box, index) => (box[4] === name ? [index] : []));
  }
}

// -- what is chosen ---------------------------------------------------------------------------------------------------

function choose(graph, index) {
  const [, , , , name, , region] = graph.data.boxes[index];
  if (region !== null) go(`region-${region}`, graph);
  else if (missed.has(name)) go(`miss-${missed.get(name)}`, graph);
  else {
    for (const other of graphs) other.show(other === graph ? [index] : other.named(name), other !== graph);
    showNode(graph, index);
  }
}

function go(fragment, from = null) {
  history.replaceState(null, "", fragment ? `#${fragment}` : location.pathname + location.search);
  route(from);
}

function route(from = null) {
  const [, what, number] = /^#(region|miss)-(\d+)$/.exec(location.hash) ?? [];
  if (what === "region" && report.regions[number]) {
    for (const graph of graphs) graph.show(graph.inRegion(Number(number)), graph !== from);
    showRegion(Number(number));
  } else if (what === "miss" && report.misses[number]) {
    for (const graph of graphs) graph.show(graph.named(report.misses[number].node), graph !== from);
    showMiss(Number(number));
  } else {
    for (const graph of graphs) graph.show([]);
    showOverview();
  }
  byId("details").scrollTop = 0;
}

const fill = (...children) => byId("details").replaceChildren(...children.filter((child) => child !== null));
const back = () => make("p", {}, make("button", { onclick: () => go("") }, "← all regions"));
const pairs = (entries) =>
  make("dl", {}, ...entries.filter(([, text]) => text).flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]));

const digits = (number, count) => number.toFixed(Math.max(0, count - 1 - Math.floor(Math.log10(number))));
const gain = (fused, unfused) => (fused && unfused ? `${digits(unfused / fused, 2)}×` : "");
const anyMeasured = report.regions.some((region) => region.measured_fused);

function showOverview() {
  const rows = report.regions.map((region, index) =>
    make("tr", { class: `link ${kindOf(region.kind)}`, onclick: () => go(`region-${index}`) },
      make("td", { class: "n" }, String(index)),
      make("td", { class: "kind" }, make("i", { class: "dot" }), region.kind),
      make("td", {}, region.label),
      make("td", { class: "n" }, String(region.nodes.length)),
      make("td", { class: "n" }, gain(region.predicted_fused, region.predicted_unfused)),
      anyMeasured ? make("td", { class: "n" }, gain(region.measured_fused, region.measured_unfused)) : null));
  const faults = report.faults.map((fault) =>
    make("div", { class: "card fault" }, make("b", {}, `Left out: the kernel of ${fault.label} is wrong, a fault of TileFuse`), fault.problem));
  fill(
    ...faults,
    make("h2", {}, `${report.regions.length} regions`),
    make("table", {}, make("tr", {}, make("th", {}, "#"), make("th", {}, "kind"), make("th", {}, "made of"), make("th", {}, "nodes"),
      make("th", { title: "how many times as fast as its nodes, as the cost model expects" }, "predicted"),
      anyMeasured ? make("th", { title: "how many times as fast as its nodes, measured" }, "measured") : null), ...rows),
    make("h3", { id: "misses" }, report.misses.length ? `Not fused (${report.misses.length})` : "Nothing worth fusing was left alone"),
    ...report.misses.map((miss, index) => missCard(miss, index)),
    make("h3", {}, report.coverage.movers.length ? `Data movement left (${report.coverage.movers.length})` : "No data movement is left"),
    make("ul", { class: "plain" }, ...report.coverage.movers.map((name) => make("li", { class: "link", onclick: () => find(name.slice(name.indexOf(" ") + 1)) }, name))));
}

function find(name) {
  for (const graph of graphs) graph.show(graph.named(name));
}

// -- the search -------------------------------------------------------------------------------------------------------

const FOUND = 200; // that are listed

// What is written under a box or beside it, in small letters: operator, name, region and the values that it makes.
const texts = new Map();
function textsOf(graph) {
  if (!texts.has(graph)) {
    const made = graph.data.boxes.map(() => []);
    for (const [source, , value] of graph.data.edges) made[source].push(value);
    texts.set(graph, graph.data.boxes.map(([, , , label, name, , region], index) =>
      [label, name, ...made[index], region === null ? "" : `${region} ${report.regions[region].op}`].join("\n").toLowerCase()));
  }
  return texts.get(graph);
}

function search(words) {
  const wanted = words.trim().toLowerCase();
  if (!wanted) return go("");
  history.replaceState(null, "", location.pathname + location.search);
  const [first, second] = graphs.map((graph) => textsOf(graph).flatMap((text, index) => (text.includes(wanted) ? [index] : [])));
  graphs[0].show(first);
  graphs[1].show(second);
  const lines = [...first.map((index) => [graphs[0], index]), ...second.filter((index) => !graphs[0].named(graphs[1].data.boxes[index][4]).length).map((index) => [graphs[1], index])];
  fill(
    make("h2", {}, lines.length === 1 ? "1 found" : `${lines.length} found`),
    lines.length ? null : make("p", { class: "soft" }, "No operator, node, value or region has that in its name."),
    make("ul", { class: "plain found" }, ...lines.slice(0, FOUND).map(([graph, index]) => {
      const [, , , label, name, , region] = graph.data.boxes[index];
      const where = region === null ? "" : ` – region ${region}`;
      return make("li", { class: `link ${region === null ? "" : kindOf(report.regions[region].kind)}`, onclick: () => {
        choose(graph, index);
        for (const other of graphs) other.show(other === graph ? [index] : region === null ? other.named(name) : other.inRegion(region));
      } }, region === null ? null : make("i", { class: "dot" }), make("b", {}, label), ` ${name}`, make("span", { class: "soft" }, where));
    })),
    lines.length > FOUND ? make("p", { class: "soft" }, `and ${lines.length - FOUND} more`) : null);
}

// To the next region (or the one before), from the one that is shown.
function step(by) {
  const [, number] = /^#region-(\d+)$/.exec(location.hash) ?? [];
  const count = report.regions.length;
  if (count) go(`region-${((number === undefined ? (by > 0 ? -1 : count) : Number(number)) + by + count) % count}`);
}

function missCard(miss, index) {
  return make("div", { class: "card link miss-card", onclick: () => go(`miss-${index}`) },
    make("b", {}, `${miss.kind}: ${miss.op} ${miss.node}`), miss.reason);
}

function showMiss(index) {
  const miss = report.misses[index];
  fill(back(), make("h2", {}, `Not fused: ${miss.op} ${miss.node}`),
    pairs([["looked for", miss.kind], ["found", miss.reached], ["but", miss.reason], ["at", miss.failed], ["help", miss.advice]]));
}

const time = (seconds) =>
  !seconds ? "" : seconds < 1e-3 ? `${digits(seconds * 1e6, 3)} µs` : `${digits(seconds * 1e3, 3)} ms`;

function showRegion(index) {
  const region = report.regions[index], kernel = kernels[region.op];
  const text = make("pre");
  const tabs = { "tile program": kernel?.program, [`C (${kernel?.target})`]: kernel?.source };
  const buttons = Object.entries(tabs).filter(([, body]) => body).map(([name, body]) =>
    make("button", { onclick: (event) => {
      for (const button of buttons) button.setAttribute("aria-selected", button === event.currentTarget);
      text.textContent = body;
    } }, name));
  fill(back(),
    make("h2", { class: kindOf(region.kind) }, make("i", { class: "dot" }), `region ${index}: ${region.kind}`),
    pairs([
      ["made of", region.label], ["operator", region.op], ["kernel", region.kernel], ["tiling", kernel?.why],
      ["predicted", [time(region.predicted_fused), region.predicted_unfused ? `as one kernel, ${time(region.predicted_unfused)} unfused` : ""].filter(Boolean).join(" ")],
      ["measured", [time(region.measured_fused), region.measured_unfused ? `as one kernel, ${time(region.measured_unfused)} unfused` : ""].filter(Boolean).join(" ")],
      ["reads", region.inputs.join(", ")], ["makes", region.outputs.join(", ")],
    ]),
    buttons.length ? make("div", { class: "tabs" }, ...buttons) : null, buttons.length ? text : null,
    make("h3", {}, `${region.nodes.length} ${region.nodes.length === 1 ? "node" : "nodes"}`),
    make("ul", { class: "plain" }, ...region.nodes.map((name) => make("li", { class: "link", onclick: () => graphs[0].show(graphs[0].named(name)) }, name))));
  buttons[0]?.click();
}

function showNode(graph, index) {
  const [, , , label, name, kind] = graph.data.boxes[index];
  const near = (end, other) => graph.data.edges.filter((edge) => edge[end] === index)
    .map((edge) => make("li", { class: "link", onclick: () => choose(graph, edge[other]) }, `${graph.data.boxes[edge[other]][3]} (${edge[2]})`));
  const said = { shape: "It computes shapes only, and costs nothing.", input: "An input of the model.", output: "An output of the model." };
  fill(back(), make("h2", {}, label), make("p", {}, name),
    make("p", { class: "soft" }, said[kind] ?? "It is in no region: ONNX Runtime runs it as it is."),
    make("h3", {}, "reads"), make("ul", { class: "plain" }, ...near(1, 0)),
    make("h3", {}, "read by"), make("ul", { class: "plain" }, ...near(0, 1)));
}

// -- the page ---------------------------------------------------------------------------------------------------------

function share(title, part, words) {
  return make("div", { class: "share" }, make("b", {}, percent(part)), ` ${title} `, make("span", { class: "soft" }, words),
    make("div", { class: "bar" }, make("i", { style: `width:${100 * part}%` })));
}

const file = report.input.split("/").pop();
document.title = `${file} – TileFuse`;
byId("title").textContent = `${file}: ${report.nodes_before} nodes → ${report.nodes_after}`;
const cover = report.coverage;
byId("shares").append(
  share("of FLOPs fused", cover.flops, ""),
  share("of nodes fused", cover.nodes, `${cover.nodes_fused} of ${cover.nodes_fused + cover.nodes_left}`));
byId("legend").append(
  ...Object.entries(report.kinds).map(([kind, count]) => make("span", { class: kindOf(kind) }, make("i", { class: "dot" }), `${count} ${kind}`)),
  make("span", { style: "--kind: var(--miss)" }, make("i", { class: "dot" }), `${report.misses.length} missed`),
  make("span", { style: "--kind: var(--node)" }, make("i", { class: "dot" }), "left to ONNX Runtime"));
const graphs = [
  new Graph(byId("before"), "before", before),
  new Graph(byId("after"), "after", after),
];
for (const graph of graphs) {
  graph.fit();
  if (graph.zoom < 0.6) graph.scale(0.6);
  graph.view.scrollTo((graph.data.boxes[0]?.[0] ?? 0) * graph.zoom - graph.view.clientWidth / 2, 0);
}
window.addEventListener("resize", () => graphs.forEach((graph) => graph.scale(graph.zoom)));
window.addEventListener("hashchange", () => route());
const field = byId("search");
field.addEventListener("input", () => search(field.value));
field.addEventListener("keydown", (event) => {
  if (event.key === "Enter") byId("details").querySelector(".found .link")?.click();
});
window.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    field.value = "";
    field.blur();
    go("");
  }
  if (event.target === field || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") {
    event.preventDefault();
    field.focus();
    field.select();
  } else if (event.key === "n" || event.key === "p") step(event.key === "n" ? 1 : -1);
});
route();
document.documentElement.dataset.ready = "true";
