// The module tree: a row per module, its stages as a strip, its share of the time as a bar.
const MOST_CHILDREN = 100;

function treeRow(node, whole) {
  const strip = element("span", { className: "strip" });
  const total = node.g.reduce((sum, [, t]) => sum + t, 0);
  for (const [stage, t] of node.g) {
    const part = element("i");
    part.style.background = stageColour(stage);
    part.style.flexGrow = total ? t / total : 1;
    strip.append(part);
  }
  const stages = node.g.map(([s]) => s);
  const label = stages.length > 1 ? `stages ${stages[0]}–${stages.at(-1)}` : stages.length ? `stage ${stages[0]}` : "no stage";
  strip.title = label;
  const fill = element("i");
  fill.style.width = (whole ? (100 * node.s) / whole : 0) + "%";
  const bar = element("span", { className: "bar" }, fill);
  Object.assign(bar.style, { width: "100%", margin: "0" });
  return element("span", { className: "row" },
    element("span", { className: "name", textContent: node.n, title: node.n }),
    element("span", {}, strip, element("span", { className: "hidden", hidden: true, textContent: label })),
    bar,
    element("span", { className: "n", textContent: node.s ? seconds(node.s) : "–" }),
    element("span", { className: "n", textContent: node.b ? bytes(node.b) : "–" }));
}

function treeNode(node, whole, depth) {
  const row = treeRow(node, whole);
  $(".name", row).style.paddingLeft = Math.min(depth, 8) * 1.1 + "em";
  if (!node.c) {
    if (node.r !== undefined && $("#ops")) {
      row.tabIndex = 0;
      row.style.cursor = "pointer";
      row.onclick = () => showOp(node.r);
      row.onkeydown = (event) => { if (event.key === "Enter") showOp(node.r); };
    }
    return row;
  }
  const details = element("details", {}, element("summary", {}, row));
  details.addEventListener("toggle", () => {
    if (details.children.length === 1) details.append(...groups(node.c).map((child) => treeNode(child, whole, depth + 1)));
  });
  return details;
}

// Hundreds of siblings become ranges of at most a hundred, so opening one stays instant.
function groups(children) {
  if (children.length <= MOST_CHILDREN) return children;
  const size = Math.max(MOST_CHILDREN, Math.ceil(children.length / MOST_CHILDREN));
  const out = [];
  for (let i = 0; i < children.length; i += size) {
    const c = children.slice(i, i + size);
    const stages = new Map();
    c.forEach((child) => child.g.forEach(([s, t]) => stages.set(s, (stages.get(s) ?? 0) + t)));
    const sum = (key) => c.reduce((total, child) => total + child[key], 0);
    out.push({ n: `${c[0].n} … ${c.at(-1).n}`, s: sum("s"), b: sum("b"), g: [...stages].sort((a, b) => a[0] - b[0]), c });
  }
  return out;
}

function buildTree() {
  const root = data("d-tree");
  const head = element("div", { className: "row head" }, ...["module", "stages", "time", "", "weights"].map((t, i) =>
    element("span", { textContent: t, className: i > 2 ? "n" : "" })));
  const top = treeNode(root, root.s, 0);
  $("#tree").append(head, top);
  // opened down to where the time spreads out
  let [node, open] = [root, top];
  while (node?.c) {
    open.open = true;
    open.dispatchEvent(new Event("toggle"));
    const shown = groups(node.c);
    const most = shown.reduce((best, child, i) => (child.s > shown[best].s ? i : best), 0);
    if (shown[most].s < node.s / 2) break;
    [node, open] = [shown[most], open.children[most + 1]];
  }
}
