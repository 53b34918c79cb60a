"""Megatron-LM's files of a run: argument files, launch scripts, and the arguments that a run printed or saved.

A run of Megatron-LM has no recipe: its flags of a precision are read as the values of the configs that hold them, as
its own code does. So there is no precision to write, and no sync to foresee. Under DeepSpeed its engine decides, and
what `convert` reads of it is the precision.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from bridge.errors import Finding, PayloadError, RunConfigError, UnreadFileError
from bridge.precision.values import number_of_text
from bridge.preflight.file_reading import MEGATRON_LM, NEWEST, FileReading, RunChoice
from bridge.read.contract import ImportReport
from bridge.read.field_names import release_of
from bridge.read.foreign import no_run_of_megatron
from bridge.read.framework.miles import model_arguments
from bridge.read.framework.names import OwnReading, own_names, ranks_of, variables_of, write_own
from bridge.read.framework.table import table_of_clone
from bridge.read.launch.alternatives import launches
from bridge.read.launch.word import Word, variable_of
from bridge.read.megatron_lm.arguments import Arguments, argument_groups, runs_of, runs_printed
from bridge.read.megatron_lm.effects import INFERENCE, is_engine
from bridge.read.megatron_lm.elsewhere import elsewhere, is_named
from bridge.read.megatron_lm.engine import without_those_of_the_engine
from bridge.read.megatron_lm.flags import TABLE, fields_of, misspelt
from bridge.read.megatron_lm.importer import imported
from bridge.read.megatron_lm.printed import START, printed_arguments
from bridge.read.megatron_lm.recognition import is_megatron
from bridge.read.megatron_lm.refused import refused_words
from bridge.read.megatron_lm.sections import Values, sections_of, values_of
from bridge.read.megatron_lm.start import ARGUMENT
from bridge.read.text.document import Document
from bridge.target.fields import known_releases
from bridge.target.versions import Version, parse_version

KINDS = {
    "a vision model": (
        "img_h",
        "img_w",
        "patch_dim",
        "vision_pretraining",
        "freeze_ViT",
        "language_model_type",
    ),
    "BERT": ("bert_no_binary_head",),
    "an encoder and a decoder": ("encoder_num_layers", "decoder_num_layers", "decoder_seq_length"),
    "RETRO": ("retro_add_retriever", "retro_project_dir"),
    "a heterogeneous model": (
        "heterogeneous_layers_config_path",
        "heterogeneous_layers_config_encoded_json",
    ),
}
"""Model that has no plan here -> options that only it has."""
NULL_OTHERWISE = ("decoder_num_layers", "retro_project_dir", "heterogeneous_layers_config_path")
"""Those of them that a run without such a model prints as nothing."""
PROGRAMS = {
    "BERT": r"bert",
    "an encoder and a decoder": r"t5",
    "a vision model": r"vlm|vision|multimodal|mimo|llava|clip",
    "RETRO": r"retro",
    "a retriever": r"ict|biencoder|realm",
}
"""The same -> the names of the programs that train it."""
ARRAY = re.compile(r"\$\{(\w+)\[[@*]\]\}")
VARIABLE = re.compile(r"\$\{?(\w+)")
"""In the condition of a branch."""
EITHER = "slime_or_miles"
"""Table of a launch that is of one of two frameworks; the clone that the script lies in may say of which."""
FORK = "the parser of Megatron-DeepSpeed"
"""What a program under DeepSpeed has in the place of Megatron-LM's parser."""
GROUP = "MODEL_ARGS"
"""Key of the arguments in the files of Megatron-LM's own tests."""


