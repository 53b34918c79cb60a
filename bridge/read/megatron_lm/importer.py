"""Megatron-LM as a system of `convert`: `SYSTEM`, with the import of launch scripts and arguments.

Its half-precision modes are O2: `--bf16` and `--fp16` cast the weights, and the optimizer keeps
FP32 masters. Two of its defaults differ from a recipe's: FP8 without `--fp8-recipe` is *delayed*
scaling, and gradients are reduced in FP32 under `--bf16` but not under `--fp16`.
"""

import re
import shlex
from collections.abc import Mapping
from typing import Any

from bridge.errors import PayloadError, close_matches, did_you_mean
from bridge.precision.config import MEGATRON_FIELDS
from bridge.precision.mode import get_mode
from bridge.read.foreign.import_builder import ImportBuilder
from bridge.read.foreign.reports import ImportReport
from bridge.read.foreign.system import ContextKey, System
from bridge.read.launch.script_launches import read_launches
from bridge.read.megatron_lm import effects, flags, te_precision_file
from bridge.read.megatron_lm.written_arguments import (
    INFERENCE_PROGRAMS,
    SWITCH_VALUES,
    WrittenArguments,
    WrittenSetting,
    parse_runs,
    parse_printed_runs,
)
from bridge.read.megatron_lm.deepspeed_engine import (
    ENGINE_ARGUMENTS,
    uses_deepspeed_engine,
    report_engine,
)
from bridge.read.megatron_lm.deepspeed_file import (
    EngineFile,
    load_engine_file,
    parse_engine_settings,
)
from bridge.read.megatron_lm.exporter import TITLE, export
from bridge.read.megatron_lm.gradient_reduction import REDUCTION_ARGUMENTS, state_reduction
from bridge.read.megatron_lm.printed_arguments import BLOCK_START, parse_printed_arguments
from bridge.read.megatron_lm.recognition import is_per_module_recipe
from bridge.read.megatron_lm.parser_refusals import find_refusals
from bridge.read.megatron_lm.stage_files import LAYOUT_KEYS
from bridge.read.text.document import Document
from bridge.registry.config import MixedPrecisionConfig

__all__ = ["SYSTEM", "export", "import_", "import_all", "read", "parse_variables"]

READ_TOGETHER = (*REDUCTION_ARGUMENTS, "use_distributed_optimizer")
"""Arguments that are not mapped one by one: others decide about the reduction of gradients with them."""


def import_(payload: object, *, variables: object = None) -> ImportReport:
    """Return the import of the first run of a payload.

    Args:
        payload: A list of arguments, a mapping of them, or the result of `read`.
        variables: The environment of a launch script, as `parse_variables` reads it.
    """
    return import_all(payload, variables=variables)[0]


def import_all(payload: object, *, variables: object = None) -> tuple[ImportReport, ...]:
    """Return the import of each run of a payload; arguments as for `import_`."""
    if isinstance(payload, Mapping) and is_per_module_recipe(payload):
        return (_import_per_module_recipe(payload),)
    return tuple(map(import_arguments, _parse_payload(payload, variables)))


def _parse_payload(payload: object, variables: object) -> list[WrittenArguments]:
    if not isinstance(payload, Document):
        return parse_runs(payload)
    if BLOCK_START.search(payload.text):
        blocks = parse_printed_arguments(payload.text)
        if not blocks:
            raise PayloadError("megatron-lm: the printed arguments are empty. Give the whole log.")
        return parse_printed_runs(blocks)
    runs = parse_runs(read_launches(payload.text, payload.path, parse_variables(variables)))
    for run in runs:
        run.path = payload.path
    return runs


def read(document: Document) -> object:
    """Return a launch script as the document itself, and a file of arguments as its mapping."""
    if is_per_module_recipe(document.mapping):
        return te_precision_file.parse(document.text, document.path)
    if document.kind in ("shell", "text", "env"):
        return document
    return document.content


def write(payload: list[str]) -> str:
    """Return the arguments as a bash array."""
    lines = " ".join(["MIXED_PRECISION_ARGS=(", *payload]).replace(" --", "\n    --")
    return f"{lines}\n)\n"


