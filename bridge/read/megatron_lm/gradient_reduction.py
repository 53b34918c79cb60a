"""`state_reduction`: the dtype in which Megatron-LM reduces gradients, by the arguments of a run.

Under `--bf16` with FP32 main gradients, Megatron-LM's parser turns reduction in FP32 on, unless
`--grad-reduce-in-bf16` is set. Under `--fp16` gradients are reduced in FP16, unless
`--accumulate-allreduce-grads-in-fp32` is set. Megatron-FSDP has other arguments for it.

Source: Megatron-LM of 2026-08-22, training/arguments.py validate_args.
"""

from bridge.read.foreign.import_builder import ImportBuilder
from bridge.read.megatron_lm.written_arguments import WrittenArguments

FP32_ARGUMENT = "accumulate_allreduce_grads_in_fp32"
BF16_ARGUMENT = "grad_reduce_in_bf16"
REDUCTION_ARGUMENTS = (FP32_ARGUMENT, BF16_ARGUMENT)
FP32_OPTION = "--accumulate-allreduce-grads-in-fp32"
FSDP_SWITCHES = ("use_megatron_fsdp", "use_custom_fsdp")
"""Switches of Megatron-FSDP. Older releases have the second switch."""


def state_reduction(written: WrittenArguments, mode: str, builder: ImportBuilder) -> None:
    """State in which dtype gradients are reduced, and report arguments without effect.

    Args:
        mode: bf16, fp16 or fp32.
        builder: The report.
    """
    _map_inactive_arguments(written, builder)
    is_automatic = _is_fp32_by_default(written, mode)
    stays_in_bf16 = is_automatic and BF16_ARGUMENT in written
    if stays_in_bf16:
        name = written.settings[BF16_ARGUMENT].name
        builder.map(name, grad_reduce_in_fp32=False)
    elif BF16_ARGUMENT in written:
        name = written.settings[BF16_ARGUMENT].name
        builder.record("megatron_lm.grad-reduce-in-bf16-has-no-effect", name, True)
    if mode != "fp32" and uses_megatron_fsdp(written):
        _state_fsdp_reduction(written, mode, builder, stays_in_bf16=stays_in_bf16)
    elif FP32_ARGUMENT in written:
        name = written.settings[FP32_ARGUMENT].name
        if stays_in_bf16:
            builder.record("megatron_lm.turned-off-by-grad-reduce-in-bf16", name, True)
        else:
            builder.map(name, grad_reduce_in_fp32=True)
    elif mode != "fp32" and not stays_in_bf16:
        _state_default(written, mode, builder, is_automatic=is_automatic)


def _map_inactive_arguments(written: WrittenArguments, builder: ImportBuilder) -> None:
    """Map arguments of the reduction that are off, and report those that are decided when the run starts."""
    for key in REDUCTION_ARGUMENTS:
        setting = written.settings.get(key)
        if setting is not None and setting.value is None:
            builder.record("megatron_lm.only-the-run-decides", setting.name, setting.shown)
        elif setting is not None and key not in written:
            builder.map(setting.name)


def uses_megatron_fsdp(written: WrittenArguments) -> bool:
    """Return whether Megatron-FSDP shards the run."""
    return any(key in written for key in FSDP_SWITCHES)


def _is_fp32_by_default(written: WrittenArguments, mode: str) -> bool:
    """Return whether the parser turns reduction in FP32 on if no argument forbids it."""
    main_grads = written.settings.get("main_grads_dtype")
    has_fp32_grads = main_grads is None or str(main_grads.value) in ("fp32", "None")
    return mode == "bf16" and has_fp32_grads


def _state_default(
    written: WrittenArguments, mode: str, builder: ImportBuilder, *, is_automatic: bool
) -> None:
    """State the parser's default, and report a switch that is written as off.

    Args:
        mode: bf16 or fp16.
        builder: The report.
        is_automatic: Whether the parser turns reduction in FP32 on.
    """
    builder.fields["grad_reduce_in_fp32"] = is_automatic
    setting = written.settings.get(FP32_ARGUMENT)
    if setting is not None and setting.value is False and setting.refused is None:
        if is_automatic:
            builder.record("megatron_lm.reduced-in-fp32-whatever-is-written", setting.name, False)
        else:
            builder.map(setting.name, grad_reduce_in_fp32=False)
        return
    sentence = "megatron_lm.not-reduced-in-fp32"
    if is_automatic:
        sentence = "megatron_lm.reduced-in-fp32-by-itself"
    builder.record(sentence, FP32_OPTION, is_automatic, mode=mode.upper())


def _state_fsdp_reduction(
    written: WrittenArguments, mode: str, builder: ImportBuilder, *, stays_in_bf16: bool
) -> None:
    """State in which dtype Megatron-FSDP reduces gradients.

    Args:
        mode: bf16 or fp16.
        builder: The report.
        stays_in_bf16: Whether `--grad-reduce-in-bf16` turns the parser's default off.
    """
    main_dtype = _get_fsdp_dtype(written, "main_grads") or mode
    communication_dtype = _get_fsdp_dtype(written, "grad_comm") or main_dtype
    builder.fields["grad_reduce_in_fp32"] = main_dtype == communication_dtype == "fp32"
    if main_dtype == mode and not stays_in_bf16:
        option = "--megatron-fsdp-main-grads-dtype"
        builder.record("megatron_lm.fsdp-keeps-gradients", option, "auto", mode=mode)
    if FP32_ARGUMENT in written:
        builder.record("megatron_lm.fsdp-ignores-it", FP32_OPTION, True)


def _get_fsdp_dtype(written: WrittenArguments, name: str) -> str | None:
    """Return the dtype that an argument of Megatron-FSDP states; None if Megatron-FSDP chooses it."""
    setting = written.settings.get(f"megatron_fsdp_{name}_dtype")
    if setting is None or setting.value in (None, "auto"):
        return None
    return str(setting.value)
