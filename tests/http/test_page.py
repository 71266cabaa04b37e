"""The page at ``/``: what is served, and what a browser shows of it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ffn_faas.config import World
from ffn_faas.http.page import FOLDER
from ffn_faas.service.lifecycle import Phase
from tests.http.chromium import Browser, executable
from tests.http.conftest import Service
from tests.service.daemon import CONFIG, Daemon, free_port, model_dir, wait_ready

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def browser():
    if executable() is None:
        pytest.skip("no Chromium is installed")
    with Browser() as opened:
        yield opened


@pytest.fixture
def page(browser, service):
    browser.problems.clear()
    browser.prefer("light")
    browser.open(f"http://127.0.0.1:{service.port}/")
    browser.wait("document.body?.dataset.state")
    return browser


def test_every_file_that_the_page_names_is_served_and_nothing_comes_from_elsewhere(service):
    names = {path.name for path in FOLDER.iterdir() if path.suffix != ".py" and path.is_file()}
    text = service.get("/").text + "".join(service.get(f"/page/{name}").text for name in sorted(names))
    named = set(re.findall(r'(?:src|href)="page/([^"]+)"|from "\./([^"]+)"', text))
    assert {a or b for a, b in named} == names - {"index.html"}
    assert re.findall(r"https?://(?!www\.w3\.org/)", text) == []
    policy = service.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


@pytest.mark.parametrize("name", ["__init__.py", "..%2fapp.py", "%2e%2e/app.py", "nothing.js"])
def test_no_other_file_is_served(service, name):
    assert service.get(f"/page/{name}").status_code == 404


def test_node_tells_of_every_rank_of_the_node_also_of_one_that_does_not_answer():
    service = Service(World(rank=0, size=3, local_rank=0, local_size=2))
    try:
        first, second = service.get("/node").json()["ranks"]
        assert (first["rank"], first["phase"]) == (0, "starting")
        assert second["rank"] == 1
        assert f"port {service.port + 1}" in second["unreachable"]
    finally:
        service.server.shutdown()


def test_a_rank_that_is_not_local_rank_0_tells_of_itself():
    service = Service(World(rank=1, size=2, local_rank=1, local_size=2))
    try:
        (only,) = service.get("/node").json()["ranks"]
        assert only["rank"] == 1
    finally:
        service.server.shutdown()


def test_loading_shows_its_phase_and_progress(page, service, tmp_path):
    service.to(Phase.LOADING)
    service.state.lifecycle.report(3, 8)
    page.wait("document.getElementById('progress').value === 0.375")
    assert page.text("#badge") == "loading"
    assert page.text("#phases [aria-current=step]").startswith("loading")
    assert page.text("#experts-note") == "No tokens yet."
    page.picture(tmp_path / "loading.png")
    assert page.problems == []


def test_a_ready_f_without_counts_says_that_its_backend_has_none(page, service):
    service.to_ready()
    page.wait("document.getElementById('experts-note').innerText === 'Not counted by this backend.'")
    page.wait("document.getElementById('spark-caption').innerText.includes('no rows in the last two minutes')")


def test_a_failure_shows_its_reason(page, service, tmp_path):
    service.to(Phase.LOADING)
    service.state.lifecycle.fail("experts of layer 3 are missing")
    page.wait("document.body.dataset.state === 'failed'")
    assert "experts of layer 3 are missing" in page.text("#banner")
    assert page.text("#phases [aria-current=step]").startswith("failed")
    page.picture(tmp_path / "failed.png")


def test_light_and_dark_follow_the_system_and_the_button_works_by_keyboard(page, tmp_path):
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.ask(background)
    page.picture(tmp_path / "light.png")
    page.prefer("dark")
    dark = page.ask(background)
    page.picture(tmp_path / "dark.png")
    assert light != dark
    page.press("Tab")
    assert page.ask("document.activeElement.className") == "skip"
    page.press("Tab")
    assert page.ask("document.activeElement.id") == "theme"
    page.press("Enter")
    assert page.text("#theme") == "theme: light"
    assert page.ask(background) == light
    page.press("Enter")
    page.press("Enter")
    assert page.text("#theme") == "theme: auto"
    assert page.ask(background) == dark


CONTRAST = """
(() => {
  const light = (text) => {
    const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = text.match(/\\d+/g).map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if (color !== "rgba(0, 0, 0, 0)") return color;
    }
  };
  let worst = [99, ""];
  for (const node of document.querySelectorAll("body *")) {
    const words = [...node.childNodes].filter((child) => child.nodeType === 3 && child.textContent.trim());
    if (!words.length || !node.offsetParent) continue;
    const [a, b] = [light(getComputedStyle(node).color), light(behind(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < worst[0]) worst = [ratio, node.outerHTML.slice(0, 80)];
  }
  return worst;
})()
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_as_accessibility_rules_ask(page, scheme):
    page.prefer(scheme)
    ratio, where = page.ask(CONTRAST)
    assert ratio >= 4.5, where


WITH_EXPERTS = """
(() => {
  const ask = window.fetch;
  const row = (layer) => Array.from({ length: 64 }, (_, e) => (e * 37 + layer * 11) % 64);
  const rows = Array.from({ length: 24 }, (_, layer) => row(layer));
  rows[1] = rows[1].map((_, expert) => (expert === 3 ? 9000 : 1000));
  window.fetch = async (...given) => {
    const answer = await (await ask(...given)).json();
    for (const rank of answer.ranks) rank.expert_rows = rows;
    return new Response(JSON.stringify(answer));
  };
})()
"""


def test_the_heat_map_is_read_by_the_arrow_keys_and_by_the_pointer(page, tmp_path):
    page.ask(WITH_EXPERTS)
    page.wait("!document.getElementById('experts').hidden")
    page.ask("document.getElementById('heat').focus()")
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowRight"):
        page.press(key)
    # Layer 1: 63 experts with 1000 tokens, one with 9000; the mean is 1125.
    assert page.text("#heat-cell") == "MoE layer 1, expert 3: 9000 tokens, 8.00 times the layer's mean"
    assert "8.00" in page.text("#imbalance")
    page.press("End")
    assert page.text("#heat-cell") == "MoE layer 1, expert 63: 1000 tokens, 0.89 times the layer's mean"
    page.picture(tmp_path / "heat.png")
    box = page.ask("JSON.stringify(document.getElementById('heat').getBoundingClientRect())")
    corner = json.loads(box)
    page.command("Input.dispatchMouseEvent", type="mouseMoved", x=corner["x"] + 2, y=corner["y"] + 2)
    page.wait("document.getElementById('heat-cell').innerText.startsWith('MoE layer 0, expert 0:')")
    page.prefer("dark")
    page.picture(tmp_path / "heat-dark.png")
    assert page.problems == []


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_busy_f_is_shown_and_its_death_and_return(browser, tmp_path):
    model = model_dir(tmp_path)
    (model / "config.json").write_text(json.dumps(CONFIG | {"num_experts": 32, "num_hidden_layers": 12}))
    port = free_port()
    serve = [model, "--load-format", "dummy", "--port", port]
    load = {"model": str(model), "port": port, "dummy": True, "rounds": 10**6, "skew": 2.0, "reattach_timeout_s": 120}
    browser.open("about:blank")
    with Daemon(*serve) as daemon:
        wait_ready(port)
        attention = subprocess.Popen(
            [sys.executable, "-m", "tests.attention.attention_process", json.dumps(load)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
        )
        try:
            browser.open(f"http://127.0.0.1:{port}/")
            browser.wait("parseFloat(document.querySelector('#now dd')?.innerText) > 0", 60)
            assert browser.text("#badge") == "ready"
            assert "1 of 1" in browser.text("#sessions")
            browser.wait("document.querySelectorAll('#spark polyline').length === 1", 60)
            _read_the_heat_map(browser, tmp_path)
            daemon.signal(signal.SIGKILL)
            browser.wait("document.body.dataset.state === 'unreachable'", 60)
            assert re.fullmatch(r"last answer .+ ago", browser.text("#age"))
            assert "then ready. What stands below is from then." in browser.text("#banner")
            assert float(browser.ask("getComputedStyle(document.querySelector('main')).opacity")) < 1, "not as if live"
            browser.picture(tmp_path / "away.png")
            with Daemon(*serve):
                browser.wait("document.body.dataset.state === 'ready'", 90)
                assert browser.ask("document.getElementById('banner').hidden")
        finally:
            attention.kill()
            attention.wait()


def _read_the_heat_map(browser, tmp_path):
    browser.wait("!document.getElementById('experts').hidden")
    browser.picture(tmp_path / "busy.png")
    browser.ask("document.getElementById('heat').focus()")
    browser.press("ArrowRight")
    browser.press("ArrowDown")
    assert browser.text("#heat-cell").startswith("MoE layer 1, expert 1:")
    browser.press("End")
    assert browser.text("#heat-cell").startswith("MoE layer 1, expert 31:")
