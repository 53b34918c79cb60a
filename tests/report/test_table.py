"""Tables on a terminal and in a file: nothing is cut, however narrow the terminal is."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from bridge.plan.alignment import build_alignment_report
from bridge.plan.memory_report import build_memory_report
from bridge.plan.precision_plan import precision_plan
from bridge.plan.workload import Workload
from bridge.registry.registry import REGISTRY
from bridge.report.plan.alignment_table import make_alignment_table
from bridge.report.plan.memory_table import make_memory_table
from bridge.report.plan.plan_difference import make_difference_table
from bridge.report.plan.plan_picture import FORMAT_COLOURS, draw_plan
from bridge.report.plan.plan_table import make_plan_table
from bridge.report.quantisation_table import make_quantisation_table, make_worst_table
from bridge.report.table import (
    format_mib,
    make_facts_table,
    make_table,
    print_renderable,
    render_plain_text,
)
from bridge.runtime.audit.quantisation import QuantisationRow
from tests.model.test_shape import DENSE

MODEL = {**DENSE, "num_layers": 6, "seq_length": 1024}
ROW = {"step": 9, "layer": 12, "module": "mlp.linear_fc1", "format": "e4m3", "amax": 1.5, "scale": None}


def plan(recipe="bf16_with_fp8_current_scaling_mixed"):
    return precision_plan(REGISTRY.get(recipe), MODEL)


def rows():
    return [
        QuantisationRow(**ROW, operand=operand, underflow=0.01, saturated=0.0, sqnr_db=31.2)
        for operand in ("input", "weight", "grad_output")
    ]


REPORTS = {
    "plan": (lambda: make_plan_table(plan()), ("layers", "modules", "forward", "scales", "master")),
    "difference": (
        lambda: make_difference_table("a", "b", plan("bf16_mixed").diff(plan())),
        ("layers", "modules", "before", "after"),
    ),
    "memory": (
        lambda: make_memory_table(build_memory_report(plan(), workload=Workload.from_sections(MODEL)), {}),
        ("low-precision copies", "master weights", "optimizer state", "activations"),
    ),
    "align": (lambda: make_alignment_table(build_alignment_report(plan())), ("layers", "module", "runs in", "fits")),
    "quantisation": (lambda: make_quantisation_table(rows(), title="fp8"), ("operand", "saturated", "SQNR dB")),
    "worst": (lambda: make_worst_table(rows()), ("dB, mean", "lowest", "to zero", "saturated")),
}


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("terminal", [True, False])
def test_no_heading_is_cut_at_80_columns(name, terminal):
    content, headings = REPORTS[name]
    out = io.StringIO()
    console = Console(width=80, file=out, force_terminal=terminal, no_color=True, color_system=None)
    print_renderable(content(), console)
    assert "…" not in out.getvalue()
    for heading in headings:
        assert heading in out.getvalue()
    if terminal:
        assert all(cell_len(line.rstrip()) <= 80 for line in out.getvalue().splitlines())
    assert console.width == 80


def test_a_table_too_wide_for_a_terminal_is_several_with_its_first_columns():
    content = make_table([{"name": "a row"} | {f"column {number}": value for number, value in enumerate("uvwxyz")}])
    out = io.StringIO()
    print_renderable(content, Console(width=40, file=out, force_terminal=True, color_system=None))
    heads = [line.split() for line in out.getvalue().splitlines() if "column" in line]
    assert [head[0] for head in heads] == ["name", "name", "name"]
    assert [word for head in heads for word in head if word.isdecimal()] == list("012345")
    narrow = io.StringIO()
    print_renderable(content, Console(width=12, file=narrow, force_terminal=True, color_system=None))
    assert all(value in narrow.getvalue() for value in "uvwxyz")


def test_plain_text_has_the_columns_that_a_table_needs():
    wide = "x" * 60
    content = make_table([{"name": wide, "count": "7", "why": "a b"}], numbers=("count",), wraps=("why",))
    lines = render_plain_text(content, width=20).splitlines()
    assert any(wide in line and "7" in line for line in lines)
    assert all(line == line.rstrip() for line in lines)


def test_sections_are_apart_and_a_table_without_headings_has_no_head():
    text = render_plain_text(make_table([{"": "a", " ": "1"}], [{"": "b", " ": "2"}], title="two"))
    assert [line.strip() for line in text.splitlines()] == ["two", "", "a   1", "", "b   2", ""]
    assert render_plain_text(make_facts_table([("a", "1")], title="one")).splitlines() == ["one", "", "  a   1", ""]


def test_picture_has_the_colours_of_the_formats(tmp_path):
    import numpy as np
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    draw_plan(plan(), tmp_path / "plan.png")
    pixels = imread(tmp_path / "plan.png")[..., :3].reshape(-1, 3)
    share = {
        name: np.isclose(pixels, to_rgb(colour), atol=0.01).all(axis=1).mean()
        for name, colour in FORMAT_COLOURS.items()
    }
    assert {name for name, part in share.items() if part > 0.001} == {"bf16", "e4m3", "e5m2"}


def test_a_name_is_kept_whole_where_a_column_is_broken():
    names = "experts.linear_fc1, experts.linear_fc2, shared_experts.linear_fc1, shared_experts.linear_fc2"
    content = make_table([{"layers": "1-6", "modules": names, "forward": "e4m3"}], keys=2, wraps=("modules",))
    out = io.StringIO()
    print_renderable(content, Console(width=50, file=out, force_terminal=True, color_system=None))
    assert [line.split()[-2] for line in out.getvalue().splitlines() if "e4m3" in line] == ["experts.linear_fc1,"]
    assert set(names.split(", ")) <= set(out.getvalue().replace(",", " ").split())


@pytest.mark.parametrize("name", ["plan", "difference", "align", "quantisation", "worst"])
def test_a_table_of_layers_says_from_which_number_they_count(name):
    assert render_plain_text(REPORTS[name][0]()).splitlines()[0].endswith("; layers count from 1")


def test_a_size_that_is_there_is_never_shown_as_none():
    assert [format_mib(size) for size in (0, 1000, 2**20)] == ["0.0", "< 0.1", "1.0"]
