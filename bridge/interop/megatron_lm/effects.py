"""Effects of Megatron-LM's arguments beyond their values: defaults that decide, settings that nothing reads."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from bridge.interop.builders import DELAYED, WGRAD, ImportBuilder
from bridge.interop.megatron_lm.arguments import Arguments, Written
from bridge.interop.megatron_lm.flags import BY_NAME, bears_on_precision
from bridge.precision.config import settings_of
from bridge.precision.fields import LAYER_COUNTS
from bridge.precision.schemes import FP8_SCHEMES

DYNAMIC = {"initial_loss_scale": 2**32, "min_loss_scale": 1.0, "loss_scale_window": 1000, "hysteresis": 2}
_MEGATRON_FSDP = ("use_megatron_fsdp", "use_custom_fsdp")
_SHARDED = ("use_distributed_optimizer", "use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp")
INFERENCE = re.compile(r"inference|text_generation|generate_samples")
"""Programs of Megatron-LM that train nothing."""
LATE = "only the run decides it"
DEFAULT_TAKEN = "the environment or the command line may set it; the script's own default was taken"
BRANCH = "the file alone does not decide this branch; the precision read here is that of the branch named"
SAY_IT = "Give it with --context variables='NAME=value', or give the log of the run or its configuration."


def shown(written: Written) -> object:
    """Return a setting's value; one that only the run decides as it is written."""
    return written.shown if written.value is None else written.value


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def refused(run: Arguments, builder: ImportBuilder) -> None:
    """Report switches with a value behind them, which Megatron-LM's parser does not start with."""
    for written in (*run.overridden, *run.settings.values()):
        if written.refused is not None:
            state = {True: "on", False: "off", None: "open"}[written.value]
            builder.record(f"megatron_lm.refused-{state}", written.name, written.refused)


def reduction(run: Arguments, mode: str, builder: ImportBuilder) -> None:
    """Say in what gradients are reduced: `--bf16` alone means FP32, `--fp16` alone does not."""
    wanted, refused = "accumulate_allreduce_grads_in_fp32", "grad_reduce_in_bf16"
    for key in (wanted, refused):
        if key in run.settings and run.settings[key].value is None:
            builder.record("megatron_lm.only-the-run-decides", run.settings[key].name, run.settings[key].shown)
        elif key in run.settings and key not in run:
            builder.map(run.settings[key].name)
    main = run.settings.get("main_grads_dtype")
    low = main is not None and str(main.value) not in ("fp32", "None")
    kept = refused in run and mode == "bf16" and not low
    if kept:
        builder.map(run.settings[refused].name, grad_reduce_in_fp32=False)
    elif refused in run:
        builder.record("megatron_lm.it-only-keeps-bf16", run.settings[refused].name, True)
    if any(key in run for key in _MEGATRON_FSDP) and mode != "fp32":
        _fsdp_reduction(run, mode, builder, states_kept=kept)
    elif wanted in run and kept:
        builder.record("megatron_lm.grad-reduce-in-bf16", run.settings[wanted].name, True)
    elif wanted in run:
        builder.map(run.settings[wanted].name, grad_reduce_in_fp32=True)
    elif not kept:
        _reduction_by_mode(run.settings.get(wanted), mode, builder, automatic=mode == "bf16" and not low)


def _reduction_by_mode(written: Written | None, mode: str, builder: ImportBuilder, *, automatic: bool) -> None:
    """State what the mode alone means for the reduction; `automatic`: it turns FP32 on, whatever is written."""
    off = written is not None and written.value is False and written.refused is None
    option = "--accumulate-allreduce-grads-in-fp32"
    if automatic and off and written is not None:
        builder.record("megatron_lm.reduces-gradients-in-fp32", written.name, False)
        builder.fields["grad_reduce_in_fp32"] = True
    elif automatic:
        detail = f"{builder.system} reduces gradients in FP32 under --bf16"
        builder.implied(option, True, detail, grad_reduce_in_fp32=True)
    elif mode != "fp32" and off and written is not None:
        builder.map(written.name, grad_reduce_in_fp32=False)
    elif mode != "fp32":
        detail = f"{builder.system} reduces gradients in {mode.upper()} without it"
        builder.implied(option, False, detail, grad_reduce_in_fp32=False)


def _fsdp_reduction(run: Arguments, mode: str, builder: ImportBuilder, *, states_kept: bool) -> None:
    """State in what Megatron-FSDP reduces gradients; `states_kept`: the arguments ask for the weights' dtype."""
    option, wanted = "--megatron-fsdp-main-grads-dtype", "--accumulate-allreduce-grads-in-fp32"
    kept = _dtype(run, "megatron_fsdp_main_grads_dtype") or mode
    sent = _dtype(run, "megatron_fsdp_grad_comm_dtype") or kept
    in_fp32 = kept == sent == "fp32"
    builder.fields["grad_reduce_in_fp32"] = in_fp32
    if kept == mode and not states_kept:
        detail = f"Megatron-FSDP keeps gradients in the weights' dtype since 0.19, {mode} here, whatever --{mode} means"
        builder.implied(option, "auto", f"{detail} without it")
    if "accumulate_allreduce_grads_in_fp32" in run:
        detail = f"Megatron-FSDP ignores it since 0.19, where {option} decides"
        remedy = "Drop it." if in_fp32 else f"Add {option} fp32."
        builder.report(wanted, True, "dead knob", detail, remedy)


