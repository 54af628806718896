// Puts the views on the page, each when it is about to be seen.
const THEMES = ["auto", "light", "dark"];

function main() {
  document.body.append(element("span", { id: "probe", hidden: true }));
  readTheme();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme());
  const button = $("#theme");
  button.hidden = false;
  button.onclick = () => {
    const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % THEMES.length];
    setTheme(next);
    button.textContent = "Theme: " + next;
  };
  const views = { "#tree": buildTree, "#ops": buildOps, "#gantt": buildGantt, "#memory-rows": buildMemory };
  for (const [where, build] of Object.entries(views)) if ($(where)) whenSeen($(where), build);
  addEventListener("beforeprint", () => repaint.forEach((draw) => draw()));
  document.documentElement.dataset.ready = "yes";
}

main();
