// Schedule and memory over one shared time axis: a row per rank, zoomed and panned together.
const KINDS = ["F", "B", "I", "W", "run", "uneven", "ties", "loss", "optimizer"];
const KIND_NAMES = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient",
  run: "actions too short to draw one by one", uneven: "waits for microbatches that take longer than others",
  ties: "sum of tied gradients", loss: "waits for the loss", optimizer: "optimizer step" };
const AXIS = 22;
const GUTTER = 52;

function decode(flat) {
  const n = flat.length / 5;
  const track = { n, start: new Float64Array(n), end: new Float64Array(n), stage: [], kind: [], microbatch: [] };
  let now = 0;
  for (let i = 0; i < n; i++) {
    now += flat[5 * i];
    track.start[i] = now;
    now += flat[5 * i + 1];
    track.end[i] = now;
    track.stage.push(flat[5 * i + 2]);
    track.kind.push(KINDS[flat[5 * i + 3]]);
    track.microbatch.push(flat[5 * i + 4]);
  }
  return track;
}

function firstEndingAfter(track, t) {
  let [low, high] = [0, track.n];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (track.end[middle] <= t) low = middle + 1;
    else high = middle;
  }
  return low;
}

const isAction = (kind) => kind.length === 1;
const say = (track, i) => track.kind[i] === "run" ? `${track.microbatch[i]} actions`
  : isAction(track.kind[i]) ? `${track.stage[i]}${track.kind[i]}${track.microbatch[i]}` : track.kind[i];

function tell(track, i, rank, way) {
  const times = `${seconds(track.start[i] / 1e9)} to ${seconds(track.end[i] / 1e9)}, ${seconds((track.end[i] - track.start[i]) / 1e9)} long`;
  const what = KIND_NAMES[track.kind[i]]
    + (isAction(track.kind[i]) ? ` of microbatch ${track.microbatch[i]} through stage ${track.stage[i]}` : "");
  return [`${say(track, i)} ${way}`, `${what}, rank ${rank}`, times];
}

function ticks(from, to, room) {
  const raw = ((to - from) * 90) / room;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= raw);
  const out = [];
  for (let t = Math.ceil(from / step) * step; t <= to; t += step) out.push(t);
  return out;
}

