"""Effects of Megatron-LM's arguments beyond their values: defaults, and settings without effect."""

import re
from collections.abc import Mapping
from typing import Any

from bridge.precision.config import FIELD_DEFAULTS
from bridge.precision.fields import LAYER_COUNTS
from bridge.read.foreign.import_builder import MODES, ImportBuilder
from bridge.read.foreign.meaning import unread_fields
from bridge.read.megatron_lm.arguments import Arguments
from bridge.read.megatron_lm.engine_file import DEEPSPEED_FILE, EngineFile
from bridge.read.megatron_lm.flags import BY_NAME, OTHER_SETTINGS, bears_on_precision
from bridge.registry.config import MixedPrecisionConfig
from bridge.rules.inert import SCALER_SCHEDULE

_MEGATRON_FSDP = ("use_megatron_fsdp", "use_custom_fsdp")
_SHARDED = ("use_distributed_optimizer", "use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp")
INFERENCE = re.compile(r"inference|text_generation|generate_samples")
"""Programs of Megatron-LM that train nothing."""
WANTED = "accumulate_allreduce_grads_in_fp32"
REFUSED = "grad_reduce_in_bf16"
IN_FP32 = "--accumulate-allreduce-grads-in-fp32"
SCALER = ("loss_scale", *SCALER_SCHEDULE)
REDUCTION = (WANTED, REFUSED)
OWNED_BY_DEEPSPEED = (DEEPSPEED_FILE, *SCALER, *REDUCTION)
"""Arguments of which DeepSpeed's engine decides instead."""
USUAL = {**FIELD_DEFAULTS, "fp8_recipe": "delayed", **dict.fromkeys(LAYER_COUNTS, 1)}
"""Field -> Megatron-LM's own default of its setting."""


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def is_engine(run: Arguments) -> bool:
    """Return whether a run hands training to DeepSpeed."""
    return "deepspeed" in run or DEEPSPEED_FILE in run.settings


def engine(
    run: Arguments, builder: ImportBuilder, file: EngineFile, stated: Mapping[str, Any] | None
) -> None:
    """Report the arguments that have no effect under DeepSpeed, and map its file, which decides instead.

    `stated` are the fields of a precision that the file states; None where it states none, or is
    not read.

    Source: Megatron-DeepSpeed megatron/optimizer/__init__.py, which returns the bare optimizer
    under --deepspeed and leaves the arguments of its own scaler unread.
    """
    for key in (*SCALER, *REDUCTION):
        written = run.settings.get(key)
        if written is not None and written.value is not False:
            does = "scales the loss" if key in SCALER else "reduces gradients"
            builder.record(
                "megatron_deepspeed.under-deepspeed-the-engine",
                written.name,
                written.shown,
                does=does,
            )
    written = run.settings.get(DEEPSPEED_FILE)
    if written is None:
        builder.record("megatron_deepspeed.the-engine-scales-the-loss", "--deepspeed", True)
    elif stated is None:
        builder.report(written.name, written.shown, *OTHER_SETTINGS[DEEPSPEED_FILE].sentence)
    else:
        for name in (*MODES, "params_dtype", "pipeline_dtype"):
            builder.fields.pop(name, None)
        builder.map(written.name, **stated)
        builder.record("megatron_deepspeed.read", written.name, written.shown, place=file.place)


def reduction(run: Arguments, mode: str, builder: ImportBuilder) -> None:
    """Say in what gradients are reduced: `--bf16` alone means FP32, `--fp16` alone does not."""
    wanted = run.settings.get(WANTED)
    refused = run.settings.get(REFUSED)
    for key, written in ((WANTED, wanted), (REFUSED, refused)):
        if written is not None and written.value is None:
            builder.record("megatron_lm.only-the-run-decides", written.name, written.shown)
        elif written is not None and key not in run:
            builder.map(written.name)
    main = run.settings.get("main_grads_dtype")
    automatic = mode == "bf16" and (main is None or str(main.value) in ("fp32", "None"))
    kept = automatic and REFUSED in run
    if refused is not None and kept:
        builder.map(refused.name, grad_reduce_in_fp32=False)
    elif refused is not None and REFUSED in run:
        builder.record("megatron_lm.it-only-keeps-bf16", refused.name, True)
    if mode != "fp32" and any(key in run for key in _MEGATRON_FSDP):
        _fsdp_reduction(run, mode, builder, states_kept=kept)
    elif wanted is not None and WANTED in run and kept:
        builder.record("megatron_lm.grad-reduce-in-bf16", wanted.name, True)
    elif wanted is not None and WANTED in run:
        builder.map(wanted.name, grad_reduce_in_fp32=True)
    elif mode != "fp32" and not kept:
        builder.fields["grad_reduce_in_fp32"] = automatic
        is_off = wanted is not None and wanted.value is False and wanted.refused is None
        if wanted is not None and is_off and automatic:
            builder.record("megatron_lm.reduces-gradients-in-fp32", wanted.name, False)
        elif wanted is not None and is_off:
            builder.map(wanted.name, grad_reduce_in_fp32=False)
        else:
            row = "reduced-in-fp32-by-itself" if automatic else "not-reduced-in-fp32"
            builder.record(f"megatron_lm.{row}", IN_FP32, automatic, mode=mode.upper())


