"""The page of `explain --html`, looked at with a real browser: what it shows, what can be clicked, and no network."""

import time
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

import tilefuse
from models import bert
from models.graph import GraphWriter, write
from runtime.compile import explain
from runtime.options import Options
from runtime.page.drawing import Box, Drawing
from runtime.page.write import write_page
from runtime.report import Report

pytestmark = pytest.mark.browser
HOSTILE = "</script><img src=x onerror=document.title='broken'>"


@pytest.fixture(scope="module")
def browser(chromium: str) -> Generator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    folder = tmp_path_factory.mktemp("page")
    model = bert.build(folder / "bert.onnx", exporter="torchscript", size=bert.Size(layers=1))
    return folder / "bert.html", tilefuse.explain(model, html=folder / "bert.html")


def opened(browser: Browser, path: Path) -> Page:
    """The page, drawn; a script error or a request to anywhere fails the test."""
    page = browser.new_page(viewport={"width": 1500, "height": 900})
    page.on("pageerror", lambda error: pytest.fail(f"the page's script failed: {error}"))
    page.on("request", lambda request: None if request.url.startswith("file:") else pytest.fail(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready=true]")
    return page


def test_both_graphs_and_the_shares_are_there(browser: Browser, encoder: tuple[Path, Report]) -> None:
    path, report = encoder
    page = opened(browser, path)
    expect(page.locator("#after .box.region")).to_have_count(len(report.regions))
    assert page.locator("#before .box.region").count() > len(report.regions)
    assert page.locator("#before .box").count() > page.locator("#after .box").count()
    expect(page.locator("#shares")).to_contain_text(f"{100 * report.coverage.flops:.1f} % of FLOPs fused")
    expect(page.locator("#title")).to_have_text(f"bert.onnx: {report.nodes_before} nodes → {report.nodes_after}")
    expect(page.locator("#details tr.link")).to_have_count(len(report.regions))


def test_a_click_shows_the_region_its_program_and_its_code(browser: Browser, encoder: tuple[Path, Report]) -> None:
    path, report = encoder
    number = [region.kind for region in report.regions].index("attention")
    page = opened(browser, path)
    page.locator("#after .box.attention").first.click()
    details = page.locator("#details")
    expect(details).to_contain_text(report.regions[number].op)
    expect(details.locator("pre")).to_contain_text("gemm s = q · kᵀ")
    details.get_by_role("button", name="C (").click()
    expect(details.locator("pre")).to_contain_text("static void run(")
    expect(details.locator("li")).to_have_count(len(report.regions[number].nodes))
    chosen = page.locator("#before .box.chosen")
    assert chosen.count() > 10
    expect(page.locator("#after .box.chosen")).to_have_count(1)
    assert all(chosen.nth(i).locator("text").text_content() for i in range(3))
    assert page.evaluate("location.hash") == f"#region-{number}"
    page.keyboard.press("Escape")
    expect(page.locator(".box.chosen")).to_have_count(0)


def test_misses_say_why_and_lead_to_their_node_and_names_are_text(browser: Browser, tmp_path: Path) -> None:
    g = GraphWriter(17)
    x = g.input("x", np.float32, ("n", 64))
    total = g.op("CumSum", g.op("Exp", x), g.constant(np.array(1)))
    g.op("Relu", total, out=HOSTILE)
    g.output(HOSTILE, np.float32, ("n", 64))
    report = tilefuse.explain(write(g.finish("miss"), tmp_path / "m.onnx"), html=tmp_path / "m.html")
    page = opened(browser, tmp_path / "m.html")
    card = page.locator(".miss-card").first
    expect(card).to_contain_text(report.misses[0].reason)
    card.click()
    expect(page.locator("#details dd").last).to_have_text(report.misses[0].advice)
    expect(page.locator("#before .box.miss.chosen")).to_have_count(1)
    assert page.title() == "m.onnx – TileFuse"
    assert page.locator("img").count() == 0


def test_names_are_searched_and_regions_stepped_through_without_a_mouse(
    browser: Browser, encoder: tuple[Path, Report]
) -> None:
    path, report = encoder
    page = opened(browser, path)
    details, found = page.locator("#details"), page.locator("#details .found .link")
    page.keyboard.press("/")
    page.keyboard.type("SOFTMAX")
    expect(found).to_have_count(1)
    expect(details).to_contain_text("1 found")
    expect(page.locator("#before .box.chosen text")).to_have_text("Softmax")
    expect(page.locator("#before .box.chosen")).to_be_in_viewport()
    page.keyboard.press("Enter")
    attention = [region.kind for region in report.regions].index("attention")
    expect(details).to_contain_text(report.regions[attention].op)
    expect(page.locator("#after .box.chosen")).to_have_count(1)
    page.keyboard.press("/")
    page.keyboard.type("no such <b>name")
    expect(details).to_contain_text("0 found")
    page.keyboard.press("Escape")
    expect(page.locator("#search")).to_have_value("")
    expect(details.locator("tr.link")).to_have_count(len(report.regions))
    for key, number in (("n", 0), ("n", 1), ("p", 0), ("p", len(report.regions) - 1)):
        page.keyboard.press(key)
        expect(details.locator("h2")).to_have_text(f"region {number}: {report.regions[number].kind}")
    page.keyboard.press("Escape")
    details.locator("tr.link").first.focus()
    page.keyboard.press("Enter")
    expect(details.locator("h2")).to_have_text(f"region 0: {report.regions[0].kind}")


def test_two_thousand_nodes_are_drawn_in_seconds(
    browser: Browser, encoder: tuple[Path, Report], tmp_path: Path
) -> None:
    _, report = encoder
    count, last = 2000, len(report.regions) - 1
    boxes = tuple(Box(f"Node {i}", f"/layer.{i // 65}/node_{i}", "node", i * last // count) for i in range(count))
    edges = tuple((max(0, i - 1 - i % 3), i, f"value_{i}") for i in range(1, count))
    far = tuple((0, i, "mask") for i in range(50, count, 65))
    drawing = Drawing(boxes, edges + far)
    write_page(tmp_path / "deep.html", report, before=drawing, after=drawing, kernels={})
    start = time.monotonic()
    page = opened(browser, tmp_path / "deep.html")
    assert time.monotonic() - start < 20
    expect(page.locator("#before .box")).to_have_count(count)
    expect(page.locator("#before .stub")).to_have_count(len(far))
    page.evaluate(f"location.hash = '#region-{last - 1}'")
    expect(page.locator("#after .box.chosen").first).to_be_in_viewport()
    start = time.monotonic()
    page.locator("#search").fill("node_1999")
    expect(page.locator("#before .box.chosen")).to_be_in_viewport()
    page.locator("#search").fill("node")
    expect(page.locator("#details .found .link")).to_have_count(200)
    expect(page.locator("#details")).to_contain_text("1800 more")
    assert time.monotonic() - start < 10


def test_measured_times_stand_beside_the_predicted_ones(
    browser: Browser, encoder: tuple[Path, Report], tmp_path: Path
) -> None:
    """Two kernels were measured, one faster and one slower than its nodes; the others say nothing of measurements."""
    _, plain = encoder
    first, second = list(dict.fromkeys(region.op for region in plain.regions))[:2]
    timings = {first: (0.00125, 0.0025), second: (0.0003, 0.0002)}
    texts = {first: ("1.25 ms as one kernel", "2.50 ms unfused"), second: ("300 µs as one kernel", "200 µs unfused")}
    path = tmp_path / "timed.html"
    report = explain(Path(plain.input), options=Options.from_environment(), page=path, timings=timings)
    page = opened(browser, path)
    details = page.locator("#details")
    expect(details.locator("th").last).to_have_text("measured")
    rows = details.locator("tr.link")
    page.screenshot(path=tmp_path / "overview.png")
    for index, region in enumerate(report.regions):
        expected = {first: "2.0×", second: "0.67×"}.get(region.op, "")
        expect(rows.nth(index).locator("td").last).to_have_text(expected)
    for index, region in enumerate(report.regions):
        page.evaluate(f"location.hash = '#region-{index}'")
        expect(details).to_contain_text(region.op)
        for text in texts.get(region.op, ()):
            expect(details).to_contain_text(text)
        if region.op not in texts:
            expect(details).not_to_contain_text("as one kernel, 2.50 ms unfused")
    page.screenshot(path=tmp_path / "region.png")
