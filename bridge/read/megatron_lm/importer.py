"""Megatron-LM as a system of `convert`: `SYSTEM`, with the import of launch scripts and arguments.

Megatron-LM's half-precision modes are O2: `--bf16` and `--fp16` cast the weights, and the optimizer
keeps FP32 masters. Two of its defaults differ from those of a recipe. FP8 without `--fp8-recipe` is
*delayed* scaling. Gradients are reduced in FP32 under `--bf16`, but not under `--fp16`.
"""

import re
import shlex
from collections.abc import Mapping

from bridge.errors import PayloadError, close_matches, did_you_mean
from bridge.precision.mode import get_mode
from bridge.precision.precision_config import MEGATRON_FIELDS
from bridge.read.foreign.import_builder import ImportBuilder, require_field_values
from bridge.read.foreign.reports import ImportReport
from bridge.read.foreign.system import ContextKey, System
from bridge.read.launch.script_launches import read_launches
from bridge.read.megatron_lm import effects, flags
from bridge.read.megatron_lm.deepspeed.engine import (
    ENGINE_ARGUMENTS,
    report_engine,
    uses_deepspeed_engine,
)
from bridge.read.megatron_lm.deepspeed.engine_file import (
    EngineFile,
    load_engine_file,
    parse_engine_settings,
)
from bridge.read.megatron_lm.exporter import TITLE, export
from bridge.read.megatron_lm.gradient_reduction import REDUCTION_ARGUMENTS, state_reduction
from bridge.read.megatron_lm.module_recipe import te_precision_file
from bridge.read.megatron_lm.module_recipe.stage_files import LAYOUT_KEYS
from bridge.read.megatron_lm.parser_refusals import NO_NEGATION, find_refusals
from bridge.read.megatron_lm.printed_arguments import BLOCK_START, parse_printed_arguments
from bridge.read.megatron_lm.recognition import is_per_module_recipe
from bridge.read.megatron_lm.run_mode import ModeSource, RunMode, find_run_mode
from bridge.read.megatron_lm.written_arguments import (
    INFERENCE_PROGRAMS,
    SWITCH_VALUES,
    WrittenArguments,
    WrittenSetting,
    parse_printed_runs,
    parse_runs,
)
from bridge.read.text.document import Document
from bridge.registry.mixed_precision_config import MixedPrecisionConfig

__all__ = ["SYSTEM", "export", "import_", "import_all", "parse_variables", "read"]

READ_TOGETHER = (*REDUCTION_ARGUMENTS, "use_distributed_optimizer")
"""Arguments that are not mapped one by one, since `gradient_reduction` and `effects` read them with others."""
PAIR_PATTERN = re.compile(r"(\w+|[@*])=(.*)", re.DOTALL)
"""A variable of a script, or its parameters `@` and `*`, with its value."""


def import_(payload: object, *, variables: object = None) -> ImportReport:
    """Return the import of the first run of a payload.

    Args:
        payload: A list of arguments, a mapping of them, or the result of `read`.
        variables: The environment of a launch script, in a form that `parse_variables` reads.
    """
    return import_all(payload, variables=variables)[0]


def import_all(payload: object, *, variables: object = None) -> tuple[ImportReport, ...]:
    """Return the import of each run of a payload. The arguments are those of `import_`."""
    if isinstance(payload, Mapping) and is_per_module_recipe(payload):
        return (_import_per_module_recipe(payload),)
    return tuple(map(import_arguments, _parse_payload(payload, variables)))


def _parse_payload(payload: object, variables: object) -> list[WrittenArguments]:
    """Return the runs of a payload; those of a document are in its launches, or in its printed blocks."""
    if not isinstance(payload, Document):
        return parse_runs(payload)
    if BLOCK_START.search(payload.text):
        blocks = parse_printed_arguments(payload.text)
        if not blocks:
            raise PayloadError("megatron-lm: the printed arguments are empty. Give the whole log.")
        return parse_printed_runs(blocks)
    runs = parse_runs(read_launches(payload.text, payload.path, parse_variables(variables)))
    for written in runs:
        written.path = payload.path
    return runs


def read(document: Document) -> object:
    """Return the payload of a document for `import_`.

    It is the document itself for a launch script, and the mapping for a file of arguments.

    Raises:
        PayloadError: The document is a per-module recipe that Megatron refuses.
    """
    if is_per_module_recipe(document.mapping):
        return te_precision_file.parse(document.text, document.path)
    if document.kind in ("shell", "text", "env"):
        return document
    return document.content


