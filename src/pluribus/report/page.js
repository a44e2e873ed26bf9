"use strict";
// Draws the plots of a report. Redraws them when the color scheme changes and, on a live page, when a round is done.

const dark = matchMedia("(prefers-color-scheme: dark)");
const live = document.getElementById("live");
const EVERY = 2000; // milliseconds between two requests to the server
const shown = {}; // name of the visible plot, by section
let received = document.getElementById("data").textContent;
let content = JSON.parse(received);

function readColors() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue("--" + name).trim();
  const palette = content.palette[dark.matches ? "dark" : "light"];
  return { palette, text: read("text"), line: read("line"), card: read("card") };
}

function paint({ color: index, ...trace }, { palette, card }) {
  const color = palette[index];
  const edge = trace.type === "bar" ? { width: 0 } : { width: trace.mode === "markers" ? 1 : 0, color: card };
  if ((trace.marker.symbol || "").endsWith("-open")) edge.color = color;
  const marker = { ...trace.marker, color, line: edge };
  if (marker.pattern) marker.pattern = { ...marker.pattern, fgcolor: card };
  return { ...trace, marker, line: { ...trace.line, color } };
}

function styleLayout(layout, key, { text, line, card }) {
  const axis = (one) => ({ ...one, gridcolor: line, linecolor: line, fixedrange: matchMedia("(pointer: coarse)").matches });
  return {
    ...layout,
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

function draw(section) {
  const card = document.getElementById(section.key);
  const plot = section.plots.find((one) => one.name === shown[section.key]) || section.plots[0];
  card.hidden = !plot && !section.says;
  card.querySelector(".says").textContent = section.says;
  const box = card.querySelector(".plot");
  box.hidden = !plot;
  drawChoices(section, card.querySelector(".choices"), plot);
  if (!plot) return;
  const scheme = readColors();
  const config = { responsive: true, displaylogo: false, displayModeBar: false };
  const traces = plot.data.map((trace) => paint(trace, scheme));
  Plotly.react(box, traces, styleLayout(plot.layout, section.key + plot.name, scheme), config);
}

function drawChoices(section, field, plot) {
  const names = section.plots.map((one) => one.name);
  field.hidden = names.length < 2;
  if (field.dataset.names === JSON.stringify(names)) return;
  field.dataset.names = JSON.stringify(names);
  const choose = (name) => {
    shown[section.key] = name;
    draw(content.sections.find((one) => one.key === section.key));
  };
  field.replaceChildren(...(names.length > 4 ? [makeMenu(names, plot, choose)] : makeButtons(section.key, names, plot, choose)));
}

function makeMenu(names, plot, choose) {
  const select = document.createElement("select");
  select.append(...names.map((name) => new Option(name, name, false, name === plot.name)));
  select.setAttribute("aria-label", "which plot");
  select.onchange = () => choose(select.value);
  return select;
}

function makeButtons(key, names, plot, choose) {
  return names.map((name) => {
    const label = document.createElement("label");
    const input = Object.assign(document.createElement("input"), { type: "radio", name: key, value: name });
    input.checked = name === plot.name;
    input.onchange = () => choose(name);
    label.append(input, name);
    return label;
  });
}

function drawAll() {
  content.sections.forEach(draw);
}

async function update() {
  try {
    const answer = await fetch("data.json", { cache: "no-store" });
    const text = await answer.text();
    if (!answer.ok) throw new Error(text);
    if (text !== received) {
      received = text;
      content = JSON.parse(text);
      document.getElementById("summary").innerHTML = content.summary; // the server has escaped it
      drawAll();
    }
    live.textContent = content.finished ? "the run has finished" : "live";
  } catch (error) {
    live.textContent = `no update: ${error.message}`;
  }
  if (!content.finished) setTimeout(update, EVERY);
}

drawAll();
dark.addEventListener("change", drawAll);
if (live) update();