def _import_per_module_recipe(content: Mapping[str, Any]) -> ImportReport:
    """Report a per-module recipe, whose numbers count within a stage."""
    builder = ImportBuilder(TITLE)
    builder.record(
        "megatron_lm.layers-are-counted-within-a-stage", "matchers", list(content["matchers"])
    )
    builder.leave_mode("the command line that names this file", default="bf16")
    return builder.finish("unstated")


def import_arguments(run: WrittenArguments) -> ImportReport:
    """Return the precision that the arguments of a run state."""
    builder = ImportBuilder(TITLE)
    if INFERENCE_PROGRAMS.search(run.launch.program):
        builder.record("megatron_lm.program-is-inference", run.label, None)
    is_silent = not run.launch.line and not run.settings
    if is_silent:
        builder.record("megatron_lm.no-training-in-the-file", "launch", None)
    mode, is_unstated = _state_mode(run, builder, is_silent=is_silent)
    has_engine = uses_deepspeed_engine(run)
    file = EngineFile()
    if has_engine:
        file = load_engine_file(run, run.path)
    stated = parse_engine_settings(file.content)
    is_complete = _is_complete(run, mode, is_silent=is_silent)
    if has_engine and stated.fields is None:
        is_complete = False
    if stated.fields is not None:
        mode = get_mode(MixedPrecisionConfig.from_dict(stated.fields))
        is_unstated = False
    _map_settings(run, builder, has_engine=has_engine)
    if has_engine:
        report_engine(run, builder, file, stated)
    else:
        state_reduction(run, mode, builder)
    if is_unstated:
        builder.leave_mode(run.decided_by)
    effects.state_scheme(mode, builder, is_scaled=not has_engine)
    effects.report_unread_settings(run, builder)
    effects.report_sharding(run, builder)
    effects.map_environment(run.launch.environment, builder)
    is_file_read = stated.fields is not None and file.name in run.launch.files
    effects.report_undecided(run, builder, is_file_read=is_file_read)
    semantics = "megatron_o2"
    if mode == "fp32":
        semantics = "fp32"
    return builder.finish(semantics=semantics, label=run.label, is_whole=is_complete)


def _is_complete(run: WrittenArguments, mode: str, *, is_silent: bool) -> bool:
    """Return whether the arguments are the whole precision of the run, as far as they are read."""
    if is_silent and (run.launch.arguments or run.launch.notes):
        return False
    return not (mode == "fp32" and run.launch.line and run.used_by)


def _map_settings(run: WrittenArguments, builder: ImportBuilder, *, has_engine: bool) -> None:
    """Map or report the settings, but those that the parser refuses or that an engine decides."""
    negations: set[str] = set()
    for refusal in find_refusals(run):
        row = f"megatron_lm.{refusal.row}"
        builder.record(row, refusal.setting, refusal.value, **refusal.facts)
        if refusal.row == "no-negation":
            negations.add(flags.get_dest(refusal.setting))
    for key, written in run.settings.items():
        is_of_the_engine = has_engine and key in ENGINE_ARGUMENTS
        if key not in negations and not is_of_the_engine and key not in READ_TOGETHER:
            _map_setting(key, written, builder)


def _state_mode(
    run: WrittenArguments, builder: ImportBuilder, *, is_silent: bool
) -> tuple[str, bool]:
    """State the mode; return it, and whether another source than the arguments decides it.

    Of two modes `--bf16` counts.
    """
    modes: list[str] = []
    is_off = False
    for name in ("fp16", "bf16"):
        written = run.settings.get(name)
        if written is None:
            continue
        if written.value is False:
            is_off = True
        if name in run:
            modes.append(name)
            builder.map(written.name, **_get_mode_fields(name))
    if modes:
        return modes[-1], False
    is_whole = not run.undecided and not run.launch.unread_sources
    if run.framework is not None and run.framework.mode and is_whole:
        mode = run.framework.mode
        facts = {"system": run.framework.title, "mode": mode.upper(), "code": run.framework.code}
        builder.record("megatron_lm.framework-sets-the-mode", f"--{mode}", True, **facts)
        builder.fields |= _get_mode_fields(mode)
        return mode, False
    if run.decided_by and not is_off:
        return "fp32", True
    builder.fields["fp32"] = True
    if not is_silent:
        row = "megatron_lm.fp32-by-itself"
        if run.elsewhere:
            row = "megatron_lm.fp32-unless"
        builder.record(row, "--bf16", False, elsewhere=", ".join(run.elsewhere))
    return "fp32", False


