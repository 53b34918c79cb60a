"""Files with Megatron's per-module recipe, written next to exported arguments.

    export(config, num_layers=32, pipeline_model_parallel_size=4)

Megatron counts layers within a stage. So rows of `modules` that name layers become other patterns
on each stage, and a file for each stage of a stated layout.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bridge.errors import RunConfigError
from bridge.model.layout import ParallelLayout
from bridge.precision.mode import get_low_precision_format
from bridge.precision.module_row import ModuleRow, find_absent_layers, parse_module_rows
from bridge.precision.module_schemes import (
    make_chunk_recipes,
    make_shared_recipe,
    make_stage_recipes,
)
from bridge.read.foreign.export_builder import ExportBuilder
from bridge.read.foreign.payload_text import as_yaml
from bridge.read.foreign.system import ContextKey

SHARED_FILE_NAME = "te_precision.yaml"
"""Name of the file that all ranks share."""
STAGES_KEY = "pipeline_model_parallel_size"
CHUNKS_KEY = "virtual_pipeline_model_parallel_size"
LAYOUT_KEYS = (
    ContextKey(
        name="num_layers",
        meaning="layers of the model, where a precision chooses single layers",
        use=("export",),
    ),
    ContextKey(
        name=STAGES_KEY,
        meaning="stages of the pipeline, for rows that name layers",
        use=("export",),
    ),
    ContextKey(
        name=CHUNKS_KEY,
        meaning="model chunks of a stage, for rows that name layers",
        use=("export",),
    ),
)
"""Keys of the context that state the layout of the model."""


def build_shared_file(builder: ExportBuilder, layout: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the content of the file that all ranks share; None where no such file is needed.

    Stages that need different files get a file each in the report, and share none.

    Args:
        builder: The report of the export.
        layout: Keys of `LAYOUT_KEYS` with their values.
    """
    rows = parse_module_rows(builder.values["modules"])
    if not rows:
        return None
    if not any(row.layer_numbers for row in rows):
        return make_shared_recipe(builder.config)
    if layout.get("num_layers") is None:
        builder.record("megatron_lm.patterns-need-the-layout", "modules")
        return None
    try:
        files = _build_stage_files(
            rows, layout, low_format=get_low_precision_format(builder.config)
        )
    except RunConfigError as error:
        detail = f"{error.path}: {error.rule}, got {error.value!r:.80}"
        builder.report("modules", "unsupported", detail, "Correct the layout or the rows.")
        return None
    if all(file == files[0] for file in files):
        return files[0]
    for stage, file in enumerate(files):
        name = SHARED_FILE_NAME.replace(".yaml", f".stage{stage}.yaml")
        builder.files[name] = as_yaml(file)
    builder.record("megatron_lm.a-file-for-each-stage", "modules", stages=len(files))
    return None


def _build_stage_files(
    rows: Sequence[ModuleRow], layout: Mapping[str, Any], *, low_format: str | None
) -> list[dict[str, Any] | None]:
    """Return the content of the file of each stage.

    Args:
        rows: The rows of `modules`.
        layout: Keys of `LAYOUT_KEYS` with their values.
        low_format: The low-precision format of the run, fp8 or fp4; None: it has none.

    Raises:
        RunConfigError: The layout is wrong, or chunks of a stage need different files.
    """
    for name, value in layout.items():
        if type(value) is not int or value < 1:
            raise RunConfigError.of(name, "must be a whole number from 1", value, "Correct it.")
    num_layers = layout["num_layers"]
    for row in rows:
        if find_absent_layers(row.layer_numbers, num_layers):
            rule = f"{row} names a layer beyond the last"
            raise RunConfigError.of("num_layers", rule, num_layers, "Correct it.")
    parallel = ParallelLayout.from_model(layout)
    chunks = [place.layers for place in parallel.places(num_layers)]
    files = make_stage_recipes(make_chunk_recipes(rows, chunks, run=low_format), parallel.pipeline)
    if None in files:
        stage = files.index(None)
        rule = f"the model chunks of stage {stage} need different files, and a stage has one"
        raise RunConfigError.of(CHUNKS_KEY, rule, parallel.virtual, "Use one chunk per stage.")
    return files