WITHOUT_DEFAULT = (
    *(
        "model.num_layers",
        "model.hidden_size",
        "model.num_attention_heads",
        "model.seq_length",
        "model.vocab_size",
    ),
    *("model.max_position_embeddings", "train.micro_batch_size"),
)
"""Fields of arguments that Megatron-LM's parser asks for, or that the tokenizer decides."""
REPLACED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "max_position_embeddings",
)
"""Sizes that an evaluation reads from the checkpoint.

Source: Megatron-DeepSpeed of bigscience and Microsoft, examples of tasks/eval_harness/evaluate.py, whose
load_ds_checkpoint_and_setup_megatron takes the arguments of the checkpoint.
"""
EVALUATION = re.compile(r"(?:^|/)eval_harness/|(?:^|/)eval(?:uate|uation)?\.py\Z")
"""Programs that evaluate a checkpoint."""
UNPLANNED = "{path}: describes {kind}, whose layers cannot be planned, got {given!r}. Give a run of a language model."


class _Kind(NamedTuple):
    """The kind of a model that is no language model."""

    kind: str
    given: str
    """What says so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """The first run of a file."""

    given: Values
    replaced: Mapping[str, Any]
    """Sizes below 1 that stand for those of a checkpoint."""
    written: Arguments
    is_started: bool
    """The file starts a program with them."""
    is_inference: bool
    open_ends: tuple[str, ...]
    """Words and files that may hold further arguments."""


def document_of(data: bytes, path: Path) -> Document:
    """Return a file's contents as a document; UnreadFileError for what cannot be read."""
    try:
        return Document.of_bytes(data, str(path))
    except PayloadError as error:
        raise UnreadFileError(str(error)) from None


def is_of(document: Document) -> bool:
    """Return whether a document is one of Megatron-LM's files, or a launch script of any program."""
    if document.kind == "shell" or START.search(document.text):
        return True
    return bool(argument_groups(document.mapping)) or GROUP in document.mapping


def read(document: Document, choice: RunChoice) -> FileReading:
    """Return what one run of a file says.

    Raises:
        RunConfigError: It starts no run of Megatron-LM.
    """
    number = choice.number or 1
    runs, report = _chosen(document, choice.variables, number)
    written = runs[number - 1]
    precision = None
    if document.kind == "shell" and is_engine(written) and report.decided_by is None:
        precision = report.config.to_dict()
    run = _run_of(written, document)
    arguments = run.given.values | run.given.unread
    own_fields = {
        f"{ARGUMENT}.{name}": value
        for name, value in run.given.values.items()
        if not fields_of(name)
    }
    environment = {
        name: str(value)
        for name, value in written.launch.environment.items()
        if not value.is_unknown
    }
    framework, own = written.framework, OwnReading()
    if framework is not None:
        environment |= variables_of(framework, arguments)
        own = own_names(framework, arguments, environment, document.path)
        ranks = ranks_of(framework, arguments)
        if ranks is not None:
            own_fields[f"{ARGUMENT}.world_size"] = ranks
    _refuse_no_arguments(run, document.path)
    kind = _kind_of(run)
    sections = sections_of(run.given)
    if written.has_end is None:
        put_malformed(sections, run.given)
    if precision is not None:
        sections["mixed_precision"] = precision
    other = elsewhere(written, run.given, document.path, mode=mode_of_arguments(run.given))
    if "mixed_precision" in other.sections:  # of an engine, whatever the arguments say
        sections = {role: without_those_of_the_engine(fields) for role, fields in sections.items()}
    for role, fields in other.sections.items():
        sections[role] = {**sections.get(role, {}), **fields}
    write_own(sections, own)
    if run.is_inference:
        sections = {"model": sections["model"]}
    release: Version | None = known_releases()[-1]
    reason = NEWEST
    if framework is not None and framework.release:
        release, reason = (
            parse_version(framework.release["megatron_core"]),
            framework.release["because"],
        )
    if written.has_end:  # the release that wrote all arguments
        release, reason = release_of(sections, is_whole=True)
    unplanned = own.unplanned or other.unplanned
    if kind is not None:
        unplanned = UNPLANNED.format(path=document.path, **kind._asdict())
    return FileReading(
        framework=MEGATRON_LM if framework is None else framework.title,
        base="" if framework is None else MEGATRON_LM,
        sections=sections,
        environment=environment,
        own_fields=own_fields,
        unknown=(*_unknown(run), *other.unknown, *own.unknown),
        unplanned=unplanned,
        other_layers=kind.kind if kind is not None else None,
        uncounted=(*other.uncounted, *own.uncounted),
        opened={**other.opened, **own.opened},
        generation=own.generation,
        read_too=(*_read_as(run), *other.read_too),
        release=release,
        release_reason=reason,
        mode_decided_by=report.decided_by,
        unstated_by=_decider(run, document),
        open_values=_open_values(run),
        variables=_variables(runs, written),
        refused=_refused(run),
        not_forwarded=own.not_forwarded,
        runs=tuple(one.label for one in runs) if len(runs) > 1 else (),
        number=number,
        branches=_branches(runs, number),
    )


