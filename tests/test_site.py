"""The site: its scripts run as they stand, every error and figure is on a page, and sphinx builds it."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
from processes import run_ranks

import autopipe
from autopipe import errors

ROOT = pathlib.Path(__file__).parents[1]
SITE = ROOT / "notebooks"
PAGES = [p for p in sorted(SITE.rglob("*.md")) if "```python" in p.read_text()]


def script(page):
    """A page's blocks in order, as one file."""
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))


@pytest.mark.timeout(300)
def test_pages_run_alone(tmp_path):
    """One process for all pages: importing torch takes longer than most of them."""
    for page in PAGES:
        (tmp_path / f"{page.stem}.py").write_text(script(page))
    code = "import runpy, sys\nfor path in sys.argv[1:]: print(path, flush=True), runpy.run_path(path)"
    paths = [f"{page.stem}.py" for page in PAGES]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, *paths], env=environment, cwd=tmp_path, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-300:] + done.stderr[-2000:]


@pytest.mark.timeout(200)
def test_the_training_loop_runs_on_two_ranks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(script(SITE / "training.md"))
    first, second = run_ranks(path, 2)
    assert re.findall(r"loss \S+", first) == re.findall(r"loss \S+", second)
    assert "goes on after step 35" in first


def test_every_error_has_its_remedy():
    text = (SITE / "errors.md").read_text()
    named = set(re.findall(r"^\| `(\w+)`", text, re.M))
    assert named == set(errors.__all__) - {"AutopipeError"}


def test_every_public_name_is_in_the_reference():
    reference, listed = (SITE / "api.md").read_text(), (SITE / "errors.md").read_text()
    for name in autopipe.__all__:
        assert f"autopipe.{name}\n" in reference or f"| `{name}` |" in listed or name == "AutopipeError", name


def test_every_benchmark_is_listed():
    text = (SITE / "figures.md").read_text()
    benchmarks = {p.parent.name for p in (ROOT / "benchmarks").glob("*/README.md")}
    assert set(re.findall(r"^\| `(\w+)`", text, re.M)) == benchmarks


@pytest.mark.timeout(240)
def test_sphinx_builds_the_site(tmp_path):
    pytest.importorskip("furo", reason="the docs extra is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(SITE), str(tmp_path)],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    page = (tmp_path / "api.html").read_text()
    assert 'id="autopipe.split"' in page
    assert (tmp_path / "1_quickstart.html").exists()
