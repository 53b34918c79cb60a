"""`precision-bridge report RUN [RUN ...]`: the report on some runs as HTML, Markdown or JSON."""

from __future__ import annotations

import argparse
from pathlib import Path

from bridge.cli.described_logs import is_log
from bridge.cli.output import refuse_input_files, write_file
from bridge.cli.report.run_contents import collect_folder_contents, collect_log_contents
from bridge.extras import require_extra

STANDARD_OUTPUT = "-"
"""The name of a file that means standard output."""
REPORT_FORMATS = ("html", "md", "json")
"""Formats of a report. The first is the default."""


def write_page(args: argparse.Namespace) -> None:
    """Write a report on some runs and print the names of its files, or print the report itself.

    Raises:
        RunConfigError: A file of the report is an input, or cannot be written.
    """
    require_extra("train", "precision-bridge report")
    from bridge.report.html.page import format_json, render_markdown, render_page

    report_format = args.format or REPORT_FORMATS[0]
    format_of = _choose_file_formats(args, report_format)
    for file in format_of:
        refuse_input_files(file, "--out", args.runs)
    folders = [path for path in args.runs if not is_log(path)]
    logs = [path for path in args.runs if is_log(path)]
    runs = [*collect_folder_contents(folders), *collect_log_contents(logs)]
    render = {"html": render_page, "md": render_markdown, "json": format_json}
    if not format_of:
        print(render[report_format](runs))
        return
    # Every file is rendered before the first is written, so that an error leaves no file.
    text_of_file = {file: render[file_format](runs) for file, file_format in format_of.items()}
    for file, text in text_of_file.items():
        write_file(file, text, "--out")
        print(file)


def _choose_file_formats(args: argparse.Namespace, report_format: str) -> dict[Path, str]:
    """Return file -> its format, for each file of the report. Empty for standard output.

    An HTML report has its numbers as JSON next to it.
    """
    if str(args.out) == STANDARD_OUTPUT:
        return {}
    out = args.out or _get_default_file(args.runs[0], report_format)
    format_of = {out: report_format}
    if report_format == "html":
        format_of[out.with_suffix(".json")] = "json"
    return format_of


def _get_default_file(run: Path, report_format: str) -> Path:
    """Return the file of a report without ``--out``: in the folder of the run, or next to a log."""
    if run.is_dir():
        return run / f"report.{report_format}"
    return run.with_name(f"{run.stem}.report.{report_format}")
