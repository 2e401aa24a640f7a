// Draws the charts in the colours of the page's theme, and again when the theme changes.
(function () {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function themed(figure) {
    const data = figure.data.map((trace) => {
      const color = css("--c" + (trace.meta.color % 7));
      const copy = { ...trace, marker: { ...trace.marker, color } };
      if (trace.line) copy.line = { ...trace.line, color };
      if (trace.error_x) copy.error_x = { ...trace.error_x, color };
      if (trace.error_y) copy.error_y = { ...trace.error_y, color };
      return copy;
    });
    const axis = (given) => ({
      tickfont: { size: 12 }, gridcolor: css("--grid"), linecolor: css("--grid"), zeroline: false, automargin: true, fixedrange: true,
      ...given, title: { ...given.title, font: { size: 12, color: css("--muted") } },
    });
    const annotations = (figure.layout.annotations || []).map((text) => ({
      ...text, font: { size: 12, color: css("--muted") },
    }));
    const shapes = (figure.layout.shapes || []).map((shape) => shape.name === "band"
      ? { ...shape, fillcolor: css("--band"), line: { width: 0 } }
      : { ...shape, line: { color: css("--muted"), width: 1.5, dash: "dot" } });
    return {
      data,
      layout: {
        ...figure.layout,
        shapes,
        annotations,
        xaxis: axis(figure.layout.xaxis),
        yaxis: axis(figure.layout.yaxis),
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        font: { family: css("--font"), size: 13, color: css("--text") },
        margin: { l: 8, r: 12, t: 8, b: 8 },
        legend: { orientation: "h", x: 0, y: figure.layout.annotations ? 1.07 : 1.02, yanchor: "bottom" },
        showlegend: true,
        hoverlabel: { font: { family: css("--font") } },
      },
    };
  }

  function draw(id, figure) {
    const place = document.getElementById(id);
    if (!place || !figure) return;
    const { data, layout } = themed(figure);
    Plotly.react(place, data, layout, { displayModeBar: false, responsive: true });
  }

  function drawAll() {
    for (const [point, figure] of Object.entries(charts.speed_up)) draw("speed-up-" + point, figure);
    for (const [name, figure] of Object.entries(charts.load)) draw("load-" + name, figure);
    draw("parity", charts.parity);
    const chosen = document.getElementById("position-task");
    if (!chosen) return;
    draw("marginal", charts.positions.marginal[chosen.value]);
    draw("conditional", charts.positions.conditional[chosen.value]);
    draw("output", charts.buckets.output[chosen.value]);
    draw("context", charts.buckets.context[chosen.value]);
  }

  // A click on a column's head sorts by it: by the first number of the cells, else by their text.
  function sort(table, column, head) {
    const down = head.getAttribute("aria-sort") === "ascending";
    const key = (row) => row.cells[column] ? row.cells[column].textContent.trim() : "";
    const number = (text) => parseFloat((text.replace("−", "-").match(/-?[\d,]*\.?\d+/) || ["NaN"])[0].replace(/,/g, ""));
    const rows = [...table.tBodies[0].rows];
    const numeric = head.classList.contains("num");
    rows.sort((a, b) => {
      const x = key(a), y = key(b);
      const missing = numeric ? isNaN(number(x)) - isNaN(number(y)) : 0;  // last, whichever way
      const order = numeric ? number(x) - number(y) || 0 : x.localeCompare(y);
      return missing || (down ? -order : order);
    });
    for (const row of rows) {
      row.classList.remove("total");
      for (const cell of row.querySelectorAll("th.again")) cell.classList.remove("again");
      table.tBodies[0].append(row);
    }
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
  }

  function asText(table) {
    return [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent.trim().replace(/\s+/g, " ")).join("\t")).join("\n");
  }

  function addCopy(after, label, text) {
    const button = document.createElement("button");
    button.className = "copy";
    button.textContent = label;
    button.addEventListener("click", () => {
      const area = document.createElement("textarea");  // navigator.clipboard is missing on pages opened from disk
      area.value = text();
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
      button.textContent = "copied";
    });
    after.after(button);
  }

  for (const table of document.querySelectorAll(".scroll > table")) {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      head.classList.add("sortable");
      head.tabIndex = 0;
      head.addEventListener("click", () => sort(table, column, head));
      head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(table, column, head); });
    });
    addCopy(table.parentNode, "copy table", () => asText(table));
  }
  for (const block of document.querySelectorAll("pre")) addCopy(block, "copy", () => block.textContent.trim());

  function showLoad() {
    const load = document.getElementById("load");
    if (!load) return;
    for (const part of document.querySelectorAll(".at-load")) part.hidden = part.dataset.point !== load.value;
    for (const chart of document.querySelectorAll(".at-load:not([hidden]) .chart")) if (chart.data) Plotly.Plots.resize(chart);
  }
  const load = document.getElementById("load");
  if (load) load.addEventListener("change", showLoad);
  addEventListener("beforeprint", () => {
    for (const part of document.querySelectorAll("details")) part.open = true;
    for (const chart of document.querySelectorAll(".chart")) if (chart.data) Plotly.Plots.resize(chart);
  });

  const chosen = document.getElementById("position-task");
  if (chosen) chosen.addEventListener("change", drawAll);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  drawAll();
  showLoad();
})();
