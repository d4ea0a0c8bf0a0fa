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

  try {
    run(await inflate("plotly"));
    await drawAll();
  } catch (error) {
    root.dataset.drawn = "no";
    for (const box of boxes) box.textContent = "This browser cannot draw the figure; its numbers are in the table below.";
    return;
  }
  dark.addEventListener("change", drawAll);
  addEventListener("beforeprint", () => { printing = true; unfold(true); drawAll(); });
  addEventListener("afterprint", () => { printing = false; unfold(!phone.matches); drawAll(); });
  for (const button of document.querySelectorAll("[data-zoom]")) button.addEventListener("click", () => zoom(button));
  root.dataset.drawn = "yes";
})();