def write(payload: list[str]) -> str:
    """Return the arguments as a bash array."""
    lines = " ".join(["MIXED_PRECISION_ARGS=(", *payload]).replace(" --", "\n    --")
    return f"{lines}\n)\n"


def _import_per_module_recipe(content: Mapping[str, Mapping[str, object]]) -> ImportReport:
    """Return the report of a per-module recipe, whose layer numbers count within a stage."""
    builder = ImportBuilder(TITLE)
    builder.record(
        "megatron_lm.layers-are-counted-within-a-stage", "matchers", list(content["matchers"])
    )
    builder.leave_mode("the command line that names this file", default="bf16")
    return builder.finish("unstated")


def import_arguments(written: WrittenArguments) -> ImportReport:
    """Return the precision that the arguments of a run state.

    The settings are mapped first. Then the defaults that follow from them are stated, and at last
    the parts of the run that the file does not decide are reported.

    Raises:
        PayloadError: An option lacks its value, or has a value that no field can have.
    """
    builder = ImportBuilder(TITLE)
    if INFERENCE_PROGRAMS.search(written.launch.program):
        builder.record("megatron_lm.program-is-inference", written.label, None)
    is_silent = not written.launch.line and not written.settings
    if is_silent:
        builder.record("megatron_lm.no-training-in-the-file", "launch", None)
    mode = find_run_mode(written)
    _record_mode(mode, written, builder, is_silent=is_silent)
    is_complete = _is_complete(written, mode.name, is_silent=is_silent)
    has_engine = uses_deepspeed_engine(written)
    file = EngineFile()
    if has_engine:
        file = load_engine_file(written, written.path)
    engine_settings = parse_engine_settings(file.content)
    if engine_settings.fields is not None:
        precision = MixedPrecisionConfig.from_dict(engine_settings.fields)
        mode = RunMode(get_mode(precision), ModeSource.ENGINE)
    elif has_engine:
        is_complete = False
    _map_settings(written, builder)
    if has_engine:
        report_engine(written, builder, file, engine_settings)
    else:
        state_reduction(written, mode.name, builder)
    if mode.source is ModeSource.UNREAD:
        builder.leave_mode(written.mode_decider)
    effects.state_scheme(mode.name, builder, is_scaled=not has_engine)
    effects.report_unread_settings(written, builder)
    effects.report_sharding(written, builder)
    effects.map_environment(written.launch.environment, builder)
    reads_engine_file = engine_settings.fields is not None and file.name in written.launch.files
    effects.report_open_parts(written, builder, reads_engine_file=reads_engine_file)
    semantics = "fp32" if mode.name == "fp32" else "megatron_o2"
    return builder.finish(semantics=semantics, label=written.label, is_whole=is_complete)


def _is_complete(written: WrittenArguments, mode: str, *, is_silent: bool) -> bool:
    """Return whether the arguments that are read are the whole precision of the run."""
    if is_silent and (written.launch.arguments or written.launch.notes):
        return False
    return not (mode == "fp32" and written.launch.line and written.used_by)


def require_values(written: WrittenArguments) -> None:
    """Refuse a flag without its value, or with a value that its field cannot have.

    Raises:
        PayloadError: A flag has no value, or has a value of a wrong type.
    """
    for key, setting in _select_mapped_settings(written).items():
        flag = flags.FLAG_OF_NAME.get(key)
        if flag is not None and setting.value is not None:
            require_field_values(setting.name, _get_flag_fields(flag, setting))


def _map_settings(written: WrittenArguments, builder: ImportBuilder) -> None:
    """Map or report the settings, and report the words that the parser refuses."""
    for refusal in find_refusals(written):
        sentence = f"megatron_lm.{refusal.sentence_name}"
        builder.record(sentence, refusal.setting, refusal.value, **refusal.facts)
    for key, setting in _select_mapped_settings(written).items():
        _map_setting(key, setting, builder)


def _select_mapped_settings(written: WrittenArguments) -> dict[str, WrittenSetting]:
    """Return the settings that are mapped one by one.

    A setting that the parser refuses, that DeepSpeed's engine decides, or that is read together
    with other settings is left out.
    """
    left_out = set(READ_TOGETHER)
    if uses_deepspeed_engine(written):
        left_out.update(ENGINE_ARGUMENTS)
    for refusal in find_refusals(written):
        if refusal.sentence_name == NO_NEGATION:
            left_out.add(flags.get_dest(refusal.setting))
    return {key: setting for key, setting in written.settings.items() if key not in left_out}


