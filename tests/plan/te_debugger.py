"""Transformer Engine's real debugger over its Python on the CPU, as a script.

    python -m tests.plan.te_debugger FOLDER

Each folder in FOLDER has features.yaml and the name of a scheme, and gets said.json. A run has one micro-batch, so that
the debugger, and the telemetry of the same run without it, measure the same tensors.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from bridge.preflight.gpu_for_te_cpu import declare

MODEL = {"num_layers": 2}
BATCH = {"micro_batch_size": 2, "global_batch_size": 2}
NAME = "model.module.module.decoder.layers.1.mlp.linear_fc1"


def main(folder: Path) -> None:
    """Answer each folder."""
    declare("b200x1")
    for place in sorted(path for path in folder.iterdir() if path.is_dir()):
        scheme = (place / "scheme").read_text()
        said = decided(place, scheme) if place.name.startswith("decide") else trained(place, scheme)
        (place / "said.json").write_text(json.dumps(said))


def trained(place: Path, scheme: str) -> dict[str, Any]:
    """Train two steps; return where the second differs from the plan, and the telemetry without the debugger."""
    import nvdlfw_inspect.api as debug_api

    from bridge.plan.precision_plan import make_plan
    from bridge.precision.debug_features import DebugFeatures
    from bridge.runtime.megatron.record.step_recording import StepRecording
    from bridge.sync.prediction import predict
    from tests.trainers.live import live

    file = place / "features.yaml"
    arguments: dict[str, Any] = {"low": scheme, "model": MODEL, "train": BATCH, "backend": "te_cpu"}
    with live(**arguments) as run:
        run.step()
        with run.run.telemetry.measure_step(1):
            run.step()
        rows = [dataclasses.asdict(row) for row in run.run.telemetry.rows]
    with live(**arguments, debugger=(file, place)) as run:
        run.step()
        debug_api.step()
        recording = StepRecording(run.model, run.optimizer)
        with recording.record_gemms():
            run.step()
        debug_api.step()
        record = recording.gather_record(())
        owners = {"model": run.model[0].config, "optimizer": run.optimizer.config, "ddp": run.model[0].ddp_config}
        features = DebugFeatures.from_content(yaml.safe_load(file.read_text()))
        plan = make_plan(dataclasses.replace(predict(None, owners), features=features))
        mismatches = recording.find_mismatches(plan, record)
    debug_api.end_debug()
    formats = {" ".join((row.layer, row.module, row.gemm)): row.formats for row in record.gemms}
    return {"mismatches": list(map(str, mismatches)), "formats": formats, "rows": rows}


def decided(place: Path, scheme: str) -> dict[str, str]:
    """Return what the debugger's quantizers do with each tensor of each GEMM of a layer."""
    import nvdlfw_inspect.api as debug_api

    from tests.trainers.live import live

    decisions = {}
    with live(low=scheme, model=MODEL, backend="te_cpu", debugger=(place / "features.yaml", place)):
        from transformer_engine.debug.pytorch import (
            debug_quantization,  # the backend has put it there
        )

        for tensor in ("activation", "weight", "gradient"):
            quantizer = debug_quantization.DebugQuantizer(NAME, tensor, SimpleNamespace(), None, 1)
            decisions[f"{quantizer.rowwise_gemm_name} {tensor}"] = quantizer.rowwise_tensor_plan
            decisions[f"{quantizer.columnwise_gemm_name} {tensor}"] = quantizer.columnwise_tensor_plan
    debug_api.end_debug()
    return decisions


if __name__ == "__main__":
    main(Path(sys.argv[1]))