def _dtype(run: Arguments, key: str) -> str | None:
    written = run.settings.get(key)
    return None if written is None or written.value in (None, "auto") else str(written.value)


def scheme(run: Arguments, builder: ImportBuilder, *, modern: bool) -> None:
    """State the scheme that decides, and name the settings that it does not read."""
    fields = builder.fields
    builder.imply_scheme(_option, layers=1 if fields.get("fp8") or fields.get("fp4") else None)
    for key, written in run.settings.items():
        flag = BY_NAME.get(key)
        if flag is not None and builder.mapped.get(written.name):
            dead = _unread(flag.field, fields, modern=modern)
            if dead:
                builder.report(written.name, shown(written), "dead knob", dead, "Drop it, or set what makes it act.")


def _unread(field: str, fields: Mapping[str, Any], *, modern: bool) -> str | None:
    """Return why a setting that was written has no effect, or None."""
    chosen = fields.get("fp8_recipe") if fields.get("fp8") else None
    read_by = settings_of(FP8_SCHEMES[chosen]) if chosen in FP8_SCHEMES else ()
    if field in DELAYED and field not in read_by and fields[field] != DELAYED[field]:
        return f"read by delayed scaling only, and this is {chosen or 'no FP8 run'}"
    if field.startswith(("fp8_", "fp4_")) and not fields.get(field[:3]):
        default = {"fp8_recipe": "delayed", "fp4_recipe": "nvfp4", "fp8_wgrad": True}.get(field, False)
        says_more = fields.get(field) not in (None, DELAYED.get(field, default))
        return f"unread without --{field[:3]}-format" if says_more else None
    if field == "fp8_wgrad" and fields[field] is False and modern:
        return WGRAD
    if field in LAYER_COUNTS and not fields.get("first_last_layers_bf16") and fields[field] not in (0, 1):
        return "unread without --first-last-layers-bf16"
    return None


def loss_scale(mode: str, builder: ImportBuilder) -> None:
    """State a dynamic loss scale, and name the parts of its schedule that nothing reads."""
    fields = builder.fields
    scale = fields.get("loss_scale")
    constant = scale is not None and float(scale) != 0
    if "loss_scale" in fields and not constant:
        builder.fields["loss_scale"] = None
    for field, value in DYNAMIC.items():
        name = _option(field)
        if mode == "fp16" and not constant and field not in fields:
            builder.implied(name, value, **{field: value})
        elif field in fields and (mode != "fp16" or constant) and float(fields[field]) != value:
            builder.record("megatron_lm.read-by-a-dynamic-loss", name, fields[field])


def sharding(run: Arguments, builder: ImportBuilder, *, modern: bool) -> None:
    """Report settings that the sharding switches off."""
    fields = builder.fields
    if fields.get("fp8_param_gather") and "use_torch_fsdp2" in run and modern:
        builder.record("megatron_lm.use-torch-fsdp2", "--fp8-param-gather", True)
        fields["fp8_param_gather"] = False
    elif fields.get("fp8_param_gather") and run.label and not any(key in run for key in _SHARDED) and not run.undecided:
        builder.record("megatron_lm.asserts-on-it-without-use", "--fp8-param-gather", True)
    if any(key in run for key in _MEGATRON_FSDP) and fields.get("reuse_grad_buf_for_mxfp8_param_ag"):
        builder.record("megatron_lm.use-megatron-fsdp", "--reuse-grad-buf-for-mxfp8-param-ag", True)
        fields["reuse_grad_buf_for_mxfp8_param_ag"] = False


def environment(variables: Mapping[str, str], builder: ImportBuilder) -> None:
    """Map TF32, which the environment decides, and report other variables that bear on precision."""
    forbidden = variables.get("NVIDIA_TF32_OVERRIDE") == "0"
    for name, value in variables.items():
        if name == "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE" and value == "1" and forbidden:
            builder.record("megatron_lm.nvidia_tf32_override-turns-tf32", name, value)
        elif name == "NVIDIA_TF32_OVERRIDE" and value == "0":
            builder.map(name, tf32=False)
        elif name == "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE" and value in ("0", "1"):
            builder.map(name, tf32=value == "1")
        elif bears_on_precision(name.lower()) and name.startswith(("NVTE_", "NVIDIA_", "TORCH_", "ACCELERATE_")):
            builder.record("megatron_lm.an-environment-variable-which", name, value)


def inference(run: Arguments, builder: ImportBuilder) -> None:
    """Say where a program serves or generates, by its name, and trains nothing."""
    if INFERENCE.search(run.launch.program):
        builder.record("megatron_lm.inference-by-its-name-not-training", run.label, None)


def undecided(run: Arguments, builder: ImportBuilder, named: Collection[str] = ()) -> None:
    """Report what only a run of the script decides; `named`: files that were reported before."""
    for text in dict.fromkeys(run.undecided):
        builder.record("megatron_lm.it-may-hold-further", text, None)
    for decision in run.launch.decisions:
        builder.record("megatron_lm.the-file-alone-does", decision, "taken")
    for loss in run.unmapped:
        builder.report(loss.field, loss.value, loss.reason, loss.detail, loss.remedy)
    for note in run.launch.notes:
        if note not in named:
            builder.record("megatron_lm.it-is-not-read-and-may", note, None)
    for name, value in run.launch.defaulted.items():
        builder.record("megatron_lm.the-environment-or-the-command", f"${name}", value)
