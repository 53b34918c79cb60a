"""Megatron-LM's files of a run: argument files, launch scripts, and the arguments that a run printed or saved.

A run of Megatron-LM has no recipe: its flags of a precision are read as the values of the configs
that hold them, as its own code does. So there is no precision to write, and no sync to foresee.
Under DeepSpeed its engine decides, and what `convert` reads of it is the precision.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from bridge.errors import Finding, PayloadError, RunConfigError, UnreadFileError
from bridge.precision.values import number_of_text
from bridge.preflight.file_reading import MEGATRON_LM, NEWEST, FileReading, RunChoice
from bridge.read.assumed_release import release_of
from bridge.read.foreign.reports import ImportReport
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
from bridge.read.refusals import no_run_of_megatron
from bridge.read.text.document import Document
from bridge.target.fields import known_releases
from bridge.target.versions import Version, parse_version

KINDS: dict[str, tuple[str, ...]] = {
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
"""Table of a launch that is of one of two frameworks; the clone that the script lies in may say of
which."""
FORK = "the parser of Megatron-DeepSpeed"
"""What a program under DeepSpeed has in the place of Megatron-LM's parser."""
GROUP = "MODEL_ARGS"
"""Key of the arguments in the files of Megatron-LM's own tests."""


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
REPLACED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "max_position_embeddings",
)
"""Sizes that an evaluation reads from the checkpoint.  Source: Megatron-DeepSpeed of bigscience and
Microsoft, examples of tasks/eval_harness/evaluate.py, whose load_ds_checkpoint_and_setup_megatron
takes the arguments of the checkpoint. """
EVALUATION = re.compile(r"(?:^|/)eval_harness/|(?:^|/)eval(?:uate|uation)?\.py\Z")
"""Programs that evaluate a checkpoint."""
UNPLANNED = (
    "{path}: describes {kind}, whose layers cannot be planned, got {given!r}. "
    "Give a run of a language model."
)


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
    own_fields = _fields_of_no_config(run.given)
    environment = _environment(written)
    framework = written.framework
    own = OwnReading()
    if framework is not None:
        arguments = run.given.values | run.given.unread
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
    sections = _sections_over(sections, other.sections)
    write_own(sections, own)
    if run.is_inference:
        sections = {"model": sections["model"]}
    release, reason = _release(written, sections)
    unplanned = own.unplanned or other.unplanned
    if kind is not None:
        unplanned = UNPLANNED.format(path=document.path, kind=kind.kind, given=kind.given)
    labels = [run_of_file.label for run_of_file in runs]
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
        runs=tuple(labels) if len(runs) > 1 else (),
        number=number,
        branches=_branches(runs, number),
    )


def _fields_of_no_config(given: Values) -> dict[str, Any]:
    """Return the arguments that are no field of a config, by their paths in our section of them."""
    fields: dict[str, Any] = {}
    for name, value in given.values.items():
        if not fields_of(name):
            fields[f"{ARGUMENT}.{name}"] = value
    return fields


def _environment(written: Arguments) -> dict[str, str]:
    """Return the environment of a run, without variables that only the run knows."""
    variables = written.launch.environment.items()
    return {name: str(value) for name, value in variables if not value.is_unknown}


