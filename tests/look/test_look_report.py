"""The report in a real browser: it loads clean, answers to mouse and keys, and stays quick when large."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import random
import re
import time

import look_examples
import pytest
from look_browser import browser, missing

from autopipe.look import report
from autopipe.schedule import Schedule
from autopipe.simulator import Report, Timeline, simulate

pytestmark = pytest.mark.timeout(120)
LOADED_MACHINE = 3
"""A report of 1,000 ops opens in well under a second on an idle machine; tests often share theirs."""
needs_browser = pytest.mark.skipif(bool(missing()), reason=missing() or "present")


def example(n_blocks=12, n_stages=4, n_microbatches=8, with_measured=True):
    graph = look_examples.graph(n_blocks)
    costs = look_examples.costs(graph)
    plan = look_examples.plan(graph, costs, n_stages, n_microbatches)
    measured = None
    if with_measured:
        draw = random.Random(0)
        slower = tuple(
            dataclasses.replace(s, forward_s=s.forward_s * draw.uniform(1, 1.2)) for s in plan.stages
        )
        measured = dataclasses.replace(simulate(dataclasses.replace(plan, stages=slower)), source="measured")
    return plan, report(plan, graph=graph, costs=costs, measured=measured)


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with browser(str(tmp_path_factory.mktemp("chromium"))) as opened:
        yield opened


def show(driver, tmp_path, page):
    path = tmp_path / "report.html"
    path.write_text(page, encoding="utf-8")
    driver.get(path.as_uri())
    return driver


def settle(driver):
    driver.execute_async_script(
        "const done = arguments[0];"
        "requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 0)))"
    )


def see(driver, selector):
    """Scroll a part into view and wait until it has drawn."""
    driver.execute_script("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector)
    for _ in range(3):
        settle(driver)
    return driver.find_element("css selector", selector)


def ink(driver, selector):
    """How many distinct colours a canvas shows: one when nothing was drawn."""
    return driver.execute_script(
        "const c = document.querySelector(arguments[0] + ' canvas');"
        "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; const s = new Set();"
        "for (let i = 0; i < d.length; i += 4) s.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]); return s.size",
        selector,
    )


def press(driver, selector):
    see(driver, selector).click()


def keys(driver, element, *names):
    element.send_keys(*names)
    settle(driver)


def test_the_page_asks_for_nothing_from_outside():
    _, page = example()

    class Links(html.parser.HTMLParser):
        found: list[str] = []  # noqa: RUF012 - one parser, one list

        def handle_starttag(self, tag, attrs):
            self.found += [v for k, v in attrs if k in ("src", "href", "srcset", "action")]

    Links().feed(page)
    assert Links.found
    assert all(link.startswith(("#", "data:,")) for link in Links.found)
    assert "@import" not in page
    assert not re.search(r"url\(|fetch\(|XMLHttpRequest|import\(", page)


def test_names_cannot_break_out_of_the_page():
    graph = look_examples.graph(2)
    ops = (*graph.ops[:-1], dataclasses.replace(graph.ops[-1], target="</script><script>alert(1)</script>"))
    evil = dataclasses.replace(graph, model="<img src=x onerror=alert(1)>", ops=ops)
    costs = look_examples.costs(evil)
    page = report(look_examples.plan(evil, costs, 2), graph=evil, costs=costs)
    assert "<img src=x" not in page
    assert "</script><script>alert" not in page


def test_every_section_is_there():
    _, page = example()
    titles = re.findall(r"<h2>(.*?)</h2>", page)
    assert titles == [
        "Stages", "Modules", "Op graph", "Boundaries", "Schedule", "Memory", "Why this cut", "Assumptions",
    ]  # fmt: skip


def run_report(plan, **fields):
    timeline = simulate(plan)
    events = tuple(tuple(e) for e in timeline.events if not isinstance(e.action, str))
    return Report((), plan.step_s, 1.5 * plan.step_s, 3, events, plan, **fields)


def test_measured_memory_stands_beside_predicted():
    graph = look_examples.graph()
    plan = look_examples.plan(graph, look_examples.costs(graph))
    held = (10**8, 2 * 10**8, 3 * 10**8, 4 * 10**8)
    page = run_report(plan, peak_bytes=held).to_html()
    assert "Memory, predicted and measured" in page
    assert "The solid line is the most that was measured" in page
    drawn = json.loads(re.search(r'id="d-time">(.*?)</script>', page)[1])
    assert drawn["held"] == list(held)
    assert "1.50× predicted" in page
    assert "Memory, predicted and measured" not in run_report(plan).to_html()


def test_a_run_in_one_process_is_not_held_against_a_parallel_step():
    graph = look_examples.graph()
    plan = look_examples.plan(graph, look_examples.costs(graph))
    page = run_report(plan, in_turn=True).to_html()
    assert "of all ranks in turn" in page
    assert "× predicted" not in page
    assert "× predicted" in report(plan, measured=simulate(plan))
    alone = plan.schedule, plan.placement, plan.n_microbatches
    rows = simulate(plan).schedule.actions
    now, events = 0.0, []
    for event in sorted(simulate(plan).events, key=lambda e: e.start_s):
        if not isinstance(event.action, str):
            events.append((event.rank, event.action, now, now + 1e-3))
            now += 1e-3
    ran = Timeline.from_events(Schedule(*alone, rows), events)
    assert "of all ranks in turn" in report(plan, measured=ran)


def test_a_limit_far_above_every_peak_is_said_and_not_drawn():
    graph = look_examples.graph()
    costs = look_examples.costs(graph)
    far = report(look_examples.plan(graph, costs, memory_limit="80GB"))
    assert "The limit is 74.5 GiB, far above." in far
    assert "<dd>74.5 GiB</dd>" in far
    assert "(dashed)" in report(look_examples.plan(graph, costs, memory_limit="80MB"))


@needs_browser
def test_it_loads_clean_and_draws_every_view(driver, tmp_path):
    show(driver, tmp_path, example()[1])
    for view in ("#ops", "#gantt", "#memory-rows"):
        see(driver, view)
        assert ink(driver, view) > 8, view
    assert len(see(driver, "#tree").find_elements("css selector", ".row")) > 12
    assert [line["message"] for line in driver.get_log("browser")] == []


@needs_browser
def test_the_schedule_answers_to_hover_keys_and_zoom(driver, tmp_path):
    show(driver, tmp_path, example()[1])
    gantt = see(driver, "#gantt")
    keys(driver, gantt, "\ue014")  # right arrow
    keys(driver, gantt, "\ue015")  # down arrow
    says = driver.find_element("css selector", "#gantt-says").text
    assert re.match(r"1F0 predicted forward of microbatch 0 through stage 1, rank 1", says)
    driver.execute_script(
        "const g = document.querySelector('#gantt'), b = g.getBoundingClientRect();"
        "g.dispatchEvent(new PointerEvent('pointermove', {clientX: b.left + 60, clientY: b.top + 30}))"
    )
    tip = driver.find_element("css selector", "#schedule .tip").text
    assert tip.startswith("0F0 predicted")
    assert "microbatch 0" in tip
    drawn = int(gantt.get_attribute("data-drawn"))
    press(driver, "#gantt-in")
    settle(driver)
    assert int(gantt.get_attribute("data-drawn")) > drawn


@needs_browser
def test_the_op_graph_answers_to_search_keys_and_zoom(driver, tmp_path):
    show(driver, tmp_path, example()[1])
    view = see(driver, "#ops")
    find = driver.find_element("css selector", "#ops-find")
    keys(driver, find, "layers_7_mlp", "\ue007")
    detail = driver.find_element("css selector", "#detail")
    assert detail.text.startswith("layers_7_mlp")
    assert "model/lm.py:42" in detail.text
    keys(driver, view, "\ue015")
    assert detail.text.startswith("add_15")
    detail.find_element("xpath", ".//button[text()='layers_7_mlp']").click()
    assert detail.text.startswith("layers_7_mlp")
    press(driver, "#ops-all")
    settle(driver)
    assert float(view.get_attribute("data-row")) < 10
    assert ink(driver, "#ops") > 8


@needs_browser
def test_modules_open_by_keyboard(driver, tmp_path):
    show(driver, tmp_path, example()[1])
    see(driver, "#tree")
    rows = len(driver.find_elements("css selector", "#tree .row"))
    closed = driver.find_element("css selector", "#tree details:not([open]) > summary")
    keys(driver, closed, "\ue007")
    assert len(driver.find_elements("css selector", "#tree .row")) > rows


@needs_browser
def test_the_theme_can_be_chosen_and_text_has_contrast_in_both(driver, tmp_path):
    show(driver, tmp_path, example()[1])
    button = driver.find_element("css selector", "#theme")
    ratios = driver.execute_script(CONTRAST)
    grounds = []
    for _ in ("light", "dark"):
        button.click()
        grounds.append(driver.execute_script("return getComputedStyle(document.body).backgroundColor"))
        ratios += driver.execute_script(CONTRAST)
    assert grounds[0] != grounds[1]
    assert min(ratios) >= 4.5


CONTRAST = """
const lum = (c) => { const v = c.match(/[\\d.]+/g).slice(0, 3).map((x) => x / 255)
    .map((x) => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  return 0.2126 * v[0] + 0.7152 * v[1] + 0.0722 * v[2]; };
const ground = (n) => { for (; n; n = n.parentElement) { const c = getComputedStyle(n).backgroundColor;
  if (!c.endsWith(', 0)')) return c; } return 'rgb(255,255,255)'; };
return [...document.querySelectorAll('h1, h2, h3, p, td, th, dt, dd, a, button, pre, small')].map((n) => {
  const [a, b] = [lum(getComputedStyle(n).color), lum(ground(n))].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05); });
