"""Runs every notebook from a fresh kernel, saves it with its outputs, and says how long each took.

``python -m benchmarks.look.notebooks [3 5]`` (numbers: only those); for two quiet cores.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile

import nbformat

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tests" / "notebooks"))

from fresh_kernel import LIMIT_S, NOTEBOOKS, execute


def main() -> None:
    wanted = sys.argv[1:]
    slow = []
    for path in NOTEBOOKS:
        if wanted and path.name[0] not in wanted:
            continue
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as folder:
            took_s = execute(notebook, folder, 10 * LIMIT_S)
        nbformat.write(notebook, path)
        print(f"{took_s:5.1f} s  {path.name}", flush=True)
        slow += [path.name] if took_s > LIMIT_S else []
    if slow:
        raise SystemExit(f"over {LIMIT_S} s: {', '.join(slow)}")


if __name__ == "__main__":
    main()