// Rows under one time axis. `paint(context, rank, y, height, x)` draws one, `hit(rank, time, y)` describes it.
function timeRows(view, range, n, height, { paint, hit, move }) {
  const spacer = $("i", view);
  const size = () => Math.min(AXIS + n * height, Math.max(180, Math.min(560, innerHeight * 0.7)));
  const tip = $(".tip", view.parentElement);
  const x = (t) => GUTTER + ((t - range.from) / (range.to - range.from)) * (view.clientWidth - GUTTER - 8);
  const timeAt = (px) => range.from + ((px - GUTTER) / (view.clientWidth - GUTTER - 8)) * (range.to - range.from);
  view.style.height = size() + 2 + "px";
  spacer.style.display = "block";
  spacer.style.height = Math.max(0, AXIS + n * height - size()) + "px";

  const ask = canvasIn(view, (c, width, tall) => {
    const a = clamp(Math.floor(view.scrollTop / height), 0, n - 1);
    const b = clamp(Math.ceil((view.scrollTop + tall) / height), 0, n - 1);
    const labelled = Math.max(1, Math.ceil(14 / height));
    c.font = "11px system-ui, sans-serif";
    c.textBaseline = "middle";
    c.strokeStyle = theme.line;
    c.lineWidth = 1;
    for (const t of ticks(range.from, range.to, width - GUTTER)) c.strokeRect(Math.round(x(t)) + 0.5, AXIS, 0, tall);
    c.save();
    c.beginPath();
    c.rect(GUTTER, AXIS, width - GUTTER - 7, tall);
    c.clip();
    for (let r = a; r <= b; r++) paint(c, r, AXIS + r * height - view.scrollTop, height, x);
    c.restore();
    c.fillStyle = theme.muted;
    for (let r = a; r <= b; r++) {
      const y = AXIS + (r + 0.5) * height - view.scrollTop;
      if (r % labelled === 0 && y > AXIS) c.fillText(n > 99 ? `r ${r}` : `rank ${r}`, 6, Math.max(y, AXIS + 6));
    }
    c.fillStyle = theme.panel;
    c.fillRect(0, 0, width, AXIS - 1);
    c.fillStyle = theme.muted;
    c.textAlign = "center";
    for (const t of ticks(range.from, range.to, width - GUTTER)) if (x(t) < width - 30) c.fillText(seconds(t / 1e9), x(t), AXIS / 2);
    c.textAlign = "left";
  });
  range.draw.add(ask);

  const place = (event) => {
    const box = view.getBoundingClientRect();
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    const rank = Math.floor((py - AXIS + view.scrollTop) / height);
    return { px, py, time: timeAt(px), rank, inside: py > AXIS && rank >= 0 && rank < n, part: ((py - AXIS + view.scrollTop) % height) / height };
  };
  const pointers = new Map();
  view.addEventListener("pointerdown", (event) => { pointers.set(event.pointerId, event); view.setPointerCapture(event.pointerId); });
  for (const name of ["pointerup", "pointercancel"]) view.addEventListener(name, (event) => pointers.delete(event.pointerId));
  view.addEventListener("pointerleave", () => { tip.style.display = "none"; });
  view.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (before) {
      const others = [...pointers.values()].filter((p) => p.pointerId !== event.pointerId);
      const apart = (p) => Math.hypot(p.clientX - others[0].clientX, p.clientY - others[0].clientY) || 1;
      if (others.length) range.zoom(apart(event) / apart(before), place(event).time);
      else range.pan(timeAt(before.clientX) - timeAt(event.clientX));
      pointers.set(event.pointerId, event);
      tip.style.display = "none";
      return;
    }
    const at = place(event);
    const lines = at.inside && at.px > GUTTER ? hit(at.rank, at.time, at.part) : null;
    tip.style.display = lines ? "block" : "none";
    if (!lines) return;
    tip.textContent = lines.join("\n");
    const outer = view.parentElement.getBoundingClientRect();
    tip.style.left = clamp(event.clientX - outer.left + 14, 0, outer.width - tip.offsetWidth) + "px";
    tip.style.top = event.clientY - outer.top + 16 + "px";
  });
  view.addEventListener("wheel", (event) => {
    if (event.ctrlKey) range.zoom(Math.exp(-event.deltaY / 200), place(event).time);
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) range.pan(timeAt(event.deltaX) - timeAt(0));
    else return;
    event.preventDefault();
  }, { passive: false });
  view.addEventListener("dblclick", (event) => range.zoom(2, place(event).time));
  view.addEventListener("keydown", (event) => {
    if (event.key === "+" || event.key === "=") range.zoom(1.6);
    else if (event.key === "-") range.zoom(1 / 1.6);
    else if (event.key === "0") range.zoom(0);
    else if (!move?.(event.key, height)) return;
    event.preventDefault();
  });
  return ask;
}

function timeRange(end) {
  const range = { from: 0, to: end, draw: new Set() };
  const set = (from, span) => {
    span = clamp(span, end * 1e-5, end);
    range.from = clamp(from, 0, end - span);
    range.to = range.from + span;
    range.draw.forEach((ask) => ask());
  };
  range.pan = (by) => set(range.from + by, range.to - range.from);
  range.zoom = (factor, at = (range.from + range.to) / 2) => {
    if (!factor) return set(0, end);
    const span = clamp((range.to - range.from) / factor, end * 1e-5, end);
    return set(at - ((at - range.from) * span) / (range.to - range.from), span);
  };
  range.show = (from, to) => {
    if (from < range.from || to > range.to) set(from - (range.to - range.from) / 3, range.to - range.from);
  };
  return range;
}

