"""`load_run`: the values of a run, as the training script and every command about a run read them.

They come from the Hydra tree of the training script, or from one YAML file that holds the sections itself: a file of
`docs/showcase`, the ``config.yaml`` of a run folder, or the YAML of a Megatron Bridge `ConfigContainer`. Overrides are
the training script's in either case. Neither torch nor Megatron Core is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bridge
from bridge.errors import RunConfigError, close_matches, did_you_mean
from bridge.front.compose import Composition, Search, composed
from bridge.front.config_file import read_config_file
from bridge.front.decode import decode_fields
from bridge.front.origin import Origins
from bridge.front.plain import plain
from bridge.front.precision import PRECISION, resolved, stated_precision
from bridge.front.problems import Problems
from bridge.front.sanity import require_sane_model
from bridge.front.sections import OWNERS, RUN_KEYS, SECTIONS
from bridge.precision.auto import is_auto
from bridge.preflight.section import read_section
from bridge.rules.fields import NAMES
from bridge.rules.topics.names import nearest_fields

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bridge.preflight.auto import Choice
    from bridge.registry.config import MixedPrecisionConfig

__all__ = ["RunValues", "config_folder", "load_run", "run_of", "shipped_folder"]


@dataclass(frozen=True, kw_only=True)
class RunValues:
    """A run's values, each section a mapping with Megatron's field names; an absent value was not given."""

    precision: MixedPrecisionConfig | None = None
    """The precision, with what was stated and by whom; None: the owners keep their own settings."""
    choice: Choice | None = None
    """The choice that ``mixed_precision=auto`` was resolved to."""
    request: str | None = None
    """A request for a choice that is still to be made: where the run is only listed, or one of a sweep."""
    sections: Mapping[str, Any] = field(default_factory=dict)
    """Every other key of the run: the sections, `target`, `silence` and `precision_backend`."""
    problems: Problems = field(default_factory=lambda: Problems(Origins()))
    """The faults found so far; `load_run` has raised them."""
    name: str = "config"
    """The file, or the primary config, that was read."""

    def section(self, name: str) -> Mapping[str, Any]:
        """Return a section's values, none where it is absent."""
        return self.sections.get(name) or {}

    @property
    def model(self) -> Mapping[str, Any]:
        """The model's values."""
        return self.section("model")

    @property
    def optimizer(self) -> Mapping[str, Any]:
        """The optimizer's values."""
        return self.section("optimizer")

    @property
    def ddp(self) -> Mapping[str, Any]:
        """The DDP config's values."""
        return self.section("ddp")

    @property
    def train(self) -> Mapping[str, Any]:
        """The training section's values."""
        return self.section("train")

    @property
    def data(self) -> Mapping[str, Any]:
        """The data section's values."""
        return self.section("data")

    @property
    def target(self) -> str | None:
        """The declared target; None: none is declared."""
        return self.sections.get("target")

    @property
    def origin_of(self) -> Callable[[str], str]:
        """Dotted key ("model.hidden_size") -> who set it."""
        return self.problems.origins.of

    @property
    def run_keys(self) -> dict[str, Any]:
        """The keys that are set and no sections."""
        return {key: self.sections[key] for key in RUN_KEYS if self.sections.get(key) is not None}


def load_run(
    overrides: Sequence[str] = (),
    config_path: Path | str | None = None,
    config_file: Path | str | None = None,
    *,
    config_name: str = "config",
    config_dir: Path | str | None = None,
    strict: bool = True,
) -> RunValues:
    """Return the values that a command line describes.

    Args:
        overrides: As for the training script, ``mixed_precision=bf16_mixed`` or ``target=h100x8`` say.
        config_path: Folder of the Hydra tree; None: what `config_folder` finds.
        config_file: A YAML file with the sections themselves, which is read instead of the tree; a relative path is
            looked up here, then in the repository.
        config_name: The tree's primary config, without ``.yaml``.
        config_dir: Another folder, of a team's own groups.
        strict: Refuse a precision that can never be right and misspelt fields of Megatron's. A check, which reports
            both as findings, does without.

    Raises:
        RunConfigError: A file, section, key or override that cannot be used.
        PrecisionConfigError: The precision can never be right.
        UnknownRecipeError: No such recipe.
    """
    if config_file is not None:
        read = read_config_file(_located(Path(config_file)), overrides)
        run = _run(read.whole, read.choice, read.recipe, read.origins, name=str(config_file))
    else:
        extra = Path(config_dir) if config_dir is not None else None
        search = Search(main=str(config_folder(config_path)), extra=extra, config_name=config_name)
        with composed(search, overrides) as composition:
            run = run_of(composition, name=config_name)
        decoded_sections(run, SECTIONS)
    if strict:
        _refuse_misspelt(run)
    run.problems.raise_any()
    if strict and run.precision is not None:
        run.precision.finalize()
    return run


