"use strict";
// Keeps the list of runs up to date.

const list = document.getElementById("list");
const live = document.getElementById("live");
const EVERY = 2000; // milliseconds between two requests to the server
let received = "";

function replace(text) {
  const focused = document.activeElement.getAttribute("href"); // of a link in the list, which is made anew
  list.innerHTML = JSON.parse(text).list; // the server has escaped it
  const again = [...list.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused);
  if (again) again.focus();
}

async function update() {
  try {
    const answer = await fetch("list.json", { cache: "no-store" });
    const text = await answer.text();
    if (!answer.ok) throw new Error(text);
    if (text !== received) replace(text);
    received = text;
    live.textContent = "live";
  } catch (error) {
    live.textContent = `no update: ${error.message}`;
  }
  setTimeout(update, EVERY);
}

update();
