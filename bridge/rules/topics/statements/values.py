"""Rules about values and keys as they are written: types, spelling, minima, refused arguments."""

from collections.abc import Iterator

from bridge.errors import close_matches, did_you_mean
from bridge.model.shape_reader import PARALLEL_SIZES
from bridge.precision.precision_config import FIELD_DEFAULTS
from bridge.precision.stated_field import COMMAND_LINE, LAYER_COUNTS
from bridge.rules.context import FAMILIES, RuleContext
from bridge.rules.facts.near_names import find_near_fields
from bridge.rules.rule import contradiction, error, info, warning
from bridge.rules.run_context import RunContext
from bridge.rules.violation import Violation
from bridge.target.fields import OWNER_FIELD_NAMES

MINIMUM_COUNTS = {
    "fp8_margin": 0,
    "fp8_amax_history_len": 1,
    **dict.fromkeys(LAYER_COUNTS, 0),
    "hysteresis": 1,
}
"""Count -> its minimum value."""


def find_wrong_types(context: RunContext) -> Iterator[Violation]:
    """Yield the values that are not of their field's type."""
    for fault in context.malformed:
        yield Violation(fault.path, value=fault.value, why=fault.rule, rests_on=[fault.path])


def find_misspelt_fields(context: RunContext) -> Iterator[Violation]:
    """Yield the misspelt keys.

    In the precision, every unknown key counts as misspelt. A config may have fields of a model
    provider. So an unknown key of a config counts only if it is similar to a field of Megatron. If
    this field is stated too, the key counts only if it is an override, since a user has just typed
    it.
    """
    for name, value in context.unknown.items():
        hint = did_you_mean(close_matches(name, FIELD_DEFAULTS)) or "drop it"
        yield Violation(f"mixed_precision.{name}", value=value, hint=hint)
    for owner_name in OWNER_FIELD_NAMES:
        section = context.sections[owner_name]
        for name, value in section.unknown.items():
            nearest = find_near_fields(owner_name, name)
            if not nearest:
                continue
            path = f"{owner_name}.{name}"
            is_override = context.get_source(path) == COMMAND_LINE
            if is_override or nearest[0] not in section.stated:
                yield Violation(path, value=value, hint=did_you_mean(nearest), rests_on=[path])


def find_families_off_without_none(context: RuleContext) -> Iterator[Violation]:
    """Yield the families that another value than None switches off."""
    for name in FAMILIES:
        if getattr(context.model, name) in ("", False):
            yield Violation(f"model.{name}")


def find_sizes_below_one(context: RuleContext) -> Iterator[Violation]:
    """Yield the parallel sizes below one."""
    for name in PARALLEL_SIZES:
        if (getattr(context.model, name) or 0) < 1:
            yield Violation(f"model.{name}")


def find_counts_below_minimum(context: RuleContext) -> Iterator[Violation]:
    """Yield the counts of a precision that are below their minimum value."""
    for name, least in MINIMUM_COUNTS.items():
        if context.get_setting_value(name) < least:
            yield Violation(name, least=least)


def find_default_dropouts(context: RunContext) -> Iterator[Violation]:
    """Yield the dropouts that are not stated, in a model with layers."""
    if not context.has_model or context.model.num_layers <= 0:
        return
    for name in ("hidden_dropout", "attention_dropout"):
        if name not in context.sections["model"].stated:
            yield Violation(f"model.{name}", rests_on=(f"model.{name}",))


def find_refused_arguments(context: RunContext) -> Iterator[Violation]:
    """Yield the arguments of the command line that the program's parser refuses."""
    for fault in context.program.refused_arguments:
        yield Violation(
            fault.path,
            value=fault.value,
            why=fault.rule,
            remedy=fault.remedy,
            severity=fault.severity,
            rests_on=(),
        )


RULES = (
    error(
        id="PB121",
        title="value of a wrong type",
        setting="model",
        when=find_wrong_types,
        message="{why}",
        remedies=(
            "write a value of that type; YAML reads no, off and 1e-5 otherwise than they look",
        ),
        source="huggingface/accelerate issue 1386, 2023-05-04; "
        "AMD-AGI/Primus issue 886, 2026-07-20",
        evidence="reported",
        explanation="A YAML 1.1 parser reads an unquoted `no` or `off` as False and `1e-5` as a "
        "string; a quoted "
        '"false" is a non-empty, hence true, string. A value that can only mean one thing is '
        "taken; the rest is named.",
    ),
    error(
        id="PB122",
        title="misspelt field",
        setting="model",
        when=find_misspelt_fields,
        message="there is no such field: an unknown key is dropped, or "
        "lands where nothing reads it",
        remedies=("{hint}",),
        source="pytorch/torchtitan issues 1059 (2025-04-05) and 1644 (2025-08-27); "
        "NVIDIA-NeMo/Megatron-Bridge issue 2957, 2026-03-23",
        evidence="reported",
    ),
    warning(
        id="PB126",
        title="off written as something else than None",
        setting="model.fp8",
        when=find_families_off_without_none,
        message="must be None where it is off: CUDA graphs and inference ask whether it is None",
        remedies=("use None",),
        source="megatron-core 0.19.2 transformer/cuda_graphs.py, transformer/module.py: "
        "`config.fp8 is not None`",
    ),
    error(
        id="PB127",
        title="size below one",
        setting="model.tensor_model_parallel_size",
        when=find_sizes_below_one,
        message="must be at least 1",
        remedies=("use 1 for no parallelism of that kind",),
        source="megatron-core 0.16.1 parallel_state.py",
    ),
    contradiction(
        id="PB128",
        title="count below its least value",
        setting="fp8_margin",
        when=find_counts_below_minimum,
        message="must be at least {least}",
        remedies=("use {least} or more",),
        source="megatron-core 0.16.1 optimizer/grad_scaler.py, fp8_utils.py",
    ),
    info(
        id="PB132",
        title="dropout that only a default decides",
        setting="model.hidden_dropout",
        when=find_default_dropouts,
        message="nothing states it, so that Megatron's default drops a tenth of the values; large "
        "models are trained without dropout",
        remedies=("state 0, or the value that is meant",),
        source="megatron-core 0.16.1 and 0.19.2 transformer_config.py",
    ),
    error(
        id="PB134",
        title="word that the parser refuses",
        setting="arguments",
        when=find_refused_arguments,
        message="{why}",
        remedies=("{remedy}",),
        source="Megatron-LM 0.16 to 2026-08-22 training/arguments.py parse_args, "
        "training/argument_utils.py",
    ),
)
