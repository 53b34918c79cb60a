"""Environment variables that bear on precision: which they are, who sets them, and what they say."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from bridge.errors import BridgeError, PayloadError
from bridge.interop import accelerate
from bridge.interop.launch.alternatives import launches
from bridge.interop.survey.source import Source, precision

__all__ = ["VARIABLES", "assigned", "exported", "of_variables"]

VARIABLES = re.compile(
    r"ACCELERATE_(MIXED_PRECISION|FP8_\w+|DYNAMO_\w+|DOWNCAST_BF16)|FSDP_MIXED_PRECISION\w*|NVIDIA_TF32_OVERRIDE"
    r"|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|NVTE_(FP8|MXFP8|NVFP4|APPLY_QK|BF16|FP16)\w*|XLA_USE_BF16|XLA_DOWNCAST_BF16"
    r"|DEEPSPEED_\w*(FP16|BF16)\w*"
)
DECIDES = "ACCELERATE_MIXED_PRECISION"
ASSIGNED = re.compile(
    r"^[ \t]*(?:export[ \t]+)?([A-Za-z_]\w*)[ \t]*=[ \t]*('[^'\n]*'|\"[^\"\n]*\"|[^\n]*)", re.MULTILINE
)


def of_variables(
    pairs: Mapping[str, str] | Iterable[tuple[str, str]], path: str, kind: str, *, run: str = ""
) -> list[Source]:
    """Return a source for each variable that bears on precision; one that is set to several values is several."""
    items = pairs.items() if isinstance(pairs, Mapping) else pairs
    known = sorted({(name, value) for name, value in items if VARIABLES.fullmatch(name)})
    return [
        Source(
            path=path,
            system="accelerate" if name.startswith(("ACC", "FSDP")) else "te" if name.startswith("NVTE") else "torch",
            kind=kind,
            says=f"{name}={value}",
            precision=_said({**dict(known), name: value}) if name == DECIDES else None,
            run=run,
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
    """Return what a script exports, on any way through it and as written where only a run decides it.

    The file names of the programs that it starts come second.
    """
    try:
        found = launches(text, path)
    except PayloadError:  # broken: what is exported line by line still says what somebody meant
        lines = "\n".join(re.findall(r"^\s*export\s.*", text, re.MULTILINE))
        return list(assigned(lines).items()), frozenset()
    pairs = [(name, launch.unknowns.shown(value)) for launch in found for name, value in launch.environment.items()]
    names = {launch.program.rpartition("/")[2] for launch in found}
    return pairs, frozenset(name if name.endswith(".py") else f"{name.rpartition('.')[2]}.py" for name in names)
