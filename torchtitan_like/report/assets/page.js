// Controls of the report: axis, scale, events and the step that is read. The charts are Bokeh models.
(() => {
  "use strict";
  const EVENT_PIXELS = 5; // between the pointer and an event that is shown
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const select = (selector) => [...document.querySelectorAll(selector)];

  function start(figures) {
    const log = document.getElementById("log");
    const range = document.getElementById("cursor");
    const number = document.getElementById("cursor-step");
    const body = document.querySelector("#values tbody");
    const Span = Bokeh.Models.get("Span");
    let column = "step";
    const renderers = figures.flatMap((figure) => figure.renderers).filter((one) => one.name);
    const cursors = figures.map((figure) => {
      const cursor = new Span({dimension: "height", line_width: 1, location: null});
      figure.add_layout(cursor);
      return cursor;
    });
    const labels = new Map(); // source of a curve -> its label in the table of values
    for (const figure of figures) {
      for (const renderer of figure.renderers.filter((one) => one.name === "curve")) {
        const source = renderer.data_source;
        labels.set(source, source.name === figure.name ? figure.name : `${figure.name}: ${source.name}`);
      }
    }

    function paint() {
      const style = getComputedStyle(document.documentElement);
      const [text, line, gridLine] = ["--text", "--line", "--grid"].map((name) => style.getPropertyValue(name).trim());
      for (const figure of figures) {
        for (const axis of [...figure.below, ...figure.left]) {
          axis.setv({axis_label_text_color: text, major_label_text_color: text, axis_line_color: line,
            major_tick_line_color: line, minor_tick_line_color: null, axis_label_text_font_style: "normal"});
        }
        for (const grid of figure.center.filter((one) => one.grid_line_color !== undefined)) {
          grid.setv({grid_line_color: gridLine});
        }
        for (const legend of figure.above) legend.setv({label_text_color: text, inactive_fill_alpha: 0.4});
      }
      for (const cursor of cursors) cursor.line_color = text;
    }

    function moveAxis() {
      column = document.querySelector("input[name=x]:checked").value;
      for (const renderer of renderers) {
        for (const glyph of ["glyph", "nonselection_glyph", "muted_glyph"]) {
          renderer[glyph].x = {field: column};
        }
      }
      for (const figure of figures) {
        for (const axis of figure.below) axis.axis_label = column;
        figure.reset.emit();
      }
      readStep();
    }

    function showScale() {
      for (const figure of figures) {
        if (figure.tags[0] !== "only") figure.visible = (figure.tags[0] === "log") === log.checked;
      }
    }

    function showEvents() {
      for (const box of select("input[data-event]")) {
        for (const renderer of renderers) {
          if (renderer.name === `event:${box.dataset.event}`) renderer.visible = box.checked;
        }
      }
    }

    // At most 5 digits; integers in full.
    function shorten(number) {
      if (!Number.isFinite(number)) return String(number);
      return Number.isInteger(number) ? number.toLocaleString("en-US") : String(Number(number.toPrecision(5)));
    }

    function formatHours(hours) {
      const seconds = Math.round(3600 * hours);
      const pad = (number) => String(number).padStart(2, "0");
      return `${Math.floor(seconds / 3600)}:${pad(Math.floor(seconds / 60) % 60)}:${pad(seconds % 60)}`;
    }

    // The last drawn row up to the step.
    function rowAt(source, step) {
      const steps = source.get_array("step");
      let row = -1;
      for (let i = 0; i < steps.length && steps[i] <= step; i++) row = i;
      return row;
    }

    function readStep() {
      const step = Number(range.value);
      let position = null;
      body.replaceChildren();
      for (const [source, label] of labels) {
        const row = rowAt(source, step);
        if (row < 0) continue;
        if (position === null) position = source.get_array(column)[row];
        const line = body.insertRow();
        const numbers = ["step", "value"].map((name) => shorten(source.get_array(name)[row]));
        for (const text of [label, ...numbers]) line.insertCell().textContent = text;
      }
      const isLast = range.value === range.max;
      for (const cursor of cursors) cursor.location = isLast ? null : column === "step" ? step : position;
    }

    // The pixel of a value on the horizontal axis of a figure.
    function pixel(figure, value) {
      const place = figure.tags[0] === "log" ? Math.log : (number) => number;
      const {start, end} = figure.x_range;
      return figure.inner_width * (place(value) - place(start)) / (place(end) - place(start));
    }

    // The drawn row whose pixel is nearest to the pointer.
    function nearestRow(figure, source, at) {
      const positions = source.get_array(column);
      let row = -1;
      let best = Infinity;
      for (let i = 0; i < positions.length; i++) {
        const distance = Math.abs(pixel(figure, positions[i]) - at);
        if (distance < best) [row, best] = [i, distance];
      }
      return {row, distance: best};
    }

    function addLine(table, cells, color) {
      const line = table.insertRow();
      for (const cell of cells) line.insertCell().textContent = cell;
      line.cells[0].style.setProperty("--color", color);
    }

    // Show the row of each curve at the pointer, and the events within a few pixels.
    function showTip(figure, event) {
      const at = pixel(figure, event.x);
      const table = document.createElement("table");
      addLine(table, ["", "value", "step", "tokens", "h:mm:ss"], "transparent");
      const seen = new Set();
      const events = [];
      for (const renderer of figure.renderers.filter((one) => one.name && one.visible)) {
        const source = renderer.data_source;
        const {row, distance} = nearestRow(figure, source, at);
        const color = renderer.glyph.line_color.value ?? renderer.glyph.line_color;
        const [step, tokens, hours] =
          ["step", "tokens", "hours"].map((name) => source.get_array(name)[row]);
        if (renderer.name === "curve") {
          if (row < 0 || seen.has(source)) continue;
          seen.add(source);
          const numbers = [source.get_array("value")[row], step, tokens].map(shorten);
          addLine(table, [source.name, ...numbers, formatHours(hours)], color);
        } else if (distance < EVENT_PIXELS) {
          const kind = renderer.name.replace("event:", "");
          events.push([`${kind} at step ${step} (${source.name}): ${source.get_array("detail")[row]}`, color]);
        }
      }
      tip.replaceChildren(table);
      for (const [text, color] of events) {
        const line = document.createElement("p");
        line.textContent = text;
        line.style.setProperty("--color", color);
        tip.append(line);
      }
      tip.hidden = false;
      const box = tip.getBoundingClientRect();
      const left = pointer.x + 16 + box.width < innerWidth ? pointer.x + 16 : pointer.x - 16 - box.width;
      tip.style.left = `${Math.max(4, left)}px`;
      tip.style.top = `${Math.max(4, Math.min(pointer.y + 16, innerHeight - box.height - 4))}px`;
    }

    const tip = document.createElement("div");
    tip.className = "tip";
    tip.hidden = true;
    document.body.append(tip);
    const pointer = {x: 0, y: 0};
    document.addEventListener("pointermove", ({clientX, clientY}) => { [pointer.x, pointer.y] = [clientX, clientY]; }, true);
    document.addEventListener("scroll", () => { tip.hidden = true; }, true);
    for (const figure of figures) {
      figure.on_event("mousemove", (event) => showTip(figure, event));
      figure.on_event("tap", (event) => showTip(figure, event));
      figure.on_event("mouseleave", () => { tip.hidden = true; });
    }
    document.querySelector(".controls").addEventListener("submit", (event) => event.preventDefault());
    for (const radio of select("input[name=x]")) radio.addEventListener("change", moveAxis);
    for (const box of select("input[data-event]")) box.addEventListener("change", showEvents);
    log.addEventListener("change", showScale);
    range.addEventListener("input", () => { number.value = range.value; readStep(); });
    number.addEventListener("input", () => { range.value = number.value; readStep(); });
    dark.addEventListener("change", paint);
    paint();
    readStep();
    document.documentElement.dataset.ready = "true";
  }

  // A search field shows the rows of the table below it that contain its text.
  for (const field of select("input.filter")) {
    field.addEventListener("input", () => {
      for (const row of field.closest("details").querySelectorAll("tr")) {
        row.hidden = !row.textContent.toLowerCase().includes(field.value.toLowerCase());
      }
    });
  }

  function wait() {
    const roots = window.Bokeh ? Bokeh.documents.flatMap((one) => one.roots()) : [];
    const views = window.Bokeh ? [...Bokeh.index] : [];
    if (roots.length && views.length >= roots.length) start(roots);
    else setTimeout(wait, 50);
  }
  if (document.querySelector(".charts")) wait();
})();