let sharedRange;
function timeData() {
  const d = data("d-time");
  d.tracks ??= d.predicted.map(decode);
  d.tracks.forEach((track, rank) => { track.critical ??= new Set(d.critical[rank]); });
  d.runs ??= d.ran?.map(decode);
  sharedRange ??= timeRange(Math.max(d.step, d.measured ?? 0) * 1e9);
  return [d, sharedRange];
}

function buildGantt() {
  const [d, range] = timeData();
  const n = d.tracks.length;
  const height = clamp(Math.floor(440 / n), 4, d.runs ? 52 : 36);
  const picked = { rank: 0, i: -1 };
  const split = d.runs ? 0.54 : 0.9;

  function bars(c, track, rank, y, h, x, mark) {
    let until = -1;
    let count = 0;
    for (let i = firstEndingAfter(track, range.from); i < track.n && track.start[i] <= range.to; i++) {
      const [left, right] = [x(track.start[i]), x(track.end[i])];
      if (right < until + 0.6) continue;
      const width = Math.max(right - left, 0.6);
      const look = theme.stage(track.stage[i]);
      c.fillStyle = look.fill[track.kind[i]] ?? theme.line;
      c.fillRect(left, y, width > 3 ? width - 1 : width, h);
      until = right;
      count++;
      if (h >= 11 && width > 15) {
        c.fillStyle = look.on[track.kind[i]] ?? theme.fg;
        const words = width > 44 || !isAction(track.kind[i]) ? say(track, i) : String(track.microbatch[i]);
        if (c.measureText(words).width < width - 4) c.fillText(words, left + 4, y + h / 2 + 0.5);
      }
      if (track.critical?.has(i)) {
        c.fillStyle = theme.fg;
        c.fillRect(left, y + h - 1.5, width > 3 ? width - 1 : width, 1.5);
      }
      if (mark === i) { c.strokeStyle = theme.fg; c.lineWidth = 2; c.strokeRect(left + 1, y + 1, Math.max(width - 3, 1), h - 2); }
    }
    return count;
  }

  const find = (rank, time, part) => {
    const track = d.runs && part > split ? d.runs[rank] : d.tracks[rank];
    const i = firstEndingAfter(track, time);
    return i < track.n && track.start[i] <= time ? [track, i, track === d.tracks[rank] ? "predicted" : "measured"] : null;
  };
  const view = $("#gantt");
  const ask = timeRows(view, range, n, height, {
    paint(c, r, y, h, x) {
      const pad = h > 12 ? h * 0.08 : 0;
      bars(c, d.tracks[r], r, y + pad, h * (split - (h > 12 ? 0.08 : 0.1)), x, picked.rank === r ? picked.i : -1);
      if (d.runs) bars(c, d.runs[r], r, y + h * (split + 0.02), h * 0.38, x, -1);
    },
    hit(rank, time, part) {
      const found = find(rank, time, part);
      return found && tell(found[0], found[1], rank, found[2]);
    },
    move(key, h) {
      const jumps = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
      if (!(key in jumps)) return false;
      const [down, right] = jumps[key];
      const now = d.tracks[picked.rank].start[Math.max(picked.i, 0)] ?? 0;
      picked.rank = clamp(picked.rank + down, 0, n - 1);
      const track = d.tracks[picked.rank];
      picked.i = clamp(down ? firstEndingAfter(track, now) : picked.i + right, 0, track.n - 1);
      if (!track.n) return true;
      range.show(track.start[picked.i], track.end[picked.i]);
      const top = picked.rank * h;
      if (top < view.scrollTop) view.scrollTop = top;
      if (top + h + AXIS > view.scrollTop + view.clientHeight) view.scrollTop = top + h + AXIS - view.clientHeight;
      const [name, ...rest] = tell(track, picked.i, picked.rank, "predicted");
      $("#gantt-says").replaceChildren(element("b", { textContent: name }), " " + rest.join(", "));
      ask();
      return true;
    },
  });
  $("#gantt-in").onclick = () => range.zoom(1.8);
  $("#gantt-out").onclick = () => range.zoom(1 / 1.8);
  $("#gantt-all").onclick = () => range.zoom(0);
}

