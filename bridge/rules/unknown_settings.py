"""Text about settings whose values are not known, and about what decides their values.

format_unknown_settings({"model.fp8": "train.py", ...})    # "model.fp8 and 12 more settings"
"""

from collections.abc import Mapping, Sequence

MAX_NAMED = 3
"""The number of unknown settings that a text names. The others are counted."""
PRIORITY_SETTINGS = (
    "model.tensor_model_parallel_size",
    "model.pipeline_model_parallel_size",
    "model.expert_model_parallel_size",
    "optimizer.use_distributed_optimizer",
    "model.seq_length",
    "train.micro_batch_size",
    "model.bf16",
)
"""Settings that decide most of a run. They are named first."""


def select_named_settings(unknown: Mapping[str, str], path: str = "") -> list[str]:
    """Return the unknown settings that a text names.

    `path` comes first, then the settings of `PRIORITY_SETTINGS`.
    """
    ordered = sorted(unknown, key=lambda name: (name != path, name not in PRIORITY_SETTINGS))
    return ordered[:MAX_NAMED]


def format_unknown_settings(unknown: Mapping[str, str], path: str = "") -> str:
    """Return the unknown settings as text: "model.fp8, model.fp4 and 12 more settings"."""
    named = select_named_settings(unknown, path)
    others = len(unknown) - len(named)
    if others == 1:
        named.append("1 more setting")
    elif others:
        named.append(f"{others} more settings")
    return format_enumeration(named)


def format_deciders(unknown: Mapping[str, str]) -> str:
    """Return the deciders of unknown settings as text: "train.py and the value $TP"."""
    return format_enumeration([*dict.fromkeys(unknown.values())])


def format_enumeration(words: Sequence[str]) -> str:
    """Return "a", "a and b" or "a, b and c"."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"
