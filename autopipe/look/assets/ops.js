// The op graph as one row per op in program order: values run down lanes on the left, costs are bars on the
// right. Zooming out turns rows into a map of the stages; only what is in view is drawn.
const ROW = 24;
let showOp = () => {};

function buildOps() {
  const g = data("d-graph");
  const view = $("#ops");
  const spacer = $("i", view);
  const n = g.name.length;
  const last = g.name.map((_, i) => i);
  const used = g.name.map(() => []);
  g.takes.forEach((inputs, i) => inputs.forEach((p) => { last[p] = Math.max(last[p], i); used[p].push(i); }));
  const nLanes = Math.max(...g.lane) + 1;
  const cost = g.forward.map((f, i) => f + g.backward[i]);
  const top = Math.max(...cost) || 1;
  const cross = new Set(g.cross);
  const stage = g.stages.map((s) => (s.length ? s[0] : -1));
  let row = ROW;
  let selected = -1;

  const laneX = (lane, step) => 14 + lane * step;

  function draw(c, width, height) {
    const from = view.scrollTop;
    const y = (i) => (i + 0.5) * row - from;
    const a = clamp(Math.floor(from / row) - 1, 0, n - 1);
    const b = clamp(Math.ceil((from + height) / row) + 1, 0, n - 1);
    const step = clamp((width * 0.3) / nLanes, 1.5, 12);
    const text = laneX(nLanes, step) + 8;
    bands(c, width, a, b, from);
    c.lineWidth = 1.4;
    for (let i = 0; i <= b; i++) if (last[i] >= a && last[i] > i) lifeline(c, i, y, step);
    if (row >= 3) for (let i = a; i <= b; i++) joins(c, i, y, step);
    for (let i = a; i <= b; i++) dot(c, i, y(i), step);
    labels(c, width, a, b, y, text);
  }

  // Stages as faint bands, so that a cut is where the tint changes.
  function bands(c, width, a, b, from) {
    for (let i = a; i <= b; ) {
      let j = i;
      while (j <= b && stage[j] === stage[i]) j++;
      if (stage[i] >= 0) {
        c.fillStyle = theme.stage(stage[i]).faint;
        c.fillRect(0, i * row - from, width, (j - i) * row);
      }
      i = j;
    }
    if (selected >= a && selected <= b) {
      c.strokeStyle = theme.accent;
      c.lineWidth = 1.5;
      c.strokeRect(0.75, selected * row - from + 0.75, width - 1.5, Math.max(row - 1.5, 2));
    }
  }

  function tint(i) {
    return stage[i] < 0 ? theme.muted : theme.stage(stage[i]).fill.B;
  }

  function lifeline(c, i, y, step) {
    const x = laneX(g.lane[i], step);
    c.strokeStyle = i === selected ? theme.fg : tint(i);
    c.setLineDash(cross.has(i) ? [4, 3] : []);
    c.beginPath();
    c.moveTo(x, y(i));
    c.lineTo(x, y(last[i]) - (row >= 3 ? Math.min(row, 16) * 0.5 : 0));
    c.stroke();
    c.setLineDash([]);
  }

  function joins(c, i, y, step) {
    const x = laneX(g.lane[i], step);
    const bend = Math.min(row, 16) * 0.5;
    for (const p of g.takes[i]) {
      const from = laneX(g.lane[p], step);
      c.strokeStyle = p === selected || i === selected ? theme.fg : tint(p);
      c.beginPath();
      c.moveTo(from, y(i) - bend);
      c.bezierCurveTo(from, y(i) - bend * 0.3, x, y(i) - bend * 0.7, x, y(i));
      c.stroke();
    }
  }

  function dot(c, i, y, step) {
    const r = clamp(row / 5, 0.6, 4);
    c.fillStyle = tint(i);
    c.beginPath();
    if (g.kind[i] === "module") c.rect(laneX(g.lane[i], step) - r, y - r, 2 * r, 2 * r);
    else c.arc(laneX(g.lane[i], step), y, r, 0, 7);
    c.fill();
  }

  // Where rows are too thin for words, the costliest op of each line of text speaks for its neighbours.
  function labels(c, width, a, b, y, x) {
    const every = Math.max(1, Math.ceil(15 / row));
    const bar = width > 700 ? 130 : width > 480 ? 80 : 40;
    const size = width > 700 ? 210 : 0;
    c.textBaseline = "middle";
    for (let i = a - (a % every); i <= b; i += every) {
      let best = i;
      for (let j = i; j < Math.min(i + every, n); j++) if (cost[j] > cost[best]) best = j;
      const at = y(best);
      const room = width - x - bar - size - 70;
      c.font = "12px " + getComputedStyle(document.body).getPropertyValue("--mono");
      c.fillStyle = g.kind[best] === "input" || g.kind[best] === "output" ? theme.muted : theme.fg;
      const name = fitText(c, g.name[best], room);
      c.fillText(name, x, at);
      const used = c.measureText(name).width + 12;
      c.fillStyle = theme.muted;
      if (row >= 15 && room - used > 60) c.fillText(fitText(c, g.target[best], room - used), x + used, at);
      if (size && row >= 15) c.fillText(fitText(c, g.value[best], size - 10), width - bar - size - 60, at);
      drawCost(c, best, width - bar - 12, at, bar);
    }
  }

  function drawCost(c, i, x, y, bar) {
    if (!cost[i]) return;
    c.fillStyle = tint(i);
    c.fillRect(x, y - 3, Math.max(1, (bar * cost[i]) / top), 6);
    c.fillStyle = theme.muted;
    c.textAlign = "right";
    c.fillText(seconds(cost[i]), x - 6, y);
    c.textAlign = "left";
  }

  const ask = canvasIn(view, draw);

  function zoom(factor, at = view.clientHeight / 2) {
    const anchor = (view.scrollTop + at) / row;
    row = clamp(row * factor, Math.min(view.clientHeight / n, ROW), 40);
    spacer.style.height = Math.max(0, n * row - view.clientHeight) + "px";
    view.scrollTop = anchor * row - at;
    view.dataset.row = row.toFixed(3);
    ask();
  }

  function select(i, jump) {
    selected = clamp(i, 0, n - 1);
    const y = selected * row;
    if (jump || y < view.scrollTop) view.scrollTop = y - (jump ? view.clientHeight / 3 : 0);
    else if (y + row > view.scrollTop + view.clientHeight) view.scrollTop = y + row - view.clientHeight;
    detail(selected);
    ask();
  }

  function detail(i) {
    const links = (rows) => (rows.length ? rows.slice(0, 24).map((r) =>
      element("button", { type: "button", textContent: g.name[r], onclick: () => select(r, true) })) : ["–"]);
    const facts = [
      ["calls", [`${g.kind[i]} ${g.target[i]}`]],
      ["stage", [g.stages[i].length ? g.stages[i].join(", ") + (g.stages[i].length > 1 ? " (computed in each)" : "") : "–"]],
      ["value", [g.value[i] ? `${g.value[i]}, ${bytes(g.bytes[i])}` + (cross.has(i) ? ", sent to a later stage" : "") : "–"]],
      ["time", [cost[i] ? `${seconds(g.forward[i])} forward, ${seconds(g.backward[i])} backward` : "–"]],
      ["memory", [`${bytes(g.parameters[i])} of weights, ${bytes(g.saved[i])} saved for backward`]],
      ["takes", links(g.takes[i])], ["used by", links(used[i])], ["source", [g.source[i] || "–"]],
    ];
    const list = element("dl");
    facts.forEach(([key, value]) => list.append(element("dt", { textContent: key }), element("dd", {}, ...value)));
    $("#detail").replaceChildren(element("b", { className: "mono", textContent: g.name[i] }), list);
  }

  showOp = (i) => {
    if (row < 15) zoom(ROW / row);
    select(i, true);
    $("#graph").scrollIntoView();
    view.focus({ preventScroll: true });
  };

  view.addEventListener("click", (event) => {
    const y = event.clientY - view.getBoundingClientRect().top + view.scrollTop;
    select(Math.floor(y / row));
    view.focus({ preventScroll: true });
  });
  view.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    zoom(Math.exp(-event.deltaY / 200), event.clientY - view.getBoundingClientRect().top);
  }, { passive: false });
  view.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.floor(view.clientHeight / row) - 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -n, End: n };
    if (event.key in moves) select(Math.max(selected, 0) + moves[event.key]);
    else if (event.key === "+" || event.key === "=") zoom(1.4);
    else if (event.key === "-") zoom(1 / 1.4);
    else if (event.key === "0") zoom(0);
    else return;
    event.preventDefault();
  });
  $("#ops-in").onclick = () => zoom(1.6);
  $("#ops-out").onclick = () => zoom(1 / 1.6);
  $("#ops-all").onclick = () => zoom(0);
  let found = -1;
  $("#ops-find").addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    const words = event.target.value.toLowerCase();
    if (!words) return;
    for (let k = 1; k <= n; k++) {
      const i = (found + k + n) % n;
      if (g.name[i].toLowerCase().includes(words) || g.target[i].toLowerCase().includes(words)) {
        found = i;
        if (row < 15) zoom(ROW / row);
        return select(i, true);
      }
    }
    $("#detail").textContent = `no op has “${event.target.value}” in its name or target`;
  });
  zoom(1);
  const first = cost.indexOf(Math.max(...cost));
  if (first >= 0) { selected = first; detail(first); }
}
