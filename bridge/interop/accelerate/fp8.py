"""FP8 in Accelerate: its back ends Transformer Engine, torchao and MS-AMP, read and written.

Settings of FP8 are not always what runs: accelerate hands on only values that differ from its own defaults, so its
default `amax_compute_algo="most_recent"` never reaches Transformer Engine, whose own default is "max".
"""

from typing import Any

from bridge.interop.builders import ExportBuilder, ImportBuilder
from bridge.interop.pytorch.torchao import export_gather, import_gather, report_gather
from bridge.interop.reading.settings import Settings
from bridge.interop.table import table

TABLE = table("accelerate")
BACK_ENDS = ("TE", "AO", "MSAMP")
HANDLERS = {"TE": "TERecipeKwargs", "AO": "AORecipeKwargs"}
ALGORITHM = "amax_compute_algo"
GATHER, FUNCTION = "enable_fsdp_float8_all_gather", "module_filter_func"
OVERRIDES = ("override_linear_precision", "override_fprop", "override_dgrad", "override_wgrad")


def import_fp8(builder: ImportBuilder, block: Settings, backend: str, *, on: bool) -> None:
    """Map the settings of FP8 for the back end that runs it, `backend` where the file does not say."""
    if on and block.given("backend"):
        backend = str(block["backend"]).upper().replace("TORCHAO", "AO")
        if backend not in BACK_ENDS:
            raise TABLE.wrong("back-ends", block, "backend")
        builder.map(block.name("backend"))
    elif on:
        builder.record("accelerate.accelerate-takes-the-first", "fp8_config.backend", backend)
    if on and backend == "TE":
        _transformer_engine(builder, block)
    elif on and backend == "AO":
        _torchao(builder, block)
    elif on:
        builder.record("accelerate.ms-amp-keeps", block.name("opt_level"), block.values.get("opt_level", "O2"))
    acting = {one: one == backend for one in BACK_ENDS}
    TABLE.read(builder, block, "fp8", fp8=on, delayed=builder.fields.get("fp8_recipe") == "delayed", **acting)


def export_fp8(builder: ExportBuilder) -> dict[str, Any] | None:
    """Return the block of FP8 with its back end, and map the fields to it; None, reported, where there is none."""
    config = builder.config
    block: dict[str, Any] = {"backend": "TE", "fp8_format": str(config.fp8).upper()}
    mapped = {"fp8": "fp8_format", "fp8_recipe": "backend"}
    if config.fp8 == "hybrid" and config.fp8_recipe == "tensorwise":
        block = {"backend": "AO", GATHER: config.fp8_param_gather, "pad_inner_dim": True}
        mapped = {"fp8": "backend", "fp8_recipe": "backend"}
        if not config.fp8_param_gather:
            mapped |= dict.fromkeys(("fp8_param_gather", "fp8_param"), GATHER)
        export_gather(builder)
    elif config.fp8_recipe == "mxfp8":
        block["use_mxfp8_block_scaling"] = True
        mapped["fp8_recipe"] = "use_mxfp8_block_scaling"
    elif config.fp8_recipe == "delayed":
        block |= TABLE.write(builder, "fp8", "fp8_config") | {ALGORITHM: "max"}
        if config.fp8_amax_compute_algo == "max":
            mapped["fp8_amax_compute_algo"] = ALGORITHM
        else:
            builder.record("accelerate.accelerate-never-hands", "fp8_amax_compute_algo")
        if not config.fp8_wgrad:
            builder.record("accelerate.transformer-engine-and-later", "fp8_wgrad")
    else:
        fields = ("fp8", "fp8_recipe", "fp8_param_gather")
        builder.record_if_on("accelerate.no-such-scaling", fields, recipe=config.fp8_recipe, format=config.fp8)
        return None
    for field, setting in mapped.items():
        builder.map(field, f"fp8_config.{setting}")
    if block["backend"] == "TE" and config.fp8_param_gather:
        builder.record_if_stated("accelerate.accelerate-replaces-modules", ("fp8_param_gather", "fp8_param"))
    return block


def _transformer_engine(builder: ImportBuilder, fp8: Settings) -> None:
    name = "fp8_format" if fp8.given("fp8_format") else "format"
    written = (fp8.text(name) or "HYBRID").upper()
    if written not in ("HYBRID", "E4M3"):
        raise TABLE.wrong("te-formats", fp8, name)
    is_block = bool(fp8.switch("use_mxfp8_block_scaling"))
    fields = {"fp8": "e4m3" if is_block else written.lower(), "fp8_recipe": "mxfp8" if is_block else "delayed"}
    builder.fields |= fields
    if not fp8.given(name):
        sentence = "hybrid-over-mxfp8" if is_block else "hybrid-by-default"
        builder.record(f"accelerate.{sentence}", fp8.name("fp8_format"), written)
    else:
        builder.map(fp8.name(name), fp8=fields["fp8"])
        if fields["fp8"] != written.lower():
            builder.record("accelerate.accelerate-own-default", fp8.name(name), written)
    for key, scheme in (("backend", "delayed"), ("use_mxfp8_block_scaling", "mxfp8")):
        if fp8.given(key):
            builder.map(fp8.name(key), **({"fp8_recipe": scheme} if scheme == fields["fp8_recipe"] else {}))
    for key in OVERRIDES:
        if "true" in str(fp8.values.get(key)).lower():
            builder.record("accelerate.te-swallows-it", fp8.name(key), fp8[key])
        elif fp8.given(key):
            builder.map(fp8.name(key))
    if is_block:
        return
    algorithm = fp8.word(ALGORITHM, ("max", "most_recent"))
    builder.fields["fp8_amax_compute_algo"] = "max"
    if algorithm == "max":
        builder.map(fp8.name(ALGORITHM), fp8_amax_compute_algo="max")
    else:
        sentence = "most_recent-by-default" if algorithm is None else "most_recent-written"
        builder.record(f"accelerate.{sentence}", fp8.name(ALGORITHM), algorithm)


def _torchao(builder: ImportBuilder, fp8: Settings) -> None:
    builder.fields |= {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
    if fp8.given("backend"):
        builder.map(fp8.name("backend"), fp8_recipe="tensorwise")
    gather = fp8.switch(GATHER)
    if gather is None:
        builder.fields["fp8_param_gather"] = True
        builder.record("accelerate.gather-by-default", fp8.name(GATHER), True)
        report_gather(builder, fp8.name(GATHER))
    else:
        import_gather(builder, fp8.name(GATHER), gather)
    sentence = "a-function-chooses-modules" if fp8.given(FUNCTION) else "modules-not-layers"
    builder.record(f"accelerate.{sentence}", fp8.name(FUNCTION), fp8.values.get(FUNCTION))
