"""`open_points`: everything about a run that a file of Megatron-LM leaves open, as sentences."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.read.megatron_lm.file_run import EVALUATION, FileRun
from bridge.read.megatron_lm.flags import fields_of, misspelt, option_of
from bridge.read.megatron_lm.model_kind import other_kind

WITHOUT_DEFAULT = (
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


def open_points(run: FileRun) -> list[str]:
    """Return what a run leaves open, as sentences."""
    return [
        *_late_values(run),
        *_misspelt_options(run),
        *_sources_of_arguments(run),
        *_without_effect(run),
        *_about_the_program(run),
    ]


def _late_values(run: FileRun) -> Iterator[str]:
    """Yield the settings whose value only the run decides."""
    for name, text in run.values.late.items():
        paths = fields_of(name)
        if paths:
            yield _decided_late(paths[0], text)


def _decided_late(path: str, text: str) -> str:
    late = f"{path}: the value {text} is decided when the run starts"
    if path in WITHOUT_DEFAULT:
        return f"{late}, and there is no default. Add {path}=VALUE."
    return f"{late}; the default counts here."


def _misspelt_options(run: FileRun) -> Iterator[str]:
    """Yield the options that are an argument's name but for a letter or two; a run prints none."""
    if run.written.has_every_default:
        return
    for name, meant in misspelt(run.values.all).items():
        rule = "no argument of Megatron-LM that is known, and it is not read"
        yield f"{option_of(name)}: {rule}. Did you mean {option_of(meant)}?"


def _sources_of_arguments(run: FileRun) -> Iterator[str]:
    """Yield the sources of arguments, variables and defaults that are not read."""
    launch = run.written.launch
    for source in run.open_ends:
        yield f"{source}: may hold further arguments, which are not read."
    if launch.unread_environment:
        rule = "it may set variables of the run, and could not be read"
        yield f"{launch.unread_environment}: {rule}."
    if run.is_started and not run.written.is_known:
        rule = "a program whose own defaults are not known"
        yield f"{launch.name}: {rule}; those of Megatron-LM are assumed here."


def _without_effect(run: FileRun) -> Iterator[str]:
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
        sizes = " ".join(f"{option_of(name)} {value}" for name, value in run.replaced.items())
        rule = f"{program} evaluates the checkpoint --load {loaded}, whose sizes replace these"
        yield f"{sizes}: {rule}."
    if known.get("eval_fp32") and EVALUATION.search(run.written.launch.program):
        yield f"--eval_fp32: {program} computes in FP32, whatever the mode is."


def _about_the_program(run: FileRun) -> Iterator[str]:
    """Yield that the program trains nothing, or that the file does not name it."""
    if run.is_inference:
        yield TRAINS_NOTHING
    is_unnamed = not run.is_started and not run.written.has_every_default
    if is_unnamed and other_kind(run.written, run.values) is None:
        program = "pretrain_gpt.py"
        if "hybrid_layer_pattern" in run.values.known:
            program = "pretrain_hybrid.py"
        yield f"The program: the file does not name it; {program} is assumed."
