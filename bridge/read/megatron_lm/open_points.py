"""`describe_open_points`: sentences about everything that a file of Megatron-LM does not decide about its run."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.read.megatron_lm.flags import format_option, get_argument_fields
from bridge.read.megatron_lm.model_kind import find_other_model_kind
from bridge.read.megatron_lm.parsed_run import EVALUATION_PROGRAMS, ParsedRun
from bridge.read.megatron_lm.unread_options import find_misspelt_options

FIELDS_WITHOUT_DEFAULT = (
    "model.num_layers",
    "model.hidden_size",
    "model.num_attention_heads",
    "model.seq_length",
    "model.vocab_size",
    "model.max_position_embeddings",
    "train.micro_batch_size",
)
"""Fields of arguments that Megatron-LM's parser requires, or that the tokenizer decides."""
OPEN_VALUE_WITHOUT_DEFAULT = (
    "{path}: the value {text} is decided when the run starts, and there is no default. "
    "Add {path}=VALUE."
)
OPEN_VALUE_WITH_DEFAULT = (
    "{path}: the value {text} is decided when the run starts; the default counts here."
)
MISSPELT_OPTION = (
    "{option}: no argument of Megatron-LM that is known, and it is not read. "
    "Did you mean {argument}?"
)
OPEN_SOURCE = "{source}: may hold further arguments, which are not read."
UNREAD_ENVIRONMENT = "{option}: it may set variables of the run, and could not be read."
UNKNOWN_PROGRAM = (
    "{program}: a program whose own defaults are not known; those of Megatron-LM are assumed here."
)
EXPERTS_WITHOUT_LAYERS = (
    "--num-experts {experts}: has no effect: "
    "the pattern {pattern} of the layers has no experts (E)."
)
SIZES_OF_CHECKPOINT = (
    "{sizes}: {program} evaluates the checkpoint --load {load}, whose sizes replace these."
)
EVALUATION_IN_FP32 = "--eval_fp32: {program} computes in FP32, whatever the mode is."
UNNAMED_PROGRAM = "The program: the file does not name it; {program} is assumed."
TRAINS_NOTHING = (
    "The run trains nothing: it has no optimizer and no gradients. "
    "A plan shows the GEMMs of a backward pass too, which it does not run."
)


def describe_open_points(parsed: ParsedRun) -> list[str]:
    """Return sentences about everything that the file does not decide about a run."""
    return [
        *_describe_open_values(parsed),
        *_describe_misspelt_options(parsed),
        *_describe_open_sources(parsed),
        *_describe_ineffective_arguments(parsed),
        *_describe_program(parsed),
    ]


def _describe_open_values(parsed: ParsedRun) -> Iterator[str]:
    """Yield the settings whose value is decided when the run starts."""
    for name, text in parsed.values.open_values.items():
        paths = get_argument_fields(name)
        if not paths:
            continue
        if paths[0] in FIELDS_WITHOUT_DEFAULT:
            yield OPEN_VALUE_WITHOUT_DEFAULT.format(path=paths[0], text=text)
        else:
            yield OPEN_VALUE_WITH_DEFAULT.format(path=paths[0], text=text)


def _describe_misspelt_options(parsed: ParsedRun) -> Iterator[str]:
    """Yield the options whose name differs from an argument's name by a letter or two."""
    for name, argument in find_misspelt_options(parsed.written, parsed.values.all).items():
        option = format_option(name)
        yield MISSPELT_OPTION.format(option=option, argument=format_option(argument))


def _describe_open_sources(parsed: ParsedRun) -> Iterator[str]:
    """Yield the sources of arguments, variables and defaults that are not read."""
    launch = parsed.written.launch
    for source in parsed.open_sources:
        yield OPEN_SOURCE.format(source=source)
    if launch.unread_environment:
        yield UNREAD_ENVIRONMENT.format(option=launch.unread_environment)
    if parsed.is_started and not parsed.written.is_known:
        yield UNKNOWN_PROGRAM.format(program=launch.name)


def _describe_ineffective_arguments(parsed: ParsedRun) -> Iterator[str]:
    """Yield the arguments that have no effect in the run."""
    program = parsed.written.launch.name
    known = parsed.values.known
    pattern = known.get("hybrid_layer_pattern")
    experts = known.get("num_experts")
    if experts and pattern and "E" not in str(pattern):
        yield EXPERTS_WITHOUT_LAYERS.format(experts=experts, pattern=pattern)
    if parsed.replaced_sizes:
        options: list[str] = []
        for name, value in parsed.replaced_sizes.items():
            options.append(f"{format_option(name)} {value}")
        checkpoint = parsed.values.all.get("load")
        sizes = " ".join(options)
        yield SIZES_OF_CHECKPOINT.format(sizes=sizes, program=program, load=checkpoint)
    if known.get("eval_fp32") and EVALUATION_PROGRAMS.search(parsed.written.launch.program):
        yield EVALUATION_IN_FP32.format(program=program)


def _describe_program(parsed: ParsedRun) -> Iterator[str]:
    """Yield that the program trains nothing, or that the file does not name it."""
    if parsed.is_inference:
        yield TRAINS_NOTHING
    is_unnamed = not parsed.is_started and not parsed.written.has_every_default
    if is_unnamed and find_other_model_kind(parsed.written, parsed.values) is None:
        program = "pretrain_gpt.py"
        if "hybrid_layer_pattern" in parsed.values.known:
            program = "pretrain_hybrid.py"
        yield UNNAMED_PROGRAM.format(program=program)