def _chosen(
    document: Document, variables: Mapping[str, str], number: int
) -> tuple[list[Arguments], ImportReport]:
    """Return the runs of a file, and what the one of a number asks for; RunConfigError where there is no such run."""
    try:
        runs = _runs(document, variables)
        if not 1 <= number <= len(runs):
            rule = f"must be from 1 to {len(runs)}, the runs of {document.path}"
            raise RunConfigError.of("--launch", rule, number, "Give the number of one of them.")
        return runs, imported(runs[number - 1])
    except PayloadError as error:
        raise UnreadFileError(str(error)) from None


def put_malformed(sections: dict[str, dict[str, Any]], given: Values) -> None:
    """Put values that are stated and of a wrong type into the sections, where a rule names them."""
    for name, text in list(given.unread.items()):
        paths = fields_of(name)
        if paths and not Word(text).is_unknown:
            del given.unread[name]
            for path in paths:
                role, _, attribute = path.partition(".")
                sections[role][attribute] = text


def _decider(run: _Run, document: Document) -> str | None:
    """Return what decides the settings that a run does not state, as a noun; None where known defaults do."""
    written = run.written
    if written.has_end is not None:
        return None if written.has_end else "the rest of the log"
    if document.kind != "shell":
        is_of_their_tests = GROUP in document.mapping or bool(argument_groups(document.mapping))
        return None if is_of_their_tests else "the command line that names this file"
    if not run.is_started:
        return "the script that uses these arguments"
    program = written.launch.name
    if not written.is_known:
        return program
    if is_engine(written):
        return FORK
    return run.open_ends[0] if run.open_ends else None


def _refused(run: _Run) -> tuple[Finding, ...]:
    """Return the words that the parser refuses; a warning where the program may have a parser of its own."""
    severity = "error" if run.written.is_known else "warning"
    found = []
    if run.written.framework is not None and run.written.framework.ignores:
        return ()  # its parser drops what it does not know
    for one in refused_words(run.written):
        words = TABLE.sentences[one.row].about({"system": MEGATRON_LM, **one.facts})
        remedy = words.remedy.rstrip(".")
        found.append(
            Finding(
                path=one.setting,
                rule=words.detail,
                remedy=remedy,
                value=one.value,
                severity=severity,
            )
        )
    return tuple(found)


def _open_values(run: _Run) -> dict[str, str]:
    """Return each field whose argument has a value that only the run decides -> the text of the value."""
    return {path: text for name, text in run.given.unread.items() for path in fields_of(name)}


def _variables(runs: Sequence[Arguments], written: Arguments) -> tuple[str, ...]:
    """Return the variables that may state the mode: those that choose a branch, then those that hold arguments."""
    names = []
    for run in runs:
        if run.launch.line == written.launch.line:
            names += [name for label in run.launch.decisions for name in VARIABLE.findall(label)]
    for word in written.undecided:
        array = ARRAY.fullmatch(word)
        names.append(variable_of(word) if array is None else array[1])
    return tuple(dict.fromkeys(filter(None, names)))


