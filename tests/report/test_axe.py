"""The report of a run of each scaling scheme in headless Chromium: axe finds no violation, light and dark."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm

axe = pytest.importorskip("axe_core_python", reason="needs axe-core-python, of the extra [dev]")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")]
BIN = Path(sys.executable).parent
SCRIPT = Path(__file__).parents[2] / "scripts" / "train.py"
RECIPES = ("bf16_mixed", "fp8_current", "fp8_delayed", "blockwise", "mxfp8", "nvfp4")
TINY = ("model=gpt_tiny", "train=smoke", "train.train_iters=2", "train.eval_iters=1", "logging.tensorboard=false")
DARK, LIGHT = 0, 1
"""Blink's numbers of the colour schemes."""
EACH_TAB = """
(async () => {
  const found = [];
  for (const tab of document.querySelectorAll('[role=tab]')) {
    tab.click();
    const {passes, violations} = await axe.run();
    found.push({passes: passes.length, violations});
  }
  document.body.innerHTML = '<pre id="axe"></pre>';
  document.getElementById('axe').textContent = btoa(unescape(encodeURIComponent(JSON.stringify(found))));
})();
"""


def axe_of(html: str, page: Path, scheme: int) -> list[dict[str, Any]]:
    """Return what axe finds in each tab of a page, which is written to a file."""
    source = (Path(str(axe.__file__)).parent / "axe.min.js").read_text()
    page.write_text(html.replace("</body>", f"<script>{source}</script><script>{EACH_TAB}</script></body>"))
    words = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=600000", "--dump-dom"]
    words += [f"--blink-settings=preferredColorScheme={scheme}", f"--user-data-dir={page.parent / 'profile'}"]
    words.append(page.as_uri())
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=warm.LIMIT_SECONDS)
    (coded,) = re.findall(r'<pre id="axe">([^<]+)</pre>', done.stdout)
    found: list[dict[str, Any]] = json.loads(base64.b64decode(coded))
    return found


def test_axe_finds_no_violation_in_the_report_of_a_run_of_each_scheme(tmp_path: Path) -> None:
    runs = [str(tmp_path / recipe) for recipe in RECIPES]
    for recipe, run in zip(RECIPES, runs, strict=True):
        warm.run(["python", str(SCRIPT), *TINY, f"mixed_precision={recipe}", f"logging.run_dir={run}"], cwd=tmp_path)
    out = tmp_path / "report.html"
    done = warm.run([str(BIN / "precision-bridge"), "report", *runs, "--out", str(out)])
    assert (done.returncode, done.stderr) == (0, "")
    html = out.read_text()
    for scheme in (LIGHT, DARK):
        tabs = axe_of(html, tmp_path / "axe.html", scheme)
        assert len(tabs) >= len(RECIPES)
        assert min(tab["passes"] for tab in tabs) > 10
        assert [f"{one['id']}: {one['nodes'][0]['html']}" for tab in tabs for one in tab["violations"]] == []
    broken = axe_of(html.replace('<html lang="en">', "<html>"), tmp_path / "broken.html", LIGHT)
    assert {one["id"] for tab in broken for one in tab["violations"]} == {"html-has-lang"}