def _get_mode_fields(mode: str) -> dict[str, object]:
    return {mode: True, "params_dtype": mode, "pipeline_dtype": mode}


def _map_setting(key: str, written: WrittenSetting, builder: ImportBuilder) -> None:
    """Map or report a setting."""
    flag = flags.FLAG_OF_NAME.get(key)
    row = flags.OTHER_SETTINGS.get(key)
    if written.value is None and key not in flags.FILE_SETTINGS:
        builder.record("megatron_lm.only-the-run-decides", written.name, written.shown)
    elif flag is not None:
        builder.map(written.name, **_get_flag_fields(flag, written))
    elif row is not None and str(written.value).lower() != str(row.harmless[0]).lower():
        builder.report(written.name, written.shown, *row.sentence)
    elif row is not None or (flags.bears_on_precision(key) and written.value is False):
        builder.map(written.name)
    elif flags.bears_on_precision(key):
        options = [known.option for known in flags.FLAG_OF_NAME.values()]
        near = did_you_mean(close_matches(written.name, options, limit=1))
        sentence = flags.TABLE.sentences["no-flag"]
        remedy = near or sentence.remedy
        builder.report(written.name, written.value, sentence.reason, sentence.detail, remedy)


def _get_flag_fields(flag: flags.Flag, written: WrittenSetting) -> dict[str, object]:
    """Return the field that a flag sets; empty where it sets no more than an unstated field."""
    value = written.value
    if flag.kind == "value":
        if value is True:
            raise PayloadError(
                f"{written.name}: must be followed by a value, got none. Complete the arguments."
            )
        if value in flags.NULL_WORDS:
            value = None
    elif value is True or SWITCH_VALUES.get(str(value).lower(), True):
        value = flag.sets
        if value is None:
            value = flag.kind == "on"
    elif flag.kind == "off" and not written.name.startswith("--"):
        value = True
    else:
        return {}
    if flag.field in MEGATRON_FIELDS and flags.is_default(flag.field, value):
        return {}
    return {flag.field: value}


def parse_variables(stated: object) -> dict[str, str]:
    """Return the context key `variables`, a mapping or a text of pairs; PayloadError for another text."""
    if isinstance(stated, Mapping):
        return {str(name): str(value) for name, value in stated.items()}
    lexer = shlex.shlex(str(stated or ""), posix=True)
    lexer.whitespace = " \t\n,"
    lexer.whitespace_split = True
    lexer.commenters = ""
    lexer.escape = ""
    variables: dict[str, str] = {}
    try:
        for word in lexer:
            pair = re.fullmatch(r"(\w+|[@*])=(.*)", word, re.DOTALL)
            if pair is None:
                raise _make_pairs_error(stated)
            variables[pair[1]] = pair[2]
    except ValueError:  # a quote that is not closed
        raise _make_pairs_error(stated) from None
    return variables


def _make_pairs_error(stated: object) -> PayloadError:
    rule = "must be NAME=value pairs"
    return PayloadError(f"variables: {rule}, got {stated!r}. Write variables='A=1 B=\"2 3\"'.")


CONTEXT = (
    ContextKey("variables", "environment of a launch script, as 'NAME=value NAME=value'"),
    *LAYOUT_KEYS,
)
SYSTEM = System(
    name="megatron-lm",
    title="Megatron-LM",
    version="0.20.0",
    export=export,
    import_=import_,
    write=write,
    read=read,
    context=CONTEXT,
    import_all=import_all,
)
