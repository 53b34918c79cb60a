"""`describe_open_points`: everything about a run that a file of Megatron-LM leaves open, as sentences."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.read.megatron_lm.flags import find_misspelt, format_option, get_argument_fields
from bridge.read.megatron_lm.model_kind import find_other_model_kind
from bridge.read.megatron_lm.parsed_run import EVALUATION_PROGRAMS, ParsedRun

FIELDS_WITHOUT_DEFAULT = (
    "model.num_layers",
    "model.hidden_size",
    "model.num_attention_heads",
    "model.seq_length",
    "model.vocab_size",
    "model.max_position_embeddings",
    "train.micro_batch_size",
)
"""Fields of arguments that Megatron-LM's parser asks for, or that the tokenizer decides."""
TRAINS_NOTHING = (
    "The run trains nothing: it has no optimizer and no gradients, which a plan and memory count."
)


def describe_open_points(run: ParsedRun) -> list[str]:
    """Return what a run leaves open, as sentences."""
    return [
        *_describe_late_values(run),
        *_describe_misspelt_options(run),
        *_describe_open_sources(run),
        *_describe_ineffective_arguments(run),
        *_describe_program(run),
    ]


def _describe_late_values(run: ParsedRun) -> Iterator[str]:
    """Yield the settings whose value only the run decides."""
    for name, text in run.values.late.items():
        paths = get_argument_fields(name)
        if paths:
            yield _describe_late_value(paths[0], text)


def _describe_late_value(path: str, text: str) -> str:
    late = f"{path}: the value {text} is decided when the run starts"
    if path in FIELDS_WITHOUT_DEFAULT:
        return f"{late}, and there is no default. Add {path}=VALUE."
    return f"{late}; the default counts here."


def _describe_misspelt_options(run: ParsedRun) -> Iterator[str]:
    """Yield the options that are an argument's name but for a letter or two; a run prints none."""
    if run.written.has_every_default:
        return
    for name, meant in find_misspelt(run.values.all).items():
        rule = "no argument of Megatron-LM that is known, and it is not read"
        yield f"{format_option(name)}: {rule}. Did you mean {format_option(meant)}?"


def _describe_open_sources(run: ParsedRun) -> Iterator[str]:
    """Yield the sources of arguments, variables and defaults that are not read."""
    launch = run.written.launch
    for source in run.open_sources:
        yield f"{source}: may hold further arguments, which are not read."
    if launch.unread_environment:
        rule = "it may set variables of the run, and could not be read"
        yield f"{launch.unread_environment}: {rule}."
    if run.is_started and not run.written.is_known:
        rule = "a program whose own defaults are not known"
        yield f"{launch.name}: {rule}; those of Megatron-LM are assumed here."


def _describe_ineffective_arguments(run: ParsedRun) -> Iterator[str]:
    """Yield the arguments that have no effect in the run."""
    program = run.written.launch.name
    known = run.values.known
    pattern = known.get("hybrid_layer_pattern")
    experts = known.get("num_experts")
    if experts and pattern and "E" not in str(pattern):
        rule = f"has no effect: the pattern {pattern} of the layers has no experts (E)"
        yield f"--num-experts {experts}: {rule}."
    if run.replaced:
        loaded = run.values.all.get("load")
        sizes = " ".join(f"{format_option(name)} {value}" for name, value in run.replaced.items())
        rule = f"{program} evaluates the checkpoint --load {loaded}, whose sizes replace these"
        yield f"{sizes}: {rule}."
    if known.get("eval_fp32") and EVALUATION_PROGRAMS.search(run.written.launch.program):
        yield f"--eval_fp32: {program} computes in FP32, whatever the mode is."


def _describe_program(run: ParsedRun) -> Iterator[str]:
    """Yield that the program trains nothing, or that the file does not name it."""
    if run.is_inference:
        yield TRAINS_NOTHING
    is_unnamed = not run.is_started and not run.written.has_every_default
    if is_unnamed and find_other_model_kind(run.written, run.values) is None:
        program = "pretrain_gpt.py"
        if "hybrid_layer_pattern" in run.values.known:
            program = "pretrain_hybrid.py"
        yield f"The program: the file does not name it; {program} is assumed."
