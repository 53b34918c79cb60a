"""A precision plan as CSV."""

import csv
import io

from bridge.plan.precision_plan import ROW_COLUMNS, PrecisionPlan

PLACE_COLUMNS = ("layer", "stage", "chunk", "kind", "module")
"""The columns that name the module of a row."""


def format_plan_csv(plan: PrecisionPlan) -> str:
    """Return every row of the plan as CSV, a line for each layer, module and GEMM or tensor."""
    csv_text = io.StringIO()
    writer = csv.DictWriter(csv_text, [*PLACE_COLUMNS, *ROW_COLUMNS], lineterminator="\n")
    writer.writeheader()
    writer.writerows(plan.rows())
    return csv_text.getvalue()
