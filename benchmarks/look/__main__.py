"""How quickly things can be seen: the command line from cold, a plan of a meta 70B, the report in a browser.

``python -m benchmarks.look [--out look.json]``; result and environment are in the README beside it.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tests" / "look"))

import look_examples
from look_browser import browser, missing

from autopipe.look import report

LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
SETTLE = (
    "const done = arguments[0];requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 0)))"
)
VIEWS = ("#tree", "#ops", "#gantt", "#memory-rows")


def seconds_of(command: list[str], repeats: int) -> list[float]:
    """Wall seconds of a command, each time in a process of its own."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        times.append(time.perf_counter() - start)
    return times


def command_line(repeats: int) -> dict[str, Any]:
    """``--help`` and a plan of a 70B Llama on the meta device, from cold processes."""
    autopipe = [sys.executable, "-m", "autopipe"]
    out: dict[str, Any] = {"help_s": seconds_of([*autopipe, "--help"], repeats)}
    with tempfile.TemporaryDirectory() as folder:
        config = pathlib.Path(folder) / "config.json"
        config.write_text(json.dumps(LLAMA_70B))
        words = ["plan", f"hf:{config}", "--meta", "--device", "H200", "-n", "16", "--dtype", "bfloat16"]
        sizes = ["--batch", "16", "--seq", "1024", "--json"]
        out["plan_70b_s"] = seconds_of([*autopipe, *words, *sizes], 2)
    return out


def pages() -> list[dict[str, Any]]:
    """Making, opening and first drawing of reports of three sizes."""
    sizes = ((12, 4, 8), (250, 8, 16), (2500, 1000, 32))
    with tempfile.TemporaryDirectory() as folder, browser(folder + "/profile") as driver:
        driver.get("about:blank")
        return [_page(driver, pathlib.Path(folder), *size) for size in sizes]


def _page(
    driver: Any, folder: pathlib.Path, n_blocks: int, n_stages: int, n_microbatches: int
) -> dict[str, Any]:
    graph = look_examples.graph(n_blocks)
    costs = look_examples.costs(graph)
    plan = look_examples.plan(graph, costs, n_stages, n_microbatches)
    start = time.perf_counter()
    text = report(plan, graph=graph, costs=costs)
    made_s = time.perf_counter() - start
    path = folder / "report.html"
    path.write_text(text, encoding="utf-8")
    opened = []
    for _ in range(5):
        start = time.perf_counter()
        driver.get(path.as_uri())
        opened.append(time.perf_counter() - start)
    views = {}
    for view in VIEWS:
        start = time.perf_counter()
        driver.execute_script("document.querySelector(arguments[0]).scrollIntoView()", view)
        driver.execute_async_script(SETTLE)
        views[view.lstrip("#")] = time.perf_counter() - start
    return {
        "ops": len(graph.ops),
        "stages": n_stages,
        "actions": 2 * n_stages * n_microbatches,
        "bytes": len(text),
        "made_s": made_s,
        "opened_s": statistics.median(opened),
        "first_view_s": views,
        "console_errors": len(driver.get_log("browser")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    result: dict[str, Any] = command_line(options.repeats)
    result["reports"] = missing() or pages()
    text = json.dumps(result, indent=1)
    if options.out is not None:
        options.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
