// What every view shares: data, figures as text, colours of the theme, canvases that redraw themselves.
const $ = (selector, root = document) => root.querySelector(selector);
const parsed = {};
const data = (id) => (parsed[id] ??= JSON.parse($("#" + id)?.textContent ?? "null"));

const seconds = (s) =>
  !s ? "0 s" : s >= 1 ? s.toFixed(2) + " s" : s >= 1e-3 ? (s * 1e3).toFixed(s < 0.01 ? 2 : 1) + " ms" : (s * 1e6).toFixed(1) + " µs";

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (Math.abs(n) >= 1024 && i < units.length - 1) { n /= 1024; i++; }
  return (i ? n.toFixed(1) : n.toFixed(0)) + " " + units[i];
}

const clamp = (x, low, high) => Math.min(Math.max(x, low), high);

function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

// Colours are read from the style sheet, so canvases follow light and dark like everything else.
const N_COLOURS = 8;
let theme;
const repaint = new Set();

function rgb(name) {
  const probe = $("#probe");
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number);
}

const css = (c) => `rgb(${c.map(Math.round).join(",")})`;
const mix = (a, b, t) => a.map((x, i) => x * (1 - t) + b[i] * t);

function readTheme() {
  const [bg, fg, muted, line, panel, accent, bad] = ["bg", "fg", "muted", "line", "panel", "accent", "bad"].map(rgb);
  const stages = Array.from({ length: N_COLOURS }, (_, i) => {
    const strong = rgb("s" + i);
    const shades = { F: mix(strong, bg, 0.55), B: strong, I: strong, W: mix(strong, bg, 0.78), run: mix(strong, bg, 0.3) };
    const fill = Object.fromEntries(Object.entries(shades).map(([k, c]) => [k, css(c)]));
    return { fill, faint: css(mix(strong, bg, 0.9)), on: { F: css(fg), B: css(bg), I: css(bg), W: css(fg), run: css(bg) } };
  });
  theme = { bg: css(bg), fg: css(fg), muted: css(muted), line: css(line), panel: css(panel), accent: css(accent), bad: css(bad),
    stage: (i) => stages[i % N_COLOURS] };
}

function setTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
  readTheme();
  repaint.forEach((draw) => draw());
}

const stageColour = (i) => `var(--s${i % N_COLOURS})`;

// A canvas the size of its view, drawn once per frame at most; `draw(context, width, height)`.
function canvasIn(view, draw) {
  const canvas = $("canvas", view);
  const context = canvas.getContext("2d");
  let asked = false;
  const paint = () => {
    asked = false;
    const [width, height, scale] = [view.clientWidth, view.clientHeight, window.devicePixelRatio || 1];
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.height = height + "px";
    }
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    draw(context, width, height);
    view.dataset.drawn = String(1 + Number(view.dataset.drawn ?? 0));
  };
  const ask = () => { if (!asked) { asked = true; requestAnimationFrame(paint); } };
  repaint.add(ask);
  new ResizeObserver(ask).observe(view);
  view.addEventListener("scroll", ask, { passive: true });
  ask();
  return ask;
}

// Nothing is built before it is about to be seen.
function whenSeen(node, build) {
  const seen = new IntersectionObserver((entries) => {
    if (entries.some((e) => e.isIntersecting)) { seen.disconnect(); build(); }
  }, { rootMargin: "300px" });
  seen.observe(node);
}

function fitText(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  const unit = context.measureText("m").width || 7;
  const keep = Math.floor(width / unit) - 1;
  return keep > 2 ? text.slice(0, keep) + "…" : "";
}
