"""The parts of a report's page: charts, and the colours of its heat maps."""

from __future__ import annotations

import pytest
import torch

from bridge.numerics import GemmPrecision, quantise
from bridge.precision.formats import FORMATS
from bridge.report.html.chart import MOST_POINTS, line_chart


@pytest.mark.parametrize(
    ("scheme", "operand"), [("tensorwise", "input"), ("tensorwise", "grad_output"), ("nvfp4", "input")]
)
def test_the_healthy_ratio_of_a_format_is_that_of_a_normal_sample(scheme: str, operand: str) -> None:
    spec = GemmPrecision(scheme=scheme, format="e2m1" if scheme == "nvfp4" else "hybrid").spec(operand)
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    noise = quantise(x, spec).dequantise().float() - x.float()
    measured = 10 * torch.log10(x.float().square().sum() / noise.square().sum()).item()
    assert measured == pytest.approx(FORMATS[spec.format].healthy_db, abs=1.0)


def test_a_chart_escapes_names_thins_lines_and_leaves_out_what_is_not_finite() -> None:
    points = [(float(step), float("nan") if step == 3 else 2.0) for step in range(2000)]
    chart = line_chart({"<a&b>": points}, title="t", y="loss")
    assert "<a&b>" not in chart
    assert "&lt;a&amp;b&gt;" in chart
    assert "nan" not in chart
    zigzag = line_chart({"s": [(float(step), float(step % 7)) for step in range(2000)]}, title="t", y="loss")
    assert 0.5 * MOST_POINTS < max(path.count("L ") for path in zigzag.split(' d="')) < MOST_POINTS
    assert line_chart({"empty": []}, title="t", y="loss") == ""
    assert "from 4 to 1024" in line_chart({"s": [(0, 4.0), (1, 1024.0)]}, title="t", y="y", log=True)
