"use strict";
(async () => {
  const root = document.documentElement;
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const palettes = read("palettes");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const PRINT_WIDTH = 680;
  let printing = false;
  const known = document.querySelector("details.known");
  const unfold = (open) => { if (known) known.open = open; };
  const phone = matchMedia("(max-width: 560px)");
  unfold(!phone.matches);  // the verdict on one screen

  const themed = (value, colours) => {
    if (typeof value === "string") {
      const name = /^var\(--([a-z]+)\)$/.exec(value);
      return name && colours[name[1]] ? colours[name[1]] : value;
    }
    if (Array.isArray(value)) return value.map((item) => themed(item, colours));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, themed(v, colours)]));
  };

  const inflate = async (id) => {
    const packed = atob(document.getElementById(id).textContent);
    const bytes = Uint8Array.from(packed, (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  };

  const run = (code) => {
    const script = document.createElement("script");
    script.textContent = code;
    document.head.append(script);
  };

  const draw = async (box) => {
    const { data, layout } = themed(read(`${box.id}-spec`), palettes[dark.matches && !printing ? "dark" : "light"]);
    if (printing) layout.width = PRINT_WIDTH;
    layout.autosize = !printing;
    const narrow = box.clientWidth < 520 && !printing;
    if (narrow) layout.font.size = 11;
    const config = { displaylogo: false, displayModeBar: false, responsive: true, scrollZoom: false, doubleClick: "reset" };
    await Plotly.react(box, data, layout, config);
  };
  const boxes = [...document.querySelectorAll(".plot")];
  const drawAll = async () => { for (const box of boxes) await draw(box); };
  const redraw = async () => { await drawAll(); for (const each of explorers) await explore(each); };

  const ACTIONS = {
    in: ([a, b]) => [a + (b - a) / 4, b - (b - a) / 4],
    out: ([a, b]) => [a - (b - a) / 2, b + (b - a) / 2],
    left: ([a, b]) => [a - (b - a) / 4, b - (b - a) / 4],
    right: ([a, b]) => [a + (b - a) / 4, b + (b - a) / 4],
  };
  const zoom = (button) => {
    const box = document.getElementById(button.dataset.of);
    const act = ACTIONS[button.dataset.zoom];
    const full = read(`${box.id}-spec`).layout.xaxis.range;
    Plotly.relayout(box, { "xaxis.range": act ? act(box._fullLayout.xaxis.range) : full });
  };

  const MOST_DRAWN = 4000;
  const explorers = [...document.querySelectorAll(".explorer")].map((root) => ({ root, data: read(`${root.id}-data`) }));
  const explore = async ({ root, data }) => {
    const find = (query) => root.querySelector(query);
    const filters = [...root.querySelectorAll("[data-axis]")];
    const wanted = filters.map((s) => [data.filters[s.dataset.axis].at, s.value]).filter(([, v]) => v !== "").map(([at, v]) => [at, Number(v)]);
    const match = data.seconds.map((_, i) => i).filter((i) => wanted.every(([at, v]) => at[i] === v));
    const there = match.filter((i) => data.seconds[i] !== null && data.money[i] !== null);
    find(".count").textContent = `${match.length.toLocaleString("en")} of ${data.seconds.length.toLocaleString("en")} points match, ${there.length.toLocaleString("en")} have a plan that fits`;
    const colours = palettes[dark.matches && !printing ? "dark" : "light"];
    const names = (i) => data.filters.map((a) => `${a.label}: ${escapeText(a.values[a.at[i]])}`).join("<br>");
    const base = { height: 420, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: colours.text, size: 13 }, margin: { l: 8, r: 16, t: 8, b: 8, pad: 4 }, dragmode: false, legend: { orientation: "h", y: 1.02, yanchor: "bottom" } };
    const axis = (title, more = {}) => ({ title: { text: escapeText(title) }, automargin: true, fixedrange: true, gridcolor: colours.grid, zeroline: false, ...more });
    const config = { displayModeBar: false, responsive: true };
    const [across, down, shows] = ["across", "down", "shows"].map((s) => find(`[data-side=${s}]`).value);
    const [x, y, shown] = [data.filters[across], data.filters[down], data[shows]];
    const best = y.values.map(() => x.values.map(() => null));
    for (const i of there) {
      const held = best[y.at[i]][x.at[i]];
      if (held === null || shown[i] < shown[held]) best[y.at[i]][x.at[i]] = i;
    }
    const cells = best.map((row) => row.map((i) => (i === null ? null : shown[i])));
    await Plotly.react(find(".map"), [{
      type: "heatmap", z: cells, x: x.values.map(escapeText), y: y.values.map(escapeText), colorscale: "Cividis", xgap: 1, ygap: 1,
      text: best.map((row) => row.map((i) => (i === null ? "nothing fits" : names(i)))), hovertemplate: "%{z:.4~s}<br>%{text}<extra></extra>",
      colorbar: { title: { text: escapeText(shows === "seconds" ? `${data.time}, s` : data.cost), side: "right" } },
    }], { ...base, xaxis: axis(x.label, { type: "category" }), yaxis: axis(y.label, { type: "category" }) }, config);
    const order = [...there].sort((a, b) => data.seconds[a] - data.seconds[b] || data.money[a] - data.money[b]);
    const front = [];
    for (const i of order) if (!front.length || data.money[i] < data.money[front.at(-1)]) front.push(i);
    const step = Math.max(1, Math.ceil(there.length / MOST_DRAWN));
    const trace = (points, more) => ({ type: "scatter", x: points.map((i) => data.seconds[i]), y: points.map((i) => data.money[i]), text: points.map(names), hovertemplate: "%{x:.4~s} s, %{y:.4~s}<br>%{text}<extra></extra>", ...more });
    await Plotly.react(find(".cloud"), [
      trace(order.filter((_, k) => k % step === 0), { mode: "markers", name: step > 1 ? `one of ${step} matching points` : "matching points", marker: { size: 5, color: colours.blue, opacity: 0.45 } }),
      trace(front, { mode: "lines+markers", name: "no matching point beats these", marker: { size: 8, color: colours.red }, line: { dash: "dot", color: colours.grey } }),
    ], { ...base, xaxis: axis(`${data.time}, s`, { type: "log" }), yaxis: axis(data.cost, { type: "log" }) }, config);
  };
  const escapeText = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  for (const each of explorers) each.root.addEventListener("change", () => explore(each));

  try {
    run(await inflate("plotly"));
    await drawAll();
    for (const each of explorers) await explore(each);
  } catch (error) {
    root.dataset.drawn = "no";
    for (const box of boxes) box.textContent = "This browser cannot draw the figure; its numbers are in the table below.";
    return;
  }
  dark.addEventListener("change", redraw);
  addEventListener("beforeprint", () => { printing = true; unfold(true); redraw(); });
  addEventListener("afterprint", () => { printing = false; unfold(!phone.matches); redraw(); });
  for (const button of document.querySelectorAll("[data-zoom]")) button.addEventListener("click", () => zoom(button));
  root.dataset.drawn = "yes";
})();