def _fsdp_reduction(
    run: Arguments, mode: str, builder: ImportBuilder, *, states_kept: bool
) -> None:
    """State in what Megatron-FSDP reduces gradients.

    `states_kept`: the arguments ask for the dtype of the weights.
    """
    kept = _fsdp_dtype(run, "main_grads") or mode
    sent = _fsdp_dtype(run, "grad_comm") or kept
    builder.fields["grad_reduce_in_fp32"] = kept == sent == "fp32"
    if kept == mode and not states_kept:
        builder.record(
            "megatron_lm.fsdp-keeps-gradients",
            "--megatron-fsdp-main-grads-dtype",
            "auto",
            mode=mode,
        )
    if WANTED in run:
        builder.record("megatron_lm.fsdp-ignores-it", IN_FP32, True)


def _fsdp_dtype(run: Arguments, name: str) -> str | None:
    """Return the dtype that an argument of Megatron-FSDP states; None for its own choice."""
    written = run.settings.get(f"megatron_fsdp_{name}_dtype")
    if written is None or written.value in (None, "auto"):
        return None
    return str(written.value)


def scheme(mode: str, builder: ImportBuilder, *, is_scaled: bool) -> None:
    """State the scheme that decides, and a dynamic loss scale where Megatron-LM scales the loss."""
    fields = builder.fields
    layers = None
    if fields.get("fp8") or fields.get("fp4"):
        layers = 1
    builder.imply_scheme(_option, layers=layers)
    if float(fields.get("loss_scale") or 0) == 0 and "loss_scale" in fields:
        fields["loss_scale"] = None  # Megatron-LM takes 0 for unset
    if mode == "fp16" and is_scaled and fields.get("loss_scale") is None:
        for field in SCALER_SCHEDULE:
            if fields.get(field) is None:
                default = FIELD_DEFAULTS[field]
                builder.implied(_option(field), default, **{field: default})


def unread(run: Arguments, builder: ImportBuilder) -> None:
    """Report the settings that this run does not read, unless they are at their defaults.

    A log prints all of them.
    """
    config = MixedPrecisionConfig.from_dict(builder.fields)
    why = unread_fields(config)
    values = config.to_dict()
    for key, written in run.settings.items():
        if key not in BY_NAME or not builder.mapped.get(written.name):
            continue
        field = BY_NAME[key].field
        if field in why and run.has_end is not None:
            builder.fields.pop(field, None)
            builder.mapped[written.name] = ()
        elif field in why and values.get(field) not in (None, USUAL[field]):
            builder.record("megatron_lm.not-read", written.name, written.shown, why=why[field])
        elif field == "fp8_wgrad" and values.get(field) is False:
            builder.record("megatron_lm.transformer-engine-and-later", written.name, written.shown)


def sharding(run: Arguments, builder: ImportBuilder) -> None:
    """Report settings that the sharding switches off."""
    fields = builder.fields
    is_sharded = any(key in run for key in _SHARDED)
    is_known = bool(run.label) and not run.undecided
    if fields.get("fp8_param_gather") and "use_torch_fsdp2" in run:
        builder.record("megatron_lm.use-torch-fsdp2", "--fp8-param-gather", True)
        fields["fp8_param_gather"] = False
    elif fields.get("fp8_param_gather") and is_known and not is_sharded:
        builder.record("megatron_lm.asserts-on-it-without-use", "--fp8-param-gather", True)
    is_fsdp = any(key in run for key in _MEGATRON_FSDP)
    if is_fsdp and fields.get("reuse_grad_buf_for_mxfp8_param_ag"):
        builder.record("megatron_lm.use-megatron-fsdp", "--reuse-grad-buf-for-mxfp8-param-ag", True)
        fields["reuse_grad_buf_for_mxfp8_param_ag"] = False


def environment(variables: Mapping[str, str], builder: ImportBuilder) -> None:
    """Map TF32, which the environment decides, and report other variables that bear on precision."""
    forbidden = variables.get("NVIDIA_TF32_OVERRIDE") == "0"
    for name, value in variables.items():
        if name == "NVIDIA_TF32_OVERRIDE" and forbidden:
            builder.map(name, tf32=False)
        elif name == "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE" and value in ("0", "1") and not forbidden:
            builder.map(name, tf32=value == "1")
        elif bears_on_precision(name.lower()) and name.startswith(
            ("NVTE_", "NVIDIA_", "TORCH_", "ACCELERATE_")
        ):
            builder.record("megatron_lm.an-environment-variable-which", name, value)


def undecided(run: Arguments, builder: ImportBuilder, *, is_file_read: bool = False) -> None:
    """Report what only a run of the script decides.

    `is_file_read`: the script writes the engine's file, which was read.
    """
    notes = [*run.launch.notes]
    heredocs = [note for note in notes if note.startswith("heredoc ")]
    if is_file_read and len(heredocs) == 1:  # the engine's file is the only one
        notes = [note for note in notes if note not in heredocs]
    for text in dict.fromkeys(run.undecided):
        builder.record("megatron_lm.it-may-hold-further", text, None)
    for decision in run.launch.decisions:
        builder.record("megatron_lm.the-file-alone-does", decision, "taken")
    if run.has_end is False and not run.decided_by:
        builder.record("megatron_lm.incomplete", "arguments", None)
    for note in notes:
        builder.record("megatron_lm.it-is-not-read-and-may", note, None)
    for name, value in run.launch.defaulted.items():
        builder.record("megatron_lm.the-environment-or-the-command", f"${name}", value)