def run_of(
    composition: Composition | Mapping[str, Any], *, name: str = "config", resolve: bool = True, missing: bool = True
) -> RunValues:
    """Return the values of a composed config, or of plain data in the same sections; its problems are not raised yet.

    Args:
        composition: A composed config, or plain data.
        name: A name for it.
        resolve: Resolve ``mixed_precision=auto`` for the declared target, or else for this machine.
        missing: Leave missing values (``???``) out instead of refusing them.
    """
    if isinstance(composition, Composition):
        values = plain(composition.config, composition.origins, missing=missing)
        choice, recipe, origins = composition.choice, composition.recipe, composition.origins
        return _run(values, choice, recipe, origins, name=name, resolve=resolve)
    return _run(plain(composition, Origins(), missing=missing), None, None, Origins(), name=name, resolve=resolve)


def decoded_sections(
    run: RunValues, classes: Mapping[str, type[Any]], functions: Mapping[str, Any] | None = None
) -> dict[str, dict[str, Any]]:
    """Return the constructor arguments of each section's class; the run's problems take what does not fit."""
    return {
        name: decode_fields(_mapping(run, name), owner, section=name, problems=run.problems, functions=functions)
        for name, owner in classes.items()
    }


def config_folder(given: Path | str | None = None) -> Path:
    """Return the folder of the Hydra tree: `given`, or ``conf`` here, or the one of this package.

    Raises:
        RunConfigError: There is none.
    """
    if given is None:
        return Path("conf").resolve() if Path("conf/config.yaml").is_file() else shipped_folder()
    if Path(given).is_dir():
        return Path(given).resolve()
    matches = close_matches(str(given), [path.name for path in Path().iterdir() if path.is_dir()])
    hint = did_you_mean(matches) or "Give the folder that holds config.yaml, or a file with --config."
    raise RunConfigError.of("--config-path", "there is no such folder", str(given), hint, matches)


def shipped_folder() -> Path:
    """Return the Hydra tree that comes with this package."""
    return (Path(str(bridge.__file__)).parent / "conf").resolve()


def _located(path: Path) -> Path:
    """Return a file that is here or else in the repository; the path as it is where there is none."""
    shipped = shipped_folder().parent / path
    return shipped if not path.exists() and shipped.is_file() else path


def _run(
    values: Mapping[str, Any],
    choice: str | None,
    recipe: MixedPrecisionConfig | None,
    origins: Origins,
    *,
    name: str,
    resolve: bool = True,
) -> RunValues:
    """Return the run that plain values describe."""
    values = dict(values)
    if isinstance(values.get("target"), list):  # target=[h100x8,te2.8], which Hydra takes without quotes
        values["target"] = ",".join(map(str, values["target"]))
    elif values.get("target") is not None:
        values["target"] = str(values["target"])
    made, request = None, None
    if not resolve and is_auto(choice or values.get(PRECISION)):
        choice, request = None, choice or values[PRECISION]
        values.pop(PRECISION, None)
    else:
        values, choice, recipe, origins, made = resolved(values, choice, recipe, origins)
    problems = Problems(origins)
    precision = stated_precision(values.pop(PRECISION, None), choice, recipe, problems)
    if not isinstance(values.get("silence") or {}, Mapping):
        problems.add("silence", "must be a mapping of rules to reasons", values["silence"])
    run = RunValues(precision=precision, choice=made, request=request, sections=values, problems=problems, name=name)
    if isinstance(run.model, dict):
        require_sane_model(run.model, problems)
    return run


def _mapping(run: RunValues, name: str) -> dict[str, Any]:
    """Return a section that has to be a mapping; the run's problems take one that is none."""
    section = run.sections.get(name) or {}
    if isinstance(section, dict):
        return section
    run.problems.add(name, "must be a mapping of fields", section, f"Write {name}.FIELD=VALUE.")
    return {}


def _refuse_misspelt(run: RunValues) -> None:
    """Refuse fields that resemble one of Megatron's; a model provider's own fields resemble none."""
    for key in OWNERS:
        section = _mapping(run, key)
        for name in read_section(key, section).unknown if key in NAMES else ():
            near = nearest_fields(key, name)
            if near:
                run.problems.unknown(f"{key}.{name}", section[name], "no such field", near)