def _record_mode(
    mode: RunMode, written: WrittenArguments, builder: ImportBuilder, *, is_silent: bool
) -> None:
    """State the mode in the report, with the source that decides it.

    Args:
        builder: The report.
        is_silent: Whether the file has neither a launch nor a setting.
    """
    for name in ("fp16", "bf16"):
        if name in written:
            builder.map(written.settings[name].name, **_get_mode_fields(name))
    framework = written.framework
    if mode.source is ModeSource.FRAMEWORK and framework is not None:
        facts = {
            "system": framework.title,
            "mode": mode.name.upper(),
            "code": framework.code,
        }
        builder.record("megatron_lm.framework-sets-the-mode", f"--{mode.name}", True, **facts)
        builder.fields |= _get_mode_fields(mode.name)
    if mode.source is not ModeSource.DEFAULT:
        return
    builder.fields["fp32"] = True
    if not is_silent:
        sources = written.possible_sources
        sentence = "megatron_lm.fp32-by-itself"
        if sources:
            sentence = "megatron_lm.fp32-unless"
        builder.record(sentence, "--bf16", False, elsewhere=", ".join(sources))


def _get_mode_fields(mode: str) -> dict[str, object]:
    """Return the fields of bf16 or fp16, which also decides two dtypes."""
    return {mode: True, "params_dtype": mode, "pipeline_dtype": mode}


def _map_setting(key: str, setting: WrittenSetting, builder: ImportBuilder) -> None:
    """Map or report a setting.

    A setting that has no flag and no row is reported if it looks like a setting of a precision, with
    the closest flag.
    """
    flag = flags.FLAG_OF_NAME.get(key)
    row = flags.OTHER_SETTINGS.get(key)
    if setting.value is None and key not in flags.FILE_SETTINGS:
        builder.record("megatron_lm.only-the-run-decides", setting.name, setting.shown)
    elif flag is not None:
        builder.map(setting.name, **_get_flag_fields(flag, setting))
    elif row is not None and str(setting.value).lower() != str(row.harmless[0]).lower():
        builder.report(setting.name, setting.shown, *row.sentence)
    elif row is not None or (flags.may_affect_precision(key) and setting.value is False):
        builder.map(setting.name)
    elif flags.may_affect_precision(key):
        options = [known_flag.option for known_flag in flags.FLAG_OF_NAME.values()]
        hint = did_you_mean(close_matches(setting.name, options, limit=1))
        sentence = flags.TABLE.sentences["no-flag"]
        remedy = hint or sentence.remedy
        builder.report(setting.name, setting.value, sentence.reason, sentence.detail, remedy)


def _get_flag_fields(flag: flags.Flag, setting: WrittenSetting) -> dict[str, object]:
    """Return the field that a flag sets, with its value.

    It is empty if the value is that of an unstated field.

    Raises:
        PayloadError: The flag takes a value and has none.
    """
    if flag.kind == "value":
        if setting.value is True:
            raise PayloadError(
                f"{setting.name}: must be followed by a value, got none. Complete the arguments."
            )
        value = setting.value
        if value in flags.NULL_WORDS:
            value = None
    elif setting.value is True or SWITCH_VALUES.get(str(setting.value).lower(), True):
        value = _get_switch_value(flag)
    elif flag.kind == "off" and not setting.name.startswith("--"):
        value = True  # a file whose key of a switch-off flag is false
    else:
        return {}
    if flag.field in MEGATRON_FIELDS and flags.is_default(flag.field, value):
        return {}
    return {flag.field: value}


def _get_switch_value(flag: flags.Flag) -> object:
    """Return the value that a flag without a value sets."""
    if flag.sets is not None:
        return flag.sets
    return flag.kind == "on"


def parse_variables(stated: object) -> dict[str, str]:
    """Return the environment of a launch script, the context key `variables`.

    Args:
        stated: A mapping, or a text of pairs: "NAME=value NAME='two words'". Commas separate pairs
            too.

    Raises:
        PayloadError: The text does not consist of pairs.
    """
    if isinstance(stated, Mapping):
        return {str(name): str(value) for name, value in stated.items()}
    lexer = shlex.shlex(str(stated or ""), posix=True)
    lexer.whitespace = " \t\n,"
    lexer.whitespace_split = True
    lexer.commenters = ""
    lexer.escape = ""  # a backslash is a character of a value
    variables: dict[str, str] = {}
    try:
        for word in lexer:
            pair = PAIR_PATTERN.fullmatch(word)
            if pair is None:
                raise _make_pairs_error(stated)
            variables[pair[1]] = pair[2]
    except ValueError:  # a quote that is not closed
        raise _make_pairs_error(stated) from None
    return variables


def _make_pairs_error(stated: object) -> PayloadError:
    """Return the refusal of a text that does not consist of pairs."""
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
