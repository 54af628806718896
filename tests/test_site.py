"""The site: its scripts run as they stand, every error and figure is on a page, and sphinx builds it."""

import pathlib
import re

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
    names = [f"{page.stem}.py" for page in PAGES]
    for page, name in zip(PAGES, names, strict=True):
        (tmp_path / name).write_text(script(page))
    path = tmp_path / "run_pages.py"
    path.write_text(
        f"import os, runpy, sys\nos.chdir({str(tmp_path)!r})\n"
        "for name in sys.argv[1:]: print(name, flush=True), runpy.run_path(name)"
    )
    (output,) = run_ranks(path, 0, *names, timeout_s=240)
    assert all(name in output for name in names)


@pytest.mark.timeout(200)
def test_the_training_loop_runs_on_two_ranks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(script(SITE / "training.md"))
    first, second = run_ranks(path, 2)
    assert re.findall(r"loss \S+", first) == re.findall(r"loss \S+", second)
    assert "goes on after step 33" in first  # a batch in parts is one


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
    path, site = tmp_path / "build.py", tmp_path / "site"
    path.write_text("import sys\nfrom sphinx.cmd.build import main\nsys.exit(main(sys.argv[1:]))")
    run_ranks(path, 0, "-q", "-W", "--keep-going", SITE, site, timeout_s=200)
    page = (site / "api.html").read_text()
    assert 'id="autopipe.split"' in page
    assert (site / "1_quickstart.html").exists()
