"""The plan of a rehearsal against the record of its GEMMs."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge.errors import Finding
from bridge.plan.precision_plan import compact
from bridge.precision.schemes import GEMMS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bridge.plan.precision_plan import PrecisionPlan

EXPERT = re.compile(r"local_experts\.\d+\.")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Planned GEMMs of the layers' linear modules against those that ran."""

    planned: int
    equal: int
    findings: tuple[Finding, ...]


def compared(plan: PrecisionPlan, gemms: Sequence[dict[str, Any]]) -> Comparison:
    """Compare a plan with the recorded GEMMs of one step, which have the formats of both operands each."""
    ran: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for record in gemms:
        names = [record["gemm"]] if record["gemm"] != "all" else list(GEMMS)
        formats = {record["left"], record["right"]}
        text = record["left"] if len(formats) == 1 else f"{record['left']} x {record['right']}"
        own = EXPERT.sub("", record["module"])
        for gemm in names:
            ran[str(record["layer"]), own, gemm].add(text)
    planned: dict[tuple[str, str, str], str] = {}
    for number, layer in enumerate(one for one in plan.layers if one.label not in ("embedding", "output")):
        for module in layer.modules:
            if module.kind == "linear":
                for gemm in GEMMS:
                    planned[str(number + 1), module.name, gemm] = plan.format_of(layer.label, module.name, gemm)
    wrong: dict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    for (label, name, gemm), wanted in planned.items():
        found = {
            text
            for (other, module, kind), texts in ran.items()
            if other == label and kind == gemm and (module == name or module.endswith(f".{name}"))
            for text in texts
        }
        if found != {wanted}:
            wrong[name, gemm, wanted, " and ".join(sorted(found)) or "nothing recorded"].append(label)
    findings = tuple(
        Finding(
            path=f"layers {compact(layers)}, {name}, {gemm}",
            rule=f"planned {wanted}",
            value=found,
            remedy="Look at the precision of these layers.",
        )
        for (name, gemm, wanted, found), layers in wrong.items()
    )
    return Comparison(planned=len(planned), equal=len(planned) - sum(map(len, wrong.values())), findings=findings)
