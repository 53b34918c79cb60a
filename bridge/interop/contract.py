"""What every bridge to another system promises.

    import_(payload, **context) -> Imported      what their configuration asks for, as a recipe
    export(config, **context)   -> Exported      the recipe, in their words

Nothing is dropped and nothing is guessed silently: each setting of theirs that bears on precision is either carried
into a field or reported as a loss, each stated field of a recipe is either carried into their payload or reported.
A default that nobody wrote is a loss too, of the kind "implied default", and names the version it was taken from.

The context carries what no configuration file can say: versions, the GPU, tf32, torch.compile, the dtype of evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bridge.registry.config import MixedPrecisionConfig

__all__ = ["REASONS", "SEMANTICS", "ContextKey", "Exported", "Imported", "Loss", "Recognised", "System"]

REASONS = MappingProxyType(
    {
        "unsupported": "the other side has no such setting",
        "approximated": "the nearest setting of the other side was taken",
        "implied default": "nobody wrote it; the system's own default decided",
        "dead knob": "it is written down and has no effect",
        "semantics": "the same word means another computation",
    }
)

SEMANTICS = MappingProxyType(
    {
        "megatron_o2": "half-precision weights everywhere, FP32 master weights in the optimizer",
        "amp_o1": "FP32 weights, each operator cast by autocast",
        "fsdp_policy": "FP32 shards, cast to half precision when they are gathered",
        "true": "half-precision weights and optimizer state, nothing in FP32",
        "fp32": "no half precision anywhere",
    }
)
"""What people call "bf16 mixed" is one of the first four."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """One setting that did not cross the bridge as it stands."""

    field: str
    """The setting, in the words of the side it was read from."""
    value: object
    """Its value there."""
    reason: str
    """One of `REASONS`."""
    detail: str
    """What is different on the other side, with the version it was seen in: one clause without a full stop."""
    remedy: str
    """What to do about it, as one sentence."""

    def __post_init__(self) -> None:
        if self.reason not in REASONS:
            raise ValueError(f"reason: must be one of {', '.join(REASONS)}, got {self.reason!r}.")

    def __str__(self) -> str:
        return f"{self.field}={self.value!r} ({self.reason}): {self.detail}. {self.remedy}"


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What a foreign configuration asks for."""

    config: MixedPrecisionConfig
    """Only what the foreign configuration decides is stated."""
    semantics: str
    """One of `SEMANTICS`."""
    losses: tuple[Loss, ...] = ()
    carried: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Each foreign setting that was carried -> the fields of `config` it became.

    Without fields it agrees with what is unstated here."""
    recipe: str | None = None
    """The registered recipe that means exactly the same, if there is one."""
    label: str = ""
    """Which run of the file this is, where it starts several: "line 41, pretrain_gpt.py"."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A recipe in another system's words."""

    payload: Any
    """What the other system's own loader takes: a mapping, a list of arguments, an object."""
    losses: tuple[Loss, ...] = ()
    carried: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Each stated field that was carried -> the settings of the payload it became."""


@dataclass(frozen=True, kw_only=True)
class Recognised:
    """Why a document is taken for a system's."""

    certainty: float
    """0 to 1; the highest wins, a tie is an error that names both."""
    evidence: str
    """What gave it away, as a clause: "has `fp16.enabled` and `zero_optimization`, which only DeepSpeed reads"."""


@dataclass(frozen=True, kw_only=True)
class ContextKey:
    """One thing that `import_` or `export` wants to know and no file says."""

    name: str
    meaning: str
    default: object = None


@dataclass(frozen=True, kw_only=True)
class System:
    """One foreign system; each module of this room ends with `SYSTEM = System(...)`."""

    name: str
    """As in `--to NAME`: lower case, hyphens."""
    title: str
    version: str
    """The release its facts were taken from."""
    kinds: tuple[str, ...]
    """Kinds of document it is written in: yaml, json, shell, python, env, text."""
    import_: Callable[..., Imported]
    export: Callable[..., Exported] | None
    """None where the system has no form to write."""
    recognise: Callable[[Any], Recognised | None]
    """Takes a `document.Document`; None: not this system's."""
    write: Callable[[Any], str]
    """The payload as the text of a file."""
    read: Callable[[Any], Any] | None = None
    """Takes a `document.Document` and returns the payload for `import_`; None: the document's parsed content is it."""
    context: tuple[ContextKey, ...] = ()
    import_all: Callable[..., tuple[Imported, ...]] | None = None
    """As `import_`, for a payload that starts several runs: one `Imported` each, the first being `import_`'s."""
