"""Megatron-LM: launch scripts, argument files and argument lists in; an argument list out.

Its half-precision modes are O2: `--bf16` and `--fp16` cast the weights, and the optimizer keeps FP32 masters. Two of
its defaults differ from a recipe's: FP8 without `--fp8-recipe` is *delayed* scaling, and gradients are reduced in FP32
under `--bf16` but not under `--fp16`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from bridge.errors import PayloadError
from bridge.interop import megatron_effects
from bridge.interop.contract import ContextKey, Exported, Imported, Loss, Recognised, System
from bridge.interop.crossing import Inward
from bridge.interop.meaning import meaning
from bridge.interop.megatron_arguments import Arguments, Written, argument_groups, runs_of
from bridge.interop.megatron_effects import LATE, SAY_IT
from bridge.interop.megatron_flags import BY_NAME, OTHER_SETTINGS, bears_on_precision
from bridge.interop.megatron_list import argument_list
from bridge.interop.shell import launches

if TYPE_CHECKING:
    from bridge.interop.document import Document
    from bridge.precision.config import MixedPrecisionConfig

__all__ = ["SYSTEM", "export", "import_", "import_all", "read", "variables_of"]

TITLE = "Megatron-LM 0.20"


def import_(payload: object, *, te_version: str = "2.8", variables: object = None) -> Imported:
    """Return what the first run of a payload asks for.

    Args:
        payload: A list of arguments, a mapping of them, or what `read` returns.
        te_version: Transformer Engine of the run: since 2.0 some settings are without effect.
        variables: Environment of a launch script, as a mapping or "NAME=value NAME=value".
    """
    first, *others = import_all(payload, te_version=te_version, variables=variables)
    if any(meaning(other.config) != meaning(first.config) for other in others):
        detail = "the file starts runs of different precision, and this is the first"
        loss = Loss(field="runs", value=len(others) + 1, reason="unsupported", detail=detail, remedy="Read them all.")
        return replace(first, losses=(*first.losses, loss))
    return first


def import_all(payload: object, *, te_version: str = "2.8", variables: object = None) -> tuple[Imported, ...]:
    """Return what every run of a payload asks for; arguments as `import_`."""
    from bridge.interop.document import Document

    if isinstance(payload, Document):
        payload = launches(payload.text, payload.path, variables_of(variables))
    runs = [_imported(run, modern=_is_modern(te_version)) for run in runs_of(payload)]
    if not runs:
        raise PayloadError("megatron-lm: there is no run in it. Give a launch script or a list of arguments.")
    return tuple(runs)


def read(document: Document) -> object:
    """Return a launch script as the document itself, an argument file as its mapping."""
    return document if document.kind in ("shell", "text", "env") else document.content


def export(config: MixedPrecisionConfig) -> Exported:
    """Return the recipe as a list of arguments; every default that differs is written out."""
    return argument_list(config, TITLE)


def write(payload: list[str]) -> str:
    """Return the arguments as a bash array."""
    lines: list[str] = []
    for word in payload:
        if word.startswith("--"):
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}"
    return "\n".join(["MIXED_PRECISION_ARGS=(", *lines, ")"]) + "\n"


def _imported(run: Arguments, *, modern: bool) -> Imported:
    crossing = Inward(TITLE)
    for written in run.overridden:
        crossing.lose(
            written.name,
            megatron_effects.shown(written),
            "dead knob",
            "written again later, and the last one counts",
            "Drop it.",
        )
    megatron_effects.refused(run, crossing)
    mode = _mode(run, crossing)
    for key, written in run.settings.items():
        _setting(key, written, crossing)
    megatron_effects.reduction(run, mode, crossing)
    megatron_effects.scheme(run, crossing, modern=modern)
    megatron_effects.loss_scale(mode, crossing)
    megatron_effects.sharding(run, crossing, modern=modern)
    megatron_effects.environment(run.environment, crossing)
    megatron_effects.undecided(run, crossing)
    return crossing.imported(semantics="fp32" if mode == "fp32" else "megatron_o2", label=run.label)


def _mode(run: Arguments, crossing: Inward) -> str:
    on = [name for name in ("fp16", "bf16") if name in run]
    for name in on:
        crossing.carry(run.settings[name].name, **{name: True, "params_dtype": name, "pipeline_dtype": name})
    if not on:
        crossing.fields["fp32"] = True
        if run.is_launch:
            detail = f"without --bf16 or --fp16 {TITLE} trains in FP32"
            if run.elsewhere:
                detail += f", unless {', '.join(run.elsewhere)} says otherwise"
            crossing.implied("--bf16", False, detail)
        else:
            detail = "nothing in it starts a training program or holds its arguments"
            crossing.lose("launch", None, "unsupported", detail, "Give the script that has the arguments.")
    return on[-1] if on else "fp32"


def _setting(key: str, written: Written, crossing: Inward) -> None:
    """Carry one setting that stands for itself, or report it."""
    flag, row = BY_NAME.get(key), OTHER_SETTINGS.get(key)
    if key in ("bf16", "fp16"):
        if written.value is False:
            crossing.carry(written.name)
        elif written.value is None:
            crossing.lose(written.name, written.shown, "unsupported", LATE, SAY_IT)
        return
    if key in ("grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32", "use_distributed_optimizer"):
        return
    if written.value is None and row is not None and row.is_file:
        crossing.lose(written.name, written.shown, row.reason, row.detail, row.remedy)
    elif written.value is None:
        crossing.lose(written.name, written.shown, "unsupported", LATE, SAY_IT)
    elif flag is not None:
        value = _decoded(flag.kind, flag.sets, written)
        crossing.carry(written.name, **({} if value is _UNSET else {flag.field: value}))
    elif row is not None:
        if str(written.value).lower() == str(row.default).lower():
            crossing.carry(written.name)
        else:
            crossing.lose(written.name, written.value, row.reason, row.detail, row.remedy)
    elif bears_on_precision(key) and written.value is not False:
        detail = f"no flag of {TITLE} that this bridge knows"
        crossing.lose(written.name, written.value, "unsupported", detail, "Look it up where it was added.")
    elif bears_on_precision(key):
        crossing.carry(written.name)


_UNSET = object()


def _decoded(kind: str, sets: object, written: Written) -> object:
    """Return the field's value of a flag, or `_UNSET` where the flag is written as off."""
    value = written.value
    if kind == "value":
        if value is True and not isinstance(sets, str):
            raise PayloadError(f"{written.name}: must be followed by a value, got none. Complete the arguments.")
        return None if value == "null" else value
    on = value if isinstance(value, bool) else str(value).lower() not in ("false", "0", "no", "off")
    if not on:
        return (True if kind == "off" else _UNSET) if not written.name.startswith("--") else _UNSET
    return sets if sets is not None else kind == "on"