"""


@needs_browser
def test_it_fits_a_phone(driver, tmp_path):
    size = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        show(driver, tmp_path, example()[1].replace("LanguageModel", 2 * "ModelForTokenClassification"))
        for view in ("#tree", "#ops", "#gantt", "#memory-rows"):
            see(driver, view)
        assert driver.execute_script("return document.documentElement.scrollWidth") <= 390
        assert ink(driver, "#gantt") > 8
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@needs_browser
def test_a_thousand_ops_open_at_once(driver, tmp_path):
    show(driver, tmp_path, example(250, 8, 16)[1])
    times = driver.execute_script("return performance.getEntriesByType('navigation')[0].toJSON()")
    assert times["loadEventEnd"] < 1000 * LOADED_MACHINE
    see(driver, "#ops")
    assert ink(driver, "#ops") > 8


@needs_browser
def test_ten_thousand_ops_on_a_thousand_stages_stay_responsive(driver, tmp_path):
    show(driver, tmp_path, example(2500, 1000, 8, with_measured=False)[1])
    ready = "const n = performance.getEntriesByType('navigation')[0]; return n.loadEventEnd"
    assert driver.execute_script(ready) < 6000
    for view, button in (("#ops", "#ops-out"), ("#gantt", "#gantt-in"), ("#memory-rows", "#gantt-in")):
        see(driver, view)
        press(driver, button)
        start = time.perf_counter()
        settle(driver)
        assert time.perf_counter() - start < 2.0 * LOADED_MACHINE, view
        assert ink(driver, view) > 8, view
    assert [line["message"] for line in driver.get_log("browser")] == []
