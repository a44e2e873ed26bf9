"use strict";
// Draws the plots of a report. Redraws them when the reader chooses another view or plot, when the color scheme changes,
// for a printer and, on a live page, when a round is done.

const dark = matchMedia("(prefers-color-scheme: dark)");
const live = document.getElementById("live");
const EVERY = 2000; // milliseconds between two requests to the server
const PAPER = { text: "#000000", line: "#cccccc", card: "#ffffff", width: 680 }; // pixels of a printed plot
const MOST_BUTTONS = 6; // more plots are chosen from a menu
const MOST_MARKED = 15; // rows of a heatmap with texts in its cells
const shown = {}; // name of the visible plot, by section
let printing = false;
let received = document.getElementById("data").textContent;
let content = JSON.parse(received);
let view = content.views[0].key;

// Plotly interprets tags in texts as markup.
const escape = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
const inView = (section) => section.views[view] || section.views[""];
const title = (section) => document.getElementById(section.key + "-title").textContent;

function readColors() {
  if (printing) return { palette: content.palette.light, ...PAPER };
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue("--" + name).trim();
  const palette = content.palette[dark.matches ? "dark" : "light"];
  return { palette, text: read("text"), line: read("line"), card: read("card") };
}

// ---- traces ---------------------------------------------------------------------------------------------------------

function paint(trace, plot, scheme) {
  if (trace.type === "heatmap") return [paintCells(trace, plot, scheme)];
  const { color: index, low, high, ...rest } = trace;
  const color = scheme.palette[index];
  const edge = { width: rest.mode === "markers" ? 1 : 0, color: scheme.card };
  if ((rest.marker.symbol || "").endsWith("-open")) edge.color = color;
  const marker = { ...rest.marker, color, line: edge };
  if (marker.pattern) marker.pattern = { ...marker.pattern, fgcolor: scheme.card };
  const drawn = { ...rest, name: escape(rest.name), text: rest.text.map(escape), marker, line: { ...rest.line, color } };
  if (!low) return [drawn];
  return rest.mode === "markers" ? [withInterval(drawn, low, high)] : [drawn, makeBand(drawn, low, high)];
}

function makeBand({ name, x, line }, low, high) {
  const around = { x: [...x, ...[...x].reverse()], y: [...high, ...[...low].reverse()] };
  const look = { type: "scatter", mode: "lines", fill: "toself", fillcolor: line.color, line: { width: 0 }, opacity: 0.18 };
  return { ...around, ...look, name, legendgroup: name, showlegend: false, hoverinfo: "skip" };
}

function withInterval(trace, low, high) {
  const [array, arrayminus] = [high.map((end, i) => end - trace.x[i]), low.map((end, i) => trace.x[i] - end)];
  return { ...trace, error_x: { type: "data", symmetric: false, array, arrayminus, color: trace.marker.color, thickness: 2 } };
}

function paintCells({ z, marks, name }, { names, axes }, { card }) {
  const describe = (y, x) => `${axes.y} ${names.y[y]}, ${axes.x} ${names.x[x]}: ${marks[y][x]} (${(100 * z[y][x]).toFixed(1)} %)`;
  return {
    type: "heatmap",
    name,
    z,
    zmin: 0,
    zmax: 1,
    xgap: 1,
    ygap: 1,
    colorscale: [[0, card], [1, content.palette.light[0]]], // dark enough for white texts
    showscale: false,
    text: marks,
    texttemplate: z.length > MOST_MARKED ? "" : "%{text}",
    hovertext: z.map((row, y) => row.map((_, x) => escape(describe(y, x)))),
    hovertemplate: "%{hovertext}<extra></extra>",
  };
}

function styleLayout(layout, key, { text, line, card, width }) {
  const axis = ({ ticktext, ...one }) => ({
    ...one,
    ...(ticktext ? { ticktext: ticktext.map(escape) } : {}),
    title: { ...one.title, text: escape(one.title.text) },
    gridcolor: line,
    linecolor: line,
    zerolinecolor: text,
    fixedrange: matchMedia("(pointer: coarse)").matches,
  });
  return {
    ...layout,
    ...(width ? { width } : {}),
    xaxis: axis(layout.xaxis),
    yaxis: axis(layout.yaxis),
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: text, family: "system-ui, sans-serif", size: 13 },
    hoverlabel: { bgcolor: card, bordercolor: line, font: { color: text } },
    legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0 },
    margin: { l: 8, r: 8, t: 8, b: 8 },
    hovermode: "closest",
    uirevision: key, // keeps the zoom and the hidden lines of the user
  };
}

// ---- sections -------------------------------------------------------------------------------------------------------

function draw(section) {
  const card = document.getElementById(section.key);
  const { says, plots, tables } = inView(section);
  const plot = plots.find((one) => one.name === shown[section.key]) || plots[0];
  card.hidden = !plot && !says;
  card.querySelector(".says").textContent = plot && plot.says ? `${says} ${plot.says}` : says;
  card.querySelector(".tables").innerHTML = tables; // Python has escaped it
  const box = card.querySelector(".plot");
  box.hidden = !plot;
  drawChoices(section, card.querySelector(".choices"), plots, plot);
  drawDownload(section, card.querySelector(".download"), plot);
  if (!plot) return;
  const scheme = readColors();
  const config = { responsive: true, displaylogo: false, displayModeBar: false };
  const traces = plot.data.flatMap((trace) => paint(trace, plot, scheme));
  traces.sort((one, other) => Boolean(other.fill) - Boolean(one.fill)); // bands are below all lines
  Plotly.react(box, traces, styleLayout(plot.layout, section.key + plot.name, scheme), config);
}