def _sections_over(
    sections: Mapping[str, Mapping[str, Any]], others: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return sections with the fields of other sources over those of the arguments."""
    whole: dict[str, dict[str, Any]] = {}
    for role, fields in sections.items():
        if "mixed_precision" in others:  # of an engine, whatever the arguments say
            whole[role] = without_those_of_the_engine(fields)
        else:
            whole[role] = dict(fields)
    for role, fields in others.items():
        whole[role] = {**whole.get(role, {}), **fields}
    return whole


def _release(
    written: Arguments, sections: Mapping[str, Mapping[str, Any]]
) -> tuple[Version | None, str]:
    """Return the release of Megatron Core that a run is read as, and the reason."""
    framework = written.framework
    if written.has_end:  # the release that wrote all arguments
        return release_of(sections, is_whole=True)
    if framework is not None and framework.release:
        return parse_version(framework.release["megatron_core"]), framework.release["because"]
    return known_releases()[-1], NEWEST


def _chosen(
    document: Document, variables: Mapping[str, str], number: int
) -> tuple[list[Arguments], ImportReport]:
    """Return the runs of a file, and what the run of a number asks for.

    Raises:
        RunConfigError: There is no run of this number.
    """
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
    """Return what decides the settings that a run does not state, as a noun.

    It is None where known defaults decide.
    """
    written = run.written
    if written.has_end:
        return None
    if written.has_end is not None:
        return "the rest of the log"
    if document.kind != "shell":
        if GROUP in document.mapping or argument_groups(document.mapping):  # of Megatron-LM's tests
            return None
        return "the command line that names this file"
    if not run.is_started:
        return "the script that uses these arguments"
    program = written.launch.name
    if not written.is_known:
        return program
    if is_engine(written):
        return FORK
    if run.open_ends:
        return run.open_ends[0]
    return None


def _refused(run: _Run) -> tuple[Finding, ...]:
    """Return the words that the parser refuses, as errors.

    They are warnings where the program may have a parser of its own.
    """
    severity = "error" if run.written.is_known else "warning"
    findings: list[Finding] = []
    if run.written.framework is not None and run.written.framework.ignores:
        return ()  # its parser drops what it does not know
    for refused in refused_words(run.written):
        facts = {"system": MEGATRON_LM, **refused.facts}
        words = TABLE.sentences[refused.row].filled(facts)
        finding = Finding(
            path=refused.setting,
            rule=words.detail,
            remedy=words.remedy.rstrip("."),
            value=refused.value,
            severity=severity,
        )
        findings.append(finding)
    return tuple(findings)


def _open_values(run: _Run) -> dict[str, str]:
    """Return each field whose value only the run decides -> the value as it is written."""
    texts: dict[str, str] = {}
    for name, text in run.given.unread.items():
        for path in fields_of(name):
            texts[path] = text
    return texts


def _variables(runs: Sequence[Arguments], written: Arguments) -> tuple[str, ...]:
    """Return the variables that may state the mode.

    Those that choose a branch come first, then those that hold arguments.
    """
    names: list[str] = []
    for run in runs:
        if run.launch.line == written.launch.line:
            for label in run.launch.decisions:
                names += VARIABLE.findall(label)
    for word in written.undecided:
        array = ARRAY.fullmatch(word)
        names.append(variable_of(word) if array is None else array[1])
    return tuple(dict.fromkeys(filter(None, names)))


def _branches(runs: Sequence[Arguments], number: int) -> tuple[int, ...]:
    """Return the numbers of the runs that are the same launch on other branches of the script."""
    launch = runs[number - 1].launch
    if not launch.line:
        return ()
    places: list[int] = []
    for place, run in enumerate(runs, 1):
        is_same = run.launch.line == launch.line and run.launch.name == launch.name
        if is_same and place != number:
            places.append(place)
    return tuple(places)


def mode_of_arguments(given: Values) -> str:
    """Return the mode that the arguments of a run state."""
    for name in ("fp16", "bf16"):
        if given.values.get(name):
            return name
    return "fp32"


def _run_of(written: Arguments, document: Document) -> _Run:
    launch = written.launch
    is_shell = document.kind == "shell"
    given = values_of(written.options)
    replaced = _sizes_of_a_checkpoint(given, launch.program)
    for name in replaced:
        del given.values[name]
    open_ends: list[str] = []
    if is_shell:
        open_ends += [source for source in written.elsewhere if not is_named(source)]
        open_ends += [note for note in launch.notes if note.startswith("source ")]
    return _Run(
        given=given,
        replaced=replaced,
        written=written,
        is_started=is_shell and bool(launch.line),
        is_inference=_trains_nothing(launch.program, document),
        open_ends=tuple(dict.fromkeys(open_ends)),
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
        if argument_groups(document.mapping):
            return runs_of(document.mapping)
        return [Arguments(label=GROUP)]
    asked = model_arguments(document.text, document.path)
    started = launches(document.text, document.path, {**asked.variables, **variables})
    runs: list[Arguments] = []
    for launch in started:
        if is_megatron(launch):
            runs += runs_of([launch])
    if not runs:
        raise no_run_of_megatron(document.path, started)
    for run in runs:
        run.path = document.path
        run.read_too = asked.read_too
        if run.framework is not None and run.framework.name == EITHER:
            run.framework = table_of_clone(Path(document.path)) or run.framework
    return runs


def _kind_of(run: _Run) -> _Kind | None:
    """Return the kind of a model that has other layers than a language model's decoder."""
    for kind, options in KINDS.items():
        for name in options:
            is_of_the_kind = name in NULL_OTHERWISE or not run.written.has_end
            if is_of_the_kind and name in run.given.values:
                return _Kind(kind, _option(name))
    program = PurePosixPath(run.written.launch.name).name
    provider = str(run.given.values.get("model_provider", ""))
    for kind, pattern in PROGRAMS.items():
        for name in (program, provider):
            if re.search(rf"(?<![a-z])(?:{pattern})(?![a-z])", name):
                return _Kind(kind, name)
    return None


def _sizes_of_a_checkpoint(given: Values, program: str) -> dict[str, Any]:
    """Return the sizes below 1 of an evaluation: those of the checkpoint replace them."""
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
        source = run.open_ends[0]
        place = f"{path}: {run.written.label}"
        sentence = f"{place}: {rule}, got {source!r:.80}. Give the log of the run."
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
    """Return the sentence about a field whose value only the run decides."""
    late = f"{path}: the value {text} is decided when the run starts"
    if path in WITHOUT_DEFAULT:
        return f"{late}, and there is no default. Add {path}=VALUE."
    return f"{late}; the default counts here."


def _unknown(run: _Run) -> list[str]:
    """Return what a file leaves open, as sentences."""
    return [*_unread_words(run), *_without_effect(run), *_of_the_program(run)]


def _unread_words(run: _Run) -> Iterator[str]:
    """Yield the arguments that are not read, and what may hold further ones."""
    program = run.written.launch.name
    for name, text in run.given.unread.items():
        paths = fields_of(name)
        if paths:
            yield _decided_late(paths[0], text)
    slips: dict[str, str] = {}
    if not run.written.has_end:
        slips = misspelt((*run.given.values, *run.given.unread))
    for name, meant in slips.items():
        rule = "no argument of Megatron-LM that is known, and it is not read"
        yield f"{_option(name)}: {rule}. Did you mean {_option(meant)}?"
    for source in run.open_ends:
        yield f"{source}: may hold further arguments, which are not read."
    variables = run.written.launch.unread_environment
    if variables:
        yield f"{variables}: it may set variables of the run, and could not be read."
    if run.is_started and not run.written.is_known:
        rule = "a program whose own defaults are not known"
        yield f"{program}: {rule}; those of Megatron-LM are assumed here."


def _without_effect(run: _Run) -> Iterator[str]:
    """Yield the arguments that have no effect in the run."""
    program = run.written.launch.name
    values = run.given.values
    pattern = values.get("hybrid_layer_pattern")
    experts = values.get("num_experts")
    if experts and pattern and "E" not in str(pattern):
        rule = f"has no effect: the pattern {pattern} of the layers has no experts (E)"
        yield f"--num-experts {experts}: {rule}."
    if run.replaced:
        loaded = values.get("load") or run.given.unread.get("load")
        sizes = " ".join(f"{_option(name)} {value}" for name, value in run.replaced.items())
        rule = f"{program} evaluates the checkpoint --load {loaded}, whose sizes replace these"
        yield f"{sizes}: {rule}."
    if values.get("eval_fp32") and EVALUATION.search(run.written.launch.program):
        yield f"--eval_fp32: {program} computes in FP32, whatever the mode is."


def _of_the_program(run: _Run) -> Iterator[str]:
    """Yield what the program of the run is, where it trains nothing or the file does not name it."""
    if run.is_inference:
        yield (
            "The run trains nothing: it has no optimizer and no gradients, "
            "which a plan and memory count."
        )
    if not run.is_started and not run.written.has_end and _kind_of(run) is None:
        kind = "hybrid" if "hybrid_layer_pattern" in run.given.values else "gpt"
        yield f"The program: the file does not name it; pretrain_{kind}.py is assumed."


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
