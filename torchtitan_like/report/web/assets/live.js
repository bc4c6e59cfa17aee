// Follow one run: append new rows to the curves, and replace what the server has computed anew.
(() => {
  "use strict";
  const RETRY_MILLISECONDS = 3000;
  const page = JSON.parse(document.body.dataset.page);
  const byId = (id) => document.getElementById(id);
  let shown = page.id; // the id of the last message that the page shows
  let waiting = []; // rows of a version whose update is being fetched

  const versionOf = (id) => id.split(".")[0];
  const figures = () => Bokeh.documents.flatMap((one) => one.roots());

  function sources() {
    const found = new Map();
    for (const figure of figures()) {
      for (const {data_source: source} of figure.renderers) found.set(source.tags[0], source);
    }
    return found;
  }

  // ---- new rows

  function append({data, lastEventId}) {
    const {version, points} = JSON.parse(data);
    if (version !== versionOf(shown)) {
      waiting.push({data, lastEventId});
      return;
    }
    const byTag = sources();
    let last = -Infinity;
    for (const [tag, columns] of Object.entries(points)) {
      byTag.get(tag)?.stream(columns);
      last = Math.max(last, ...columns.step.slice(-1));
    }
    moveCursor(last);
    shown = lastEventId;
    document.body.dataset.shown = shown;
  }

  // The cursor stays at the newest step if it was there.
  function moveCursor(last) {
    const [range, number] = [byId("cursor"), byId("cursor-step")];
    if (!range || !(last > Number(range.max))) return;
    const wasLast = range.value === range.max;
    range.max = number.max = last;
    if (wasLast) {
      range.value = last;
      range.dispatchEvent(new Event("input"));
    }
  }

  // ---- a new version

  async function replace({data}) {
    const {version, signature} = JSON.parse(data);
    if (version === versionOf(shown)) return;
    if (signature !== page.signature) return location.reload();
    const answer = await fetch(`/update/${page.path}`);
    if (!answer.ok) return;
    const update = await answer.json();
    if (update.signature !== page.signature) return location.reload();
    const byTag = sources();
    for (const [tag, {name, data: columns}] of Object.entries(update.sources)) {
      byTag.get(tag)?.setv({name, data: columns});
    }
    for (const item of figures().flatMap((one) => one.above).flatMap((legend) => legend.items)) {
      item.label = {value: item.renderers[0].data_source.name};
    }
    for (const [number, caption] of document.querySelectorAll("figcaption").entries()) {
      caption.innerHTML = update.captions[number];
    }
    update.sections.forEach(replaceSection);
    shown = `${update.version}.0`;
    document.body.dataset.shown = shown;
    const later = waiting;
    waiting = [];
    later.filter((one) => versionOf(one.lastEventId) === update.version).forEach(append);
  }

  function replaceSection({title, html}) {
    const heading = [...document.querySelectorAll("h2")].find((one) => one.textContent === title);
    if (!heading) return addSection(title, html);
    const section = heading.parentElement;
    const open = new Set([...section.querySelectorAll("details[open] > summary")].map((one) => one.textContent));
    section.innerHTML = html;
    section.prepend(heading);
    for (const summary of section.querySelectorAll("details > summary")) {
      if (open.has(summary.textContent)) summary.parentElement.open = true;
    }
  }

  // A section that the page did not have, such as an error. Its link is added too.
  function addSection(title, html) {
    const section = document.createElement("section");
    const heading = document.createElement("h2");
    heading.textContent = title;
    section.id = `live-${document.querySelectorAll("section").length}`;
    section.innerHTML = html;
    section.prepend(heading);
    document.querySelector("main").append(section);
    const link = document.createElement("a");
    link.href = `#${section.id}`;
    link.textContent = title;
    document.querySelector("nav").append(link);
  }

  // ---- switches

  async function sendSwitch({currentTarget: button}) {
    const action = button.dataset.switch;
    if (action === "stop" && !confirm("Save a checkpoint and end this run?")) return;
    button.disabled = true;
    try {
      const answer = await fetch(`/switch/${page.path}`, {method: "POST", body: new URLSearchParams({action})});
      byId("answer").textContent = await answer.text();
    } catch (error) {
      byId("answer").textContent = `Not sent: ${error.message}`;
    }
    button.disabled = false;
  }

  // ---- connection

  function connect() {
    const source = new EventSource(`/events/${page.path}?from=${encodeURIComponent(shown)}`);
    source.addEventListener("open", () => { byId("connection").hidden = true; });
    source.addEventListener("state", ({data}) => { byId("status").innerHTML = JSON.parse(data).html; });
    source.addEventListener("rows", append);
    source.addEventListener("page", replace);
    source.addEventListener("error", () => {
      byId("connection").hidden = false;
      if (source.readyState === EventSource.CLOSED) setTimeout(connect, RETRY_MILLISECONDS);
    });
  }

  function start() {
    const isDrawn = !document.querySelector(".charts") || document.documentElement.dataset.ready;
    if (!isDrawn) return void setTimeout(start, 50);
    for (const button of document.querySelectorAll("button[data-switch]")) {
      button.addEventListener("click", sendSwitch);
    }
    connect();
  }
  start();
})();
