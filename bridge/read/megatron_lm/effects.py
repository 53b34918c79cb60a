"""Effects of Megatron-LM's arguments beyond their values: defaults that decide, and settings without effect.

Each function is a step of the import. It states fields in the report, and maps or reports settings.
"""

from collections.abc import Mapping

from bridge.precision.precision_config import FIELD_DEFAULTS
from bridge.precision.stated_field import LAYER_COUNTS
from bridge.read.foreign.effective_fields import collect_inert_everywhere
from bridge.read.foreign.import_builder import ImportBuilder
from bridge.read.launch.notes import NoteKind
from bridge.read.megatron_lm.flags import FLAG_OF_NAME, format_option, may_affect_precision
from bridge.read.megatron_lm.gradient_reduction import FSDP_SWITCHES, uses_megatron_fsdp
from bridge.read.megatron_lm.written_arguments import WrittenArguments
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.rules.inert_fields import LOSS_SCALER_FIELDS

SHARDING_SWITCHES = ("use_distributed_optimizer", "use_torch_fsdp2", *FSDP_SWITCHES)
"""Switches that shard the optimizer. Weights that are stored in FP8 are gathered only under one of them."""
PARSER_DEFAULTS = {**FIELD_DEFAULTS, "fp8_recipe": "delayed", **dict.fromkeys(LAYER_COUNTS, 1)}
"""Field -> the default of its argument in Megatron-LM's parser."""
TF32_OVERRIDE = "NVIDIA_TF32_OVERRIDE"
"""Variable that forbids TF32 where it is 0."""
CUBLAS_OVERRIDE = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
"""Variable that sets TF32 of PyTorch's GEMMs: 1 allows it, 0 forbids it."""
VARIABLE_PREFIXES = ("NVTE_", "NVIDIA_", "TORCH_", "ACCELERATE_")
"""Prefixes of environment variables that may affect the precision."""


def state_scheme(mode: str, builder: ImportBuilder, *, is_scaled: bool) -> None:
    """State the defaults of the scaling scheme, and those of a dynamic loss scale.

    Args:
        mode: bf16, fp16 or fp32.
        builder: The report.
        is_scaled: Whether Megatron-LM scales the loss itself. DeepSpeed's engine scales it otherwise.
    """
    fields = builder.fields
    layers = None
    if fields.get("fp8") or fields.get("fp4"):
        layers = 1
    builder.imply_scheme(format_option, layers=layers)
    if "loss_scale" in fields and float(fields["loss_scale"] or 0) == 0:
        fields["loss_scale"] = None  # Megatron-LM takes 0 for unset
    if mode != "fp16" or not is_scaled or fields.get("loss_scale") is not None:
        return
    for name in LOSS_SCALER_FIELDS:
        if fields.get(name) is None:
            default = FIELD_DEFAULTS[name]
            builder.imply(format_option(name), default, **{name: default})


def report_unread_settings(written: WrittenArguments, builder: ImportBuilder) -> None:
    """Report the settings that a run of this precision does not read, unless they are at their defaults.

    A log prints every argument. A setting of a log without effect is no fault of the user, so that
    it is mapped to no field and is not reported.
    """
    config = MixedPrecisionConfig.from_dict(builder.fields)
    reasons = collect_inert_everywhere(config)
    values = config.to_dict()
    for key, setting in written.settings.items():
        if key not in FLAG_OF_NAME or not builder.mapped.get(setting.name):
            continue
        name = FLAG_OF_NAME[key].field
        value = values.get(name)
        if name in reasons and written.printed is not None:
            builder.fields.pop(name, None)
            builder.mapped[setting.name] = ()
        elif name in reasons and value not in (None, PARSER_DEFAULTS[name]):
            builder.record(
                "megatron_lm.has-no-effect", setting.name, setting.shown, why=reasons[name]
            )
        elif name == "fp8_wgrad" and value is False:
            builder.record("megatron_lm.te2-ignores-fp8-wgrad", setting.name, setting.shown)


def report_sharding(written: WrittenArguments, builder: ImportBuilder) -> None:
    """Report settings that a sharding switch turns off, and weights in FP8 that no switch gathers."""
    fields = builder.fields
    is_sharded = any(key in written for key in SHARDING_SWITCHES)
    is_complete_command = bool(written.label) and not written.open_words
    if fields.get("fp8_param_gather"):
        option = "--fp8-param-gather"
        if "use_torch_fsdp2" in written:
            builder.record("megatron_lm.cleared-by-torch-fsdp2", option, True)
            fields["fp8_param_gather"] = False
        elif is_complete_command and not is_sharded:
            builder.record("megatron_lm.gathering-needs-sharding", option, True)
    if uses_megatron_fsdp(written) and fields.get("reuse_grad_buf_for_mxfp8_param_ag"):
        builder.record(
            "megatron_lm.switched-off-by-megatron-fsdp", "--reuse-grad-buf-for-mxfp8-param-ag", True
        )
        fields["reuse_grad_buf_for_mxfp8_param_ag"] = False


def map_environment(variables: Mapping[str, str], builder: ImportBuilder) -> None:
    """Map the variables that decide TF32, and report others that may affect the precision.

    `NVIDIA_TF32_OVERRIDE=0` wins over PyTorch's variable.
    """
    is_forbidden = variables.get(TF32_OVERRIDE) == "0"
    for name, value in variables.items():
        if name == TF32_OVERRIDE and is_forbidden:
            builder.map(name, tf32=False)
        elif name == CUBLAS_OVERRIDE and value in ("0", "1") and not is_forbidden:
            builder.map(name, tf32=value == "1")
        elif name.startswith(VARIABLE_PREFIXES) and may_affect_precision(name.lower()):
            builder.record("megatron_lm.environment-variable-is-in-no-recipe", name, value)


def report_open_parts(
    written: WrittenArguments, builder: ImportBuilder, *, reads_engine_file: bool = False
) -> None:
    """Report everything that the file does not decide.

    Args:
        written: The arguments, with their launch.
        builder: The report.
        reads_engine_file: Whether the JSON of DeepSpeed's engine was read from the script that
            writes it.
    """
    notes = list(written.launch.notes)
    here_documents = [note for note in notes if note.kind is NoteKind.HERE_DOCUMENT]
    if reads_engine_file and len(here_documents) == 1:  # the only one is the engine's JSON
        notes.remove(here_documents[0])
    for word in dict.fromkeys(written.open_words):
        builder.record("megatron_lm.word-may-hold-flags", word, None)
    for decision in written.launch.decisions:
        builder.record("megatron_lm.branch-is-not-decided", decision, "taken")
    if written.is_truncated and not written.mode_decider:
        builder.record("megatron_lm.block-is-incomplete", "arguments", None)
    for note in notes:
        builder.record("megatron_lm.part-is-not-read", str(note), None)
    for name, value in written.launch.variable_defaults.items():
        builder.record("megatron_lm.default-of-a-variable-was-taken", f"${name}", value)