function drawChoices(section, field, plots, plot) {
  const names = plots.map((one) => one.name);
  field.hidden = names.length < 2;
  const now = JSON.stringify([names, plot && plot.name]);
  if (field.dataset.names === now) return;
  field.dataset.names = now;
  const choose = (name) => {
    shown[section.key] = name;
    draw(content.sections.find((one) => one.key === section.key));
  };
  const many = names.length > MOST_BUTTONS;
  field.replaceChildren(...(many ? [makeMenu(names, plot, choose)] : makeButtons(section.key, names, plot, choose)));
}

function makeMenu(names, plot, choose) {
  const select = document.createElement("select");
  select.append(...names.map((name) => new Option(name, name, false, name === plot.name)));
  select.setAttribute("aria-label", "which plot");
  select.onchange = () => choose(select.value);
  return select;
}

function makeButtons(key, names, chosen, choose) {
  return names.map((name) => {
    const label = document.createElement("label");
    const input = Object.assign(document.createElement("input"), { type: "radio", name: key, value: name });
    input.checked = name === chosen.name;
    input.onchange = () => choose(name);
    label.append(input, name);
    return label;
  });
}

function drawAll() {
  content.sections.forEach(draw);
}

// ---- views ----------------------------------------------------------------------------------------------------------

function drawViews() {
  const field = document.getElementById("views");
  const now = content.views.find((one) => one.key === view) || content.views[0];
  view = now.key;
  document.getElementById("summary").innerHTML = now.summary; // Python has escaped it
  document.getElementById("about-view").textContent = now.says;
  document.getElementById("about-view").hidden = !now.says;
  field.hidden = content.views.length < 2;
  const texts = content.views.map((one) => one.text);
  if (field.dataset.names === JSON.stringify(texts)) return;
  field.dataset.names = JSON.stringify(texts);
  const choose = (text) => {
    view = content.views.find((one) => one.text === text).key;
    drawViews();
    drawAll();
  };
  field.querySelector(".choices").replaceChildren(...makeButtons("view", texts, { name: now.text }, choose));
}

// ---- downloads ------------------------------------------------------------------------------------------------------

function drawDownload(section, button, plot) {
  button.hidden = !plot;
  if (!plot) return;
  button.setAttribute("aria-label", `${button.textContent}: ${title(section)}, ${plot.name}`);
  button.onclick = () => {
    const words = [section.key, plot.name, ...(section.views[""] ? [] : [view])].join(" ");
    save(`${words.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "")}.csv`, toCsv(plot));
  };
}

function save(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  Object.assign(document.createElement("a"), { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), EVERY);
}

function toCsv(plot) {
  const quote = (value) => (typeof value === "string" ? `"${value.replaceAll('"', '""')}"` : (value ?? ""));
  return toRows(plot).map((row) => row.map(quote).join(",") + "\r\n").join("");
}

function toRows({ data, names, axes }) {
  const at = (axis, value) => (names[axis].length ? names[axis][Math.round(value)] : value);
  if (data[0].type === "heatmap") {
    const { z, marks, name } = data[0];
    const rows = z.flatMap((row, y) => row.map((share, x) => [names.y[y], names.x[x], share, Number(marks[y][x])]));
    return [[axes.y, axes.x, name, "rows"], ...rows];
  }
  const sized = data.some((one) => one.marker.size && one.marker.size.length);
  const ranged = data.some((one) => one.low);
  const rows = data.flatMap((one) => one.x.map((x, i) => [
    one.name,
    at("x", x),
    at("y", one.y[i]),
    ...(sized ? [one.marker.size[i]] : []),
    ...(ranged ? [one.low ? one.low[i] : null, one.high ? one.high[i] : null] : []),
  ]));
  return [["series", axes.x || "x", axes.y || "y", ...(sized ? ["size"] : []), ...(ranged ? ["low", "high"] : [])], ...rows];
}

// ---- paper, and a run that goes on ----------------------------------------------------------------------------------

function print(now) {
  printing = now;
  drawAll();
}

async function update() {
  try {
    const answer = await fetch("data.json", { cache: "no-store" });
    const text = await answer.text();
    if (!answer.ok) throw new Error(text);
    if (text !== received) {
      received = text;
      content = JSON.parse(text);
      drawViews();
      drawAll();
    }
    live.textContent = content.finished ? "the run has finished" : "live";
  } catch (error) {
    live.textContent = `no update: ${error.message}`;
  }
  if (!content.finished) setTimeout(update, EVERY);
}

drawViews();
drawAll();
dark.addEventListener("change", drawAll);
addEventListener("beforeprint", () => print(true));
addEventListener("afterprint", () => print(false));
if (live) update();