PAIR = re.compile(r"""(?:^|(?<=[\s,]))(\w+|[@*])=("[^"]*"|'[^']*'|[^\s,]*)(?=[\s,]|$)""")
_RULE = "must be NAME=value pairs"


def variables_of(given: object) -> dict[str, str]:
    """Return the context key `variables` as a mapping; PayloadError for what is none."""
    if given is None:
        return {}
    if isinstance(given, str):
        if PAIR.sub("", given).strip(", "):
            raise PayloadError(f"variables: {_RULE}, got {given!r}. Write variables='A=1 B=\"2 3\"'.")
        return {found[1]: found[2].strip("'\"") for found in PAIR.finditer(given)}
    if hasattr(given, "items"):
        return {str(name): str(value) for name, value in given.items()}
    raise PayloadError(f"variables: {_RULE}, got {given!r}. Write variables='A=1 B=2'.")


def _is_modern(te_version: object) -> bool:
    major = re.match(r"\d+", str(te_version))
    if major is None:
        raise PayloadError(f"te_version: must be a version, got {te_version!r}. Write te_version=2.8.")
    return int(major[0]) >= 2


STRONG = re.compile(
    r"--(?:num-layers|hidden-size|num-attention-heads|micro-batch-size|global-batch-size|tensor-model-parallel-size"
    r"|pipeline-model-parallel-size|seq-length|train-iters|train-samples|fp8-format|fp4-format|fp8-recipe"
    r"|accumulate-allreduce-grads-in-fp32|initial-loss-scale|use-mcore-models|transformer-impl)\b"
)
KEYS = (
    "tensor_model_parallel_size",
    "micro_batch_size",
    "accumulate_allreduce_grads_in_fp32",
    "fp8_format",
    "num_layers",
)


def recognise(document: Document) -> Recognised | None:
    """Return why a document is taken for Megatron-LM's, or None."""
    if document.kind in ("shell", "text", "env"):
        found = sorted(set(STRONG.findall(document.text)))
        if found:
            certainty = min(0.95, 0.5 + 0.15 * len(found))
            return Recognised(
                certainty=certainty, evidence=f"has {', '.join(found[:3])}, which Megatron-LM's parser reads"
            )
        if document.kind == "shell" and re.search(r"\s--(bf16|fp16)\b(?! +(?:(?i:true|false)))", document.text):
            return Recognised(
                certainty=0.35, evidence="is a shell script with --bf16 or --fp16 as Megatron-LM takes them"
            )
        named = re.search(r"megatron|pretrain_\w+\.py", document.text, re.IGNORECASE)
        if document.kind == "shell" and named is not None:
            return Recognised(certainty=0.3, evidence=f"is a shell script that names `{named[0]}`")
        return None
    top = document.mapping
    if document.has("language_model", "model_parallel"):
        return Recognised(
            certainty=0.95, evidence="has `language_model` and `model_parallel`, as files for --yaml-cfg do"
        )
    groups = argument_groups(top)
    if groups:
        return Recognised(certainty=0.9, evidence=f"has `{groups[0][0]}`, a mapping of Megatron-LM's arguments")
    if top and all(str(key).startswith("--") for key in top):
        return Recognised(certainty=0.8, evidence="every key is a command-line flag")
    found = [key for key in KEYS if key in top]
    if len(found) > 1:
        return Recognised(
            certainty=0.7, evidence=f"has {' and '.join(f'`{key}`' for key in found[:2])}, Megatron-LM's arguments"
        )
    return None


SYSTEM = System(
    name="megatron-lm",
    title="Megatron-LM",
    version="0.20.0",
    kinds=("shell", "yaml", "json", "text", "env"),
    import_=import_,
    import_all=import_all,
    export=export,
    recognise=recognise,
    read=read,
    write=write,
    context=(
        ContextKey(name="te_version", meaning="Transformer Engine of the run", default="2.8"),
        ContextKey(name="variables", meaning="environment of a launch script, as 'NAME=value NAME=value'"),
    ),
)
