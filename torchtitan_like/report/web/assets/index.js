// Follow the list of runs.
(() => {
  "use strict";
  const RETRY_MILLISECONDS = 3000;
  const connection = document.getElementById("connection");
  const rows = () => [...document.querySelectorAll("tr[data-run]")];

  function replaceRow(old, html) {
    const body = document.createElement("tbody");
    body.innerHTML = html;
    // A link keeps the focus of the keyboard.
    const hadFocus = old.contains(document.activeElement);
    old.replaceWith(body.firstElementChild);
    return hadFocus;
  }

  function show({data}) {
    const {names, rows: changed} = JSON.parse(data);
    const shown = rows().map((row) => row.dataset.run);
    if (JSON.stringify(shown) !== JSON.stringify(names)) return location.reload();
    for (const [position, row] of rows().entries()) {
      const html = changed[row.dataset.run];
      if (html !== undefined && replaceRow(row, html)) rows()[position].querySelector("a").focus();
    }
  }

  function connect() {
    const source = new EventSource("/runs");
    source.addEventListener("open", () => { connection.hidden = true; });
    source.addEventListener("runs", show);
    source.addEventListener("error", () => {
      connection.hidden = false;
      if (source.readyState === EventSource.CLOSED) setTimeout(connect, RETRY_MILLISECONDS);
    });
  }
  connect();
})();
