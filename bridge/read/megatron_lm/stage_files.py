"""Files with Megatron's per-module recipe, written next to exported arguments.

    export(config, num_layers=32, pipeline_model_parallel_size=4)

Megatron counts layers within a stage. So rows of `modules` that name layers become other patterns
on each stage, and a file for each stage of a stated layout.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bridge.errors import RunConfigError
from bridge.model.layout import Parallel
from bridge.precision.mode import low_format_of
from bridge.precision.module_row import ModuleRow, layers_beyond, module_rows
from bridge.precision.module_schemes import chunk_recipes, file_of, stage_recipes
from bridge.read.foreign.export_builder import ExportBuilder
from bridge.read.foreign.payload_text import as_yaml
from bridge.read.foreign.system import ContextKey

FILE = "te_precision.yaml"
"""Name of the file that all ranks share."""
STAGES = "pipeline_model_parallel_size"
CHUNKS = "virtual_pipeline_model_parallel_size"
LAYOUT = (
    ContextKey(
        name="num_layers",
        meaning="layers of the model, where a precision chooses single layers",
        use=("export",),
    ),
    ContextKey(
        name=STAGES, meaning="stages of the pipeline, for rows that name layers", use=("export",)
    ),
    ContextKey(
        name=CHUNKS, meaning="model chunks of a stage, for rows that name layers", use=("export",)
    ),
)
"""Keys of the context that state the layout of the model."""


def shared_file(builder: ExportBuilder, layout: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the content of the file that all ranks share; None where no such file is needed.

    Stages that need different files get a file each in the report, and share none.

    Args:
        builder: The report of the export.
        layout: Keys of `LAYOUT` with their values.
    """
    rows = module_rows(builder.values["modules"])
    if not rows:
        return None
    if not any(row.layer_numbers for row in rows):
        return file_of(builder.config)
    if layout.get("num_layers") is None:
        builder.record("megatron_lm.patterns-need-the-layout", "modules")
        return None
    try:
        files = _files_of_stages(rows, layout, run=low_format_of(builder.config))
    except RunConfigError as error:
        detail = f"{error.path}: {error.rule}, got {error.value!r:.80}"
        builder.report("modules", "unsupported", detail, "Correct the layout or the rows.")
        return None
    if all(file == files[0] for file in files):
        return files[0]
    for stage, file in enumerate(files):
        name = FILE.replace(".yaml", f".stage{stage}.yaml")
        builder.files[name] = as_yaml(file)
    builder.record("megatron_lm.a-file-for-each-stage", "modules", stages=len(files))
    return None


def _files_of_stages(
    rows: Sequence[ModuleRow], layout: Mapping[str, Any], *, run: str | None
) -> list[dict[str, Any] | None]:
    """Return the content of the file of each stage.

    Args:
        rows: The rows of `modules`.
        layout: Keys of `LAYOUT` with their values.
        run: The low-precision format of the run, fp8 or fp4; None: it has none.

    Raises:
        RunConfigError: The layout is wrong, or chunks of a stage need different files.
    """
    for name, value in layout.items():
        if type(value) is not int or value < 1:
            raise RunConfigError.of(name, "must be a whole number from 1", value, "Correct it.")
    num_layers = layout["num_layers"]
    for row in rows:
        if layers_beyond(row.layer_numbers, num_layers):
            rule = f"{row} names a layer beyond the last"
            raise RunConfigError.of("num_layers", rule, num_layers, "Correct it.")
    parallel = Parallel.of(layout)
    chunks = [place.layers for place in parallel.places(num_layers)]
    files = stage_recipes(chunk_recipes(rows, chunks, run=run), parallel.pipeline)
    if None in files:
        stage = files.index(None)
        rule = f"the model chunks of stage {stage} need different files, and a stage has one"
        raise RunConfigError.of(CHUNKS, rule, parallel.virtual, "Use one chunk per stage.")
    return files