def _branches(runs: Sequence[Arguments], number: int) -> tuple[int, ...]:
    """Return the numbers of the runs that are the same launch on other branches of the script."""
    launch = runs[number - 1].launch
    return tuple(
        place
        for place, other in enumerate(runs, 1)
        if place != number
        and launch.line
        and (other.launch.line, other.launch.name) == (launch.line, launch.name)
    )


def mode_of_arguments(given: Values) -> str:
    """Return the mode that the arguments of a run state."""
    for name in ("fp16", "bf16"):
        if given.values.get(name):
            return name
    return "fp32"


def _run_of(written: Arguments, document: Document) -> _Run:
    launch, is_shell = written.launch, document.kind == "shell"
    files = [note for note in launch.notes if note.startswith("source ")]
    others = [one for one in written.elsewhere if not is_named(one)]
    given = values_of(written.options)
    replaced = _sizes_of_a_checkpoint(given, launch.program)
    for name in replaced:
        del given.values[name]
    return _Run(
        given=given,
        replaced=replaced,
        written=written,
        is_started=is_shell and bool(launch.line),
        is_inference=_trains_nothing(launch.program, document),
        open_ends=tuple(dict.fromkeys((*others, *files))) if is_shell else (),
    )


def _trains_nothing(program: str, document: Document) -> bool:
    """Return whether a program evaluates a checkpoint or generates text, by its name."""
    is_by_name = INFERENCE.search(program) is not None or EVALUATION.search(program) is not None
    return is_by_name or document.mapping.get("MODE") == "inference"


def _runs(document: Document, variables: Mapping[str, str]) -> list[Arguments]:
    """Return the runs of a file, the first one first."""
    blocks = printed_arguments(document.text) if START.search(document.text) else ()
    if blocks:
        return runs_printed(blocks)
    if document.kind != "shell":
        if GROUP in document.mapping and not argument_groups(document.mapping):
            rule = "must be a mapping of arguments to their values"
            raise RunConfigError.of(
                f"{document.path}: {GROUP}",
                rule,
                document.mapping[GROUP],
                "Write --num-layers: 4, for example.",
            )
        return (
            runs_of(document.mapping)
            if argument_groups(document.mapping)
            else [Arguments(label=GROUP)]
        )
    asked = model_arguments(document.text, document.path)
    started = launches(document.text, document.path, {**asked.variables, **variables})
    found = [run for launch in started if is_megatron(launch) for run in runs_of([launch])]
    if not found:
        raise no_run_of_megatron(document.path, started)
    for run in found:
        run.path, run.read_too = document.path, asked.read_too
        if run.framework is not None and run.framework.name == EITHER:
            run.framework = table_of_clone(Path(document.path)) or run.framework
    return found


def _kind_of(run: _Run) -> _Kind | None:
    """Return the kind of a model that has other layers than a language model's decoder."""
    for kind, options in KINDS.items():
        own = [name for name in options if name in NULL_OTHERWISE or not run.written.has_end]
        stated = [name for name in own if name in run.given.values]
        if stated:
            return _Kind(kind, f"--{stated[0].replace('_', '-')}")
    named = [
        PurePosixPath(run.written.launch.name).name,
        str(run.given.values.get("model_provider", "")),
    ]
    for kind, pattern in PROGRAMS.items():
        for name in named:
            if re.search(rf"(?<![a-z])(?:{pattern})(?![a-z])", name):
                return _Kind(kind, name)
    return None


def _sizes_of_a_checkpoint(given: Values, program: str) -> dict[str, Any]:
    """Return the sizes below 1 of an evaluation, which stand for those of the checkpoint that it loads."""
    has_checkpoint = "load" in given.values or "load" in given.unread
    if not (has_checkpoint and EVALUATION.search(program)):
        return {}
    return {name: given.values[name] for name in REPLACED if _is_below_1(given.values.get(name))}


