"""`Source`: one place where a project says its precision, and the order in which such places win.

An environment variable that bears on precision is a source too.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from bridge.errors import BridgeError, PayloadError
from bridge.interop import accelerate
from bridge.interop.contract import ImportReport
from bridge.interop.launch.alternatives import launches
from bridge.registry.config import MixedPrecisionConfig

ORDER: Mapping[str, str] = MappingProxyType(
    {
        "deepspeed": "its engine casts the module; accelerate and transformers refuse arguments that differ",
        "started program": "a value written out in a call reads no flag, file or variable",
        "launch script": "flags go over the files and variables that the same program reads",
        "unnamed deepspeed": "nothing names it here, so that it counts, and then first, where it is given by hand",
        "program": "a value written out in a call goes over files and variables",
        "training file": "the trainer that reads it hands it on as arguments, which go over the environment",
        "accelerate flag": "`accelerate launch` writes it into the environment, over its own file",
        "accelerate file": "`accelerate launch` writes it into the environment, over what is there",
        "script variable": "an export goes over the environment that the script is started in",
        "process": "an exported variable goes over a .env file",
        ".env file": "it only fills what nobody else set",
    }
)
"""Kind of source -> why it stands above the ones below it, the one that wins first."""

OPEN = MappingProxyType(
    {
        "huggingface": "no switch is on: ACCELERATE_MIXED_PRECISION decides, and without it fp32",
        "fsdp": "weights are used in the dtype they have",
    }
)
"""System -> what decides where its configuration states FP32. Source: transformers 5.23.0."""
VARIABLE = "ACCELERATE_MIXED_PRECISION"
VARIABLES = re.compile(
    r"ACCELERATE_(MIXED_PRECISION|FP8_\w+|DYNAMO_\w+|DOWNCAST_BF16)|FSDP_MIXED_PRECISION\w*|NVIDIA_TF32_OVERRIDE"
    r"|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|NVTE_(FP8|MXFP8|NVFP4|APPLY_QK|BF16|FP16)\w*|XLA_USE_BF16|XLA_DOWNCAST_BF16"
    r"|DEEPSPEED_\w*(FP16|BF16)\w*"
)
ASSIGNED = re.compile(
    r"^[ \t]*(?:export[ \t]+)?([A-Za-z_]\w*)[ \t]*=[ \t]*('[^'\n]*'|\"[^\"\n]*\"|[^\n]*)", re.MULTILINE
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """One source."""

    path: str
    """File, or "environment"."""
    system: str
    kind: str
    """One of `ORDER`, or "per module"."""
    says: str
    precision: str | None
    """What decides agreement: "bf16", "bf16 + fp8 delayed"; None where it does not say what a run trains in."""
    run: str = ""
    semantics: str | None = None
    recipe: str | None = None
    evidence: str = ""
    unmapped: int = 0


def source_of(
    imported: ImportReport, *, path: str, system: str, kind: str, evidence: str, run: str = "", says: str = ""
) -> Source:
    """Return the source that an import makes: without a precision where the system leaves it to somebody else."""
    is_fp32 = imported.config.mode == "fp32" and not imported.config.autocast_enabled
    is_left = is_fp32 and system in OPEN and not imported.mapped.get(VARIABLE)
    is_open = is_left or not imported.mode_is_stated
    decider = OPEN[system] if imported.mode_is_stated and is_open else f"{imported.decided_by} decides"
    return Source(
        path=path,
        system=system,
        kind=kind,
        says=": ".join(filter(None, (says, decider))) if is_open else says or precision(imported.config),
        precision=None if is_open else precision(imported.config),
        run=run,
        semantics=None if is_open else imported.semantics,
        recipe=None if is_open else imported.recipe,
        evidence=evidence,
        unmapped=len(imported.unmapped),
    )


def precision(config: MixedPrecisionConfig) -> str:
    """Return dtype and scheme, the part of a precision that two sources can disagree about."""
    dtype = str(config.to_dict().get("autocast_dtype") or config.mode) if config.autocast_enabled else config.mode
    if config.fp8:
        return f"{dtype} + fp8 {config.fp8_recipe}"
    return f"{dtype} + {config.fp4_recipe}" if config.fp4 else dtype


def _system_of(variable: str) -> str:
    if variable.startswith(("ACC", "FSDP")):
        return "accelerate"
    return "te" if variable.startswith("NVTE") else "torch"


def of_variables(pairs: Mapping[str, str] | Iterable[tuple[str, str]], path: str, kind: str) -> list[Source]:
    """Return a source for each variable that bears on precision; one that is set to several values is several."""
    items = pairs.items() if isinstance(pairs, Mapping) else pairs
    known = sorted({(name, value) for name, value in items if VARIABLES.fullmatch(name)})
    return [
        Source(
            path=path,
            system=_system_of(name),
            kind=kind,
            says=f"{name}={value}",
            precision=_said({**dict(known), name: value}) if name == VARIABLE else None,
            evidence=f"sets {name}",
        )
        for name, value in known
    ]


def _said(variables: dict[str, str]) -> str | None:
    own = {name: value for name, value in variables.items() if name.startswith("ACCELERATE_")}
    try:
        return precision(accelerate.import_(own).config)
    except BridgeError:
        return None


def assigned(text: str) -> dict[str, str]:
    """Return what a .env file sets; later lines win, and an unquoted value ends where a comment begins."""
    found = {}
    for name, value in ASSIGNED.findall(text):
        quoted = value[:1] in ("'", '"')
        found[name] = value[1:-1] if quoted and len(value) > 1 else re.sub(r"(^|\s+)#.*", "", value).strip()
    return found


def exported(text: str, path: str) -> tuple[list[tuple[str, str]], frozenset[str]]:
    """Return what a script exports, on any branch and as written where only a run decides it.

    The file names of the programs that it starts come second.
    """
    try:
        found = launches(text, path)
    except PayloadError:  # broken: what is exported line by line still says what somebody meant
        return list(assigned("\n".join(re.findall(r"^\s*export\s.*", text, re.MULTILINE))).items()), frozenset()
    pairs = [(name, launch.unknowns.shown(value)) for launch in found for name, value in launch.environment.items()]
    names = {launch.program.rpartition("/")[2] for launch in found}
    return pairs, frozenset(name if name.endswith(".py") else f"{name.rpartition('.')[2]}.py" for name in names)