function buildMemory() {
  const [d, range] = timeData();
  const n = d.memory.length;
  const height = clamp(Math.floor(460 / n), 26, 84);
  const peaks = d.memory.map((m) => m.reduce((top, v, i) => (i % 2 ? Math.max(top, v) : top), 0));
  const peak = Math.max(...peaks, ...d.held, 1);
  const limit = Math.max(...d.limits.filter((v) => v !== null), 0);
  const top = limit && limit < peak * 4 ? Math.max(limit, peak) * 1.08 : peak * 1.15;

  function at(memory, t) {
    let [low, high] = [0, memory.length / 2];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (memory[2 * middle] <= t) low = middle + 1;
      else high = middle;
    }
    return low ? memory[2 * low - 1] : 0;
  }

  const view = $("#memory-rows");
  timeRows(view, range, n, height, {
    paint(c, r, y, h, x) {
      const m = d.memory[r];
      const floor = y + h - 2;
      const level = (v) => floor - (v / top) * (h - 6);
      const look = theme.stage(d.stages[r][0] ?? 0);
      let value = at(m, range.from);
      c.beginPath();
      c.moveTo(x(range.from), floor);
      c.lineTo(x(range.from), level(value));
      let column = -1;
      for (let i = 0; i < m.length && m[i] <= range.to; i += 2) {
        if (m[i] <= range.from) continue;
        const px = x(m[i]);
        if (m.length > 4000 && px - column < 0.3 && m[i + 1] <= value) continue;
        c.lineTo(px, level(value));
        value = m[i + 1];
        c.lineTo(px, level(value));
        column = px;
      }
      c.lineTo(x(range.to), level(value));
      c.lineTo(x(range.to), floor);
      c.fillStyle = look.fill.W;
      c.fill();
      c.strokeStyle = look.fill.B;
      c.lineWidth = 1.2;
      c.stroke();
      const own = d.limits[r];
      if (own !== null && own <= top) {
        c.strokeStyle = theme.bad;
        c.setLineDash([5, 3]);
        c.beginPath();
        c.moveTo(GUTTER, Math.round(level(own)) + 0.5);
        c.lineTo(view.clientWidth, Math.round(level(own)) + 0.5);
        c.stroke();
        c.setLineDash([]);
      }
      const held = d.held[r];
      if (held !== null) {
        c.strokeStyle = theme.fg;
        c.lineWidth = 1.5;
        c.beginPath();
        c.moveTo(GUTTER, level(held));
        c.lineTo(view.clientWidth, level(held));
        c.stroke();
      }
      if (h >= 20) {
        const words = "peak " + bytes(peaks[r]) + (held === null ? "" : `, measured ${bytes(held)}`);
        const crossed = own !== null && own <= top && level(own) > floor - 19;
        const base = crossed ? level(own) - 11 : floor - 9;
        c.fillStyle = theme.bg;
        c.fillRect(GUTTER + 4, base - 6, c.measureText(words).width + 6, 13);
        c.fillStyle = own !== null && peaks[r] > own ? theme.bad : theme.fg;
        c.fillText(words, GUTTER + 7, base + 1);
      }
    },
    hit(rank, time) {
      if (time < range.from || time > range.to) return null;
      const own = d.limits[rank];
      return [`rank ${rank} at ${seconds(time / 1e9)}`, `${bytes(at(d.memory[rank], time))} predicted`, own === null ? "no limit given" : `limit ${bytes(own)}`];
    },
  });
}