def _is_below_1(value: object) -> bool:
    number = number_of_text(str(value))
    return isinstance(number, int | float) and number < 1


def _refuse_no_arguments(run: _Run, path: str) -> None:
    """Refuse what is no run at all."""
    if run.open_ends and not run.given.values:
        rule = "takes all arguments of Megatron-LM from elsewhere"
        sentence = f"{path}: {run.written.label}: {rule}, got {run.open_ends[0]!r:.80}. Give the log of the run."
        raise UnreadFileError(sentence, kind="all arguments come from elsewhere")
    if not any(map(fields_of, (*run.given.values, *run.given.unread))):
        rule = "must hold arguments of Megatron-LM's training"
        given: object = next(iter(run.given.values), {})
        place = f"{path}: {run.written.label or 'arguments'}"
        sentence = f"{place}: {rule}, got {given!r:.80}. Give a file of its arguments."
        raise UnreadFileError(sentence, kind="no arguments of Megatron-LM's training")


def _read_as(run: _Run) -> tuple[str, ...]:
    """Return by which code of a framework a run is read, as sentences."""
    framework = run.written.framework
    if framework is None:
        return ()
    return (
        f"Read as a run of {framework.title}, by its code ({framework.code}).",
        *run.written.read_too,
    )


def _decided_late(path: str, text: str) -> str:
    """Return what is said of a field whose value only the run decides, as a sentence."""
    late = f"{path}: the value {text} is decided when the run starts"
    if path in WITHOUT_DEFAULT:
        return f"{late}, and there is no default. Add {path}=VALUE."
    return f"{late}; the default counts here."


def _unknown(run: _Run) -> list[str]:
    """Return what a file leaves open, as sentences."""
    program = run.written.launch.name
    found = [
        _decided_late(fields_of(name)[0], text)
        for name, text in run.given.unread.items()
        if fields_of(name)
    ]
    slips = {} if run.written.has_end else misspelt((*run.given.values, *run.given.unread))
    for name, meant in slips.items():
        spelled, near = (f"--{one.replace('_', '-')}" for one in (name, meant))
        found.append(
            f"{spelled}: no argument of Megatron-LM that is known, and it is not read. Did you mean {near}?"
        )
    found += [f"{one}: may hold further arguments, which are not read." for one in run.open_ends]
    variables = run.written.launch.unread_environment
    if variables:
        found.append(f"{variables}: it may set variables of the run, and could not be read.")
    if run.is_started and not run.written.is_known:
        found.append(
            f"{program}: a program whose own defaults are not known; those of Megatron-LM are assumed here."
        )
    pattern = run.given.values.get("hybrid_layer_pattern")
    if run.given.values.get("num_experts") and pattern and "E" not in str(pattern):
        experts = f"--num-experts {run.given.values['num_experts']}"
        found.append(
            f"{experts}: has no effect: the pattern {pattern} of the layers has no experts (E)."
        )
    if run.replaced:
        loaded = run.given.values.get("load") or run.given.unread.get("load")
        stated = " ".join(
            f"--{name.replace('_', '-')} {value}" for name, value in run.replaced.items()
        )
        found.append(
            f"{stated}: {program} evaluates the checkpoint --load {loaded}, whose sizes replace these."
        )
    if run.given.values.get("eval_fp32") and EVALUATION.search(run.written.launch.program):
        found.append(f"--eval_fp32: {program} computes in FP32, whatever the mode is.")
    if run.is_inference:
        found.append(
            "The run trains nothing: it has no optimizer and no gradients, which a plan and memory count."
        )
    if not run.is_started and not run.written.has_end and _kind_of(run) is None:
        kind = "hybrid" if "hybrid_layer_pattern" in run.given.values else "gpt"
        found.append(f"The program: the file does not name it; pretrain_{kind}.py is assumed.")
    return found
