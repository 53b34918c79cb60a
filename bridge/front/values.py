"""The values of a run as plain mappings: what a check, a plan or a calculator reads. No torch, no Megatron Core.

They come from the Hydra tree of the training script, or from one YAML file that holds the sections itself: a file of
`docs/showcase`, the ``config.yaml`` of a run folder, or the YAML of a Megatron Bridge `ConfigContainer`. Overrides are
the training script's in either case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.errors import RunConfigError
from bridge.front.compose import composed
from bridge.front.config_file import read_config_file
from bridge.front.container import precision_of
from bridge.front.origin import COMMAND_LINE
from bridge.front.plain import plain
from bridge.front.problems import Problems
from bridge.front.search import Search
from bridge.precision.auto import is_auto
from bridge.preflight.auto import count_parameters, resolve_auto
from bridge.preflight.section import read_section
from bridge.preflight.target import parse_target
from bridge.registry.registry import REGISTRY
from bridge.rules.field_names import NAMES
from bridge.rules.topics.names import nearest_fields

if TYPE_CHECKING:
    from bridge.front.origin import Origins
    from bridge.registry.config import MixedPrecisionConfig

__all__ = ["Values", "config_folder", "load_values"]

CONF = Path(__file__).resolve().parents[2] / "conf"
"""The tree of the training script, where the repository is."""
SECTIONS = ("model", "optimizer", "ddp", "train", "data")
TARGET = "target"


@dataclass(frozen=True, kw_only=True)
class Values:
    """A run's values, each section a mapping with Megatron's field names; what was not given is not there."""

    precision: MixedPrecisionConfig | None
    """The precision, with what was stated and by whom; None: the owners keep their own settings."""
    model: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None
    """The machine as the file or ``target=...`` spells it; None: not said."""
    origin_of: Callable[[str], str] = lambda _: "configuration"
    """Dotted key ("model.hidden_size") -> who set it."""
    name: str = "config"
    """The file, or the primary config, that was read."""


def load_values(
    overrides: Sequence[str] = (),
    config_path: Path | str | None = None,
    config_file: Path | str | None = None,
    *,
    config_name: str = "config",
) -> Values:
    """Return the values that a command line describes.

    Args:
        overrides: As for the training script, ``mixed_precision=bf16_mixed`` say; ``target=...`` too.
        config_path: Folder of the Hydra tree; None: what `config_folder` finds.
        config_file: A YAML file with the sections themselves, which is read instead of the tree; a relative path is
            looked up here, then in the repository.
        config_name: The tree's primary config, without ``.yaml``.

    Raises:
        RunConfigError: A file, section, key or override that cannot be used.
        PrecisionConfigError: The precision can never be right.
        UnknownRecipeError: No such recipe.
    """
    target, words = _target(overrides)
    if config_file is not None:
        whole, origins, choice = read_config_file(_located(Path(config_file)), words)
        return _values(whole, origins, choice, target=target, name=str(config_file))
    search = Search(main=str(config_folder(config_path)), config_name=config_name)
    with composed(search, words) as composition:
        composition.check()
        whole = plain(composition.config, composition.origins, missing=True)
        return _values(whole, composition.origins, composition.choice, target=target, name=config_name)


def config_folder(given: Path | str | None = None) -> Path:
    """Return the folder of the Hydra tree: `given`, or ``conf`` here, or the one of the repository.

    Raises:
        RunConfigError: There is none.
    """
    found = [Path(given)] if given is not None else [Path("conf"), CONF]
    for folder in found:
        if folder.is_dir():
            return folder.resolve()
    raise RunConfigError(
        f"--config-path: there is no such folder, got {str(found[0])!r}. Give the folder of the training script's "
        "configs, or a file with --config."
    )


def _located(path: Path) -> Path:
    """Return a file that is here or else in the repository; the path as it is where there is none."""
    shipped = CONF.parent / path
    return shipped if not path.exists() and shipped.is_file() else path


def _target(overrides: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return what ``target=`` says, which the training script does not know, and the other overrides."""
    said = [word.partition("=")[2] for word in overrides if word.startswith(f"{TARGET}=")]
    return (said[-1] if said else None), [word for word in overrides if not word.startswith(f"{TARGET}=")]


def _values(whole: Mapping[str, Any], origins: Origins, choice: str | None, *, target: str | None, name: str) -> Values:
    problems = Problems(origins)
    said = whole.get(TARGET) if target is None else target
    if is_auto(choice):
        precision: MixedPrecisionConfig | None = _chosen(whole, str(choice), origins, said)
    else:
        precision = precision_of(whole, choice, problems, origins)
    sections = {key: whole.get(key) or {} for key in SECTIONS}
    for key, section in sections.items():
        if not isinstance(section, Mapping):
            problems.add(key, f"must be a mapping of fields, got {section!r}. Write {key}.FIELD=VALUE.", section)
            continue
        for field_name in read_section(key, section).unknown if key in NAMES else ():
            near = nearest_fields(key, field_name)
            if near:  # what a provider has of its own looks like none of Megatron's
                problems.unknown(f"{key}.{field_name}", section[field_name], "no such field", near)
    problems.raise_any()
    if precision is not None:
        precision.finalize()
    return Values(
        precision=precision,
        **sections,
        target=said,
        origin_of=lambda path: COMMAND_LINE if path == TARGET and target is not None else origins.of(path),
        name=name,
    )


def _chosen(whole: Mapping[str, Any], request: str, origins: Origins, target: Any) -> MixedPrecisionConfig:
    """Return the recipe that ``mixed_precision=auto`` comes to on the declared target, with what is stated beside it.

    Raises:
        RunConfigError: No target is declared: who asks here may not be where the run will be.
    """
    if target is None:
        raise RunConfigError(
            f"mixed_precision: the GPU decides what it is, got {request!r} and no target. Add target=h100x8, say, or "
            "name a recipe."
        )
    model = whole.get("model") or {}
    made = resolve_auto(request, target=parse_target(str(target)), parameters=count_parameters(model))
    config = REGISTRY.get(made.recipe)
    for name, value in (whole.get("mixed_precision") or {}).items():
        stated = type(config).from_dict({name: value}).to_dict()
        config.state(origins.of(f"mixed_precision.{name}"), **stated)
    return config
