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
    draw("speed-up", charts.speed_up);
    draw("parity", charts.parity);
    const chosen = document.getElementById("position-task");
    if (!chosen) return;
    draw("marginal", charts.positions.marginal[chosen.value]);
    draw("conditional", charts.positions.conditional[chosen.value]);
  }

  const chosen = document.getElementById("position-task");
  if (chosen) chosen.addEventListener("change", drawAll);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  drawAll();
})();
