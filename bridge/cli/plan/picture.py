"""`precision-bridge plan --picture FILE`: the formats of a run as a picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from bridge.cli.output import make_unwritable_error
from bridge.cli.plan.first_phase import plan_first_phase
from bridge.cli.run_arguments import read_run
from bridge.errors import RunConfigError
from bridge.extras import require_extra

PICTURE_SUFFIXES = (".png", ".svg", ".pdf")


def write_picture(args: argparse.Namespace) -> None:
    """Draw the plan of a run into the file of ``--picture``.

    Raises:
        RunConfigError: The file is not a picture, or cannot be written.
    """
    plan = plan_first_phase(read_run(args))
    path = Path(args.picture)
    if path.suffix not in PICTURE_SUFFIXES:
        raise RunConfigError(
            f"--picture: must end in {', '.join(PICTURE_SUFFIXES)}, got {str(path)!r}. Choose one of them."
        )
    require_extra("train", "precision-bridge plan --picture")
    from bridge.report.plan.plan_picture import draw_plan  # matplotlib takes a second to import

    try:
        draw_plan(plan, path)
    except OSError as error:
        raise make_unwritable_error(path, "--picture", error) from None
    print(f"{path}: {len(plan.layers)} rows.")
