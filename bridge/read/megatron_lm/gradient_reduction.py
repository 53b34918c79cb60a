"""`state_reduction`: the dtype in which Megatron-LM reduces gradients, by the arguments of a run.

Megatron-LM's parser turns reduction in FP32 on under `--bf16` with FP32 main gradients, unless
`--grad-reduce-in-bf16` is there. Under `--fp16` gradients are reduced in FP16 unless
`--accumulate-allreduce-grads-in-fp32` is there. Megatron-FSDP has dtypes of its own.

Source: Megatron-LM of 2026-08-22, training/arguments.py validate_args.
"""

from bridge.read.foreign.import_builder import ImportBuilder
from bridge.read.megatron_lm.written_arguments import WrittenArguments

FP32_ARGUMENT = "accumulate_allreduce_grads_in_fp32"
BF16_ARGUMENT = "grad_reduce_in_bf16"
REDUCTION_ARGUMENTS = (FP32_ARGUMENT, BF16_ARGUMENT)
FP32_OPTION = "--accumulate-allreduce-grads-in-fp32"
FSDP_SWITCHES = ("use_megatron_fsdp", "use_custom_fsdp")
"""Switches of Megatron-FSDP, the second one of older releases."""


def state_reduction(run: WrittenArguments, mode: str, builder: ImportBuilder) -> None:
    """State in which dtype gradients are reduced, and report arguments without effect."""
    for key in REDUCTION_ARGUMENTS:
        written = run.settings.get(key)
        if written is not None and written.value is None:
            builder.record("megatron_lm.only-the-run-decides", written.name, written.shown)
        elif written is not None and key not in run:
            builder.map(written.name)
    is_automatic = _is_fp32_by_default(run, mode)
    stays_in_bf16 = is_automatic and BF16_ARGUMENT in run
    if BF16_ARGUMENT in run:
        name = run.settings[BF16_ARGUMENT].name
        if stays_in_bf16:
            builder.map(name, grad_reduce_in_fp32=False)
        else:
            builder.record("megatron_lm.grad-reduce-in-bf16-has-no-effect", name, True)
    if mode != "fp32" and uses_megatron_fsdp(run):
        _state_fsdp_reduction(run, mode, builder, stays_in_bf16=stays_in_bf16)
    elif FP32_ARGUMENT in run:
        name = run.settings[FP32_ARGUMENT].name
        if stays_in_bf16:
            builder.record("megatron_lm.turned-off-by-grad-reduce-in-bf16", name, True)
        else:
            builder.map(name, grad_reduce_in_fp32=True)
    elif mode != "fp32" and not stays_in_bf16:
        _state_default(run, mode, builder, is_automatic=is_automatic)


def uses_megatron_fsdp(run: WrittenArguments) -> bool:
    """Return whether Megatron-FSDP shards the run."""
    return any(key in run for key in FSDP_SWITCHES)


def _is_fp32_by_default(run: WrittenArguments, mode: str) -> bool:
    """Return whether the parser turns reduction in FP32 on by itself, where nothing forbids it."""
    main_grads = run.settings.get("main_grads_dtype")
    has_fp32_grads = main_grads is None or str(main_grads.value) in ("fp32", "None")
    return mode == "bf16" and has_fp32_grads


def _state_default(
    run: WrittenArguments, mode: str, builder: ImportBuilder, *, is_automatic: bool
) -> None:
    """State the parser's default, and report a switch that is written as off."""
    builder.fields["grad_reduce_in_fp32"] = is_automatic
    written = run.settings.get(FP32_ARGUMENT)
    if written is not None and written.value is False and written.refused is None:
        if is_automatic:
            builder.record("megatron_lm.reduced-in-fp32-whatever-is-written", written.name, False)
        else:
            builder.map(written.name, grad_reduce_in_fp32=False)
        return
    row = "megatron_lm.not-reduced-in-fp32"
    if is_automatic:
        row = "megatron_lm.reduced-in-fp32-by-itself"
    builder.record(row, FP32_OPTION, is_automatic, mode=mode.upper())


def _state_fsdp_reduction(
    run: WrittenArguments, mode: str, builder: ImportBuilder, *, stays_in_bf16: bool
) -> None:
    """State in which dtype Megatron-FSDP reduces gradients.

    Args:
        run: The arguments.
        mode: bf16 or fp16.
        builder: The report.
        stays_in_bf16: The arguments ask for the dtype of the weights.
    """
    kept_in = _get_fsdp_dtype(run, "main_grads") or mode
    sent_in = _get_fsdp_dtype(run, "grad_comm") or kept_in
    builder.fields["grad_reduce_in_fp32"] = kept_in == sent_in == "fp32"
    if kept_in == mode and not stays_in_bf16:
        option = "--megatron-fsdp-main-grads-dtype"
        builder.record("megatron_lm.fsdp-keeps-gradients", option, "auto", mode=mode)
    if FP32_ARGUMENT in run:
        builder.record("megatron_lm.fsdp-ignores-it", FP32_OPTION, True)


def _get_fsdp_dtype(run: WrittenArguments, name: str) -> str | None:
    """Return the dtype that an argument of Megatron-FSDP states; None where Megatron-FSDP chooses."""
    written = run.settings.get(f"megatron_fsdp_{name}_dtype")
    if written is None or written.value in (None, "auto"):
        return None
    return str(written.value)
