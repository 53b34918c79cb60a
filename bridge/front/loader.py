"""`load_run` and `container`: the values of a run as every command about one reads them, and the `ConfigContainer`.

They come from the Hydra tree of the training script, or from one YAML file that holds the sections itself: a file of
`docs/showcase`, the ``config.yaml`` of a run folder, or the YAML of a Megatron Bridge `ConfigContainer`. Overrides are
the training script's in either case. Neither torch nor Megatron Core is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bridge
from bridge.errors import PrecisionTypeError, RunConfigError, close_matches, did_you_mean, listed
from bridge.front.decode import decoded_sections, refuse_impossible_sizes
from bridge.model.reads import reads
from bridge.model.section import ROLES, read_section
from bridge.precision.fields import COMMAND_LINE
from bridge.precision.statements import check_value, field_names, mark_recipe, recipe_name, stated_values, with_only
from bridge.preflight.check import Report, check_run, resolve_precision, section_of
from bridge.preflight.file_reading import MEGATRON_BRIDGE, FileReading, RunChoice
from bridge.preflight.origins import NOT_KNOWN, Layer, Origins, leaves
from bridge.preflight.problems import Problems
from bridge.preflight.silence import refuse_unknown
from bridge.read.given_run import GivenRun
from bridge.read.keys import MADE_BY, PRECISION, RUN_KEYS, SECTIONS
from bridge.read.kinds import FILES, file_in, refuse_without_sizes
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY, is_auto
from bridge.rules.near_names import nearest_fields
from bridge.sync.prediction import Prediction, predict
from bridge.target.fields import NAMES
from bridge.target.target import target_of

if TYPE_CHECKING:
    from bridge.plan.precision_plan import PrecisionPlan
    from bridge.preflight.auto import Choice

MODE_SWITCHES = ("model.bf16", "model.fp16", "optimizer.bf16", "optimizer.fp16")
SAME_AS = {
    "model.hybrid_override_pattern": "model.hybrid_layer_pattern",
    "data.vocab_size": "model.vocab_size",
    "data.seq_length": "model.seq_length",
    "ddp.use_custom_fsdp": "ddp.use_megatron_fsdp",
}
"""Setting that has another name of the same meaning -> that name; where one of them is stated, both are known."""
BYTES = 256
"""Vocabulary of text that is tokenised to bytes."""


@dataclass(frozen=True, kw_only=True)
class RunValues:
    """A run's values, each section a mapping with Megatron's field names; an absent value was not given."""

    precision: MixedPrecisionConfig | None = None
    """The precision, with what was stated and by whom; None: the owners keep their own settings."""
    choice: Choice | None = None
    """The choice that ``mixed_precision=auto`` was resolved to."""
    sections: Mapping[str, Any] = field(default_factory=dict)
    """Every other key of the run: the sections, `target`, `silence` and `precision_backend`."""
    problems: Problems = field(default_factory=lambda: Problems(Origins()))
    """The faults found so far; `load_run` has raised them."""
    name: str = "config"
    """The file, or the primary config, that was read."""
    reading: FileReading = field(default_factory=FileReading)
    """What a file says besides its sections: its framework, its release, its environment."""

    def section(self, name: str) -> dict[str, Any]:
        """Return a section's values, none where it is absent; the problems take one that is no mapping."""
        section = self.sections.get(name) or {}
        if isinstance(section, dict):
            return section
        self.problems.add(name, "must be a mapping of fields", section, f"Write {name}.FIELD=VALUE.")
        return {}

    @property
    def model(self) -> dict[str, Any]:
        """The model's values."""
        return self.section("model")

    @property
    def target(self) -> str | None:
        """The declared target; None: none is declared."""
        return self.sections.get("target")

    def origin_of(self, path: str) -> str:
        """Return who set a setting ("model.hidden_size"); "default", "assumed" or "open" where nobody did."""
        if self.weakness(path) is not None:
            is_open = path in self.reading.opened or path in self.reading.open_values
            return "open" if is_open else "assumed"
        origin = self.problems.origins.of(path)
        return "default" if origin == NOT_KNOWN else origin

    @cached_property
    def prediction(self) -> Prediction:
        """The run as the last sync before it leaves it."""
        sections: dict[str, Any] = {name: section_of(self.sections, name) for name in ROLES}
        if self.section("data") and self.run_keys.get("precision_backend") is not None:  # text of our own runs
            sections["data"] = {**sections["data"], "vocab_size": sections["data"].get("vocab_size") or BYTES}
        reading = self.reading
        return predict(
            self.precision,
            sections,
            target=target_of(self.target),
            unplanned=reading.unplanned,
            uncounted=reading.uncounted,
        )

    @cached_property
    def plan(self) -> PrecisionPlan:
        """The precision plan of the run; RunConfigError for a model that cannot be planned."""
        from bridge.plan.precision_plan import plan_of  # most checks do without it

        return plan_of(self.prediction)

    @cached_property
    def report(self) -> Report:
        """The check of the run."""
        return self.checked(self.prediction)

    def checked(self, prediction: Prediction, **options: Any) -> Report:
        """Return the check of the run as it is predicted; `options` are `silenced` and `backend`."""
        return check_run(
            self.sections,
            prediction=prediction,
            origins=self.origin_of,
            choice=self.choice,
            environment=self.reading.environment,
            is_bridge=self.reading.settings_of == MEGATRON_BRIDGE,
            weaknesses=self.weakness if self.has_weaknesses else None,
            mode_decided_by=self.reading.mode_decided_by,
            other_layers=self.reading.other_layers,
            refused=self.reading.refused,
            not_forwarded=self.reading.not_forwarded,
            dropped=self.reading.dropped,
            **options,
        )

    @property
    def has_weaknesses(self) -> bool:
        """Whether values of the run are assumed, or decided when it starts."""
        reading = self.reading
        is_open = reading.unstated_by is not None or bool(reading.open_values) or bool(reading.opened)
        return is_open or reading.mode_decided_by is not None or reading.is_release_assumed

    def weakness(self, path: str) -> str | None:
        """Return what decides a setting where its value is assumed or open; None where it is stated or known."""
        reading = self.reading
        if path == "target.mcore":
            return "the file names no release" if reading.is_release_assumed else None
        origin = self.problems.origins.values.get(path)
        if origin is not None and COMMAND_LINE in origin:
            return None
        if self._is_stated(SAME_AS.get(path, "")):
            return None
        of_the_mode = reading.mode_decided_by
        if of_the_mode is not None:
            of_the_mode = reading.unstated_by or of_the_mode.rstrip(",")
        if path in MODE_SWITCHES:
            is_on = self.model.get("bf16") is True or self.model.get("fp16") is True
            return None if is_on and of_the_mode is None else of_the_mode or reading.unstated_by
        opener = reading.opened.get(path)
        if opener is not None:
            says_the_same = opener.endswith("-size")  # --moe-expert-parallel-size next to --expert-model-parallel-size
            if says_the_same or reading.unplanned is not None or not self._is_stated(path):
                return opener
        if path in reading.open_values:
            return f"the value {reading.open_values[path]}"
        if path in reading.settled_at_start:
            return of_the_mode
        return None if self._is_stated(path) else reading.unstated_by

    def _is_stated(self, path: str) -> bool:
        """Return whether the file or the command line states a value that is known before the run."""
        origin = self.problems.origins.values.get(path)
        is_at_start = any(one.path == path for one in self.reading.derived)
        return origin is not None and not is_at_start and path not in self.reading.open_values

    def rests_on(self, compute: Callable[[], object]) -> dict[str, str]:
        """Return the assumed and open settings that an answer rests on -> what decides each."""
        with reads() as paths:
            compute()
        return self.report.setup.unknown_among(paths)

    def require_strict(self) -> None:
        """Refuse a run that cannot be planned.

        Those are a mode that nothing states, values of a wrong type, fields that resemble one of Megatron's (a model
        provider's own fields resemble none), sizes that are not stated, and a precision that can never be right. So is
        a model with other layers than a language model's.
        """
        if self.reading.other_layers is not None:
            raise RunConfigError(str(self.reading.unplanned))
        self.require_mode()
        sections = {key: read_section(key, self.section(key)) for key in ROLES}
        for section in sections.values():
            for wrong in section.malformed:
                self.problems.add(wrong.path, wrong.rule, wrong.value, "Correct it")
        for key in NAMES:
            for name, value in sections[key].unknown.items():
                near = nearest_fields(key, name)
                if near:
                    self.problems.unknown(f"{key}.{name}", value, "no such field", near)
        refuse_without_sizes(self.reading, self.model, self.name)
        self.problems.raise_any()
        if self.precision is not None:
            self.precision.finalize()

    def require_mode(self) -> None:
        """Raise RunConfigError where nothing states the mode, with what decides it and how to state it."""
        decider = self.reading.mode_decided_by
        if decider is None:
            return
        remedies = "; or ".join(self.ways_to_state_the_mode)
        raise RunConfigError(f"{self.name}: the mode is not stated; {decider} decides. {remedies}.")

    @property
    def ways_to_state_the_mode(self) -> tuple[str, ...]:
        """How to state the mode that a file leaves open, each an imperative clause."""
        reading = self.reading
        ways = ["Add mixed_precision=bf16_mixed, or another recipe", "add model.bf16=true"]
        for number in reading.branches:
            ways.append(f"add --launch {number} ({reading.runs[number - 1]})")
        if reading.variables:
            ways.append(f"add --context variables='{reading.variables[0]}=VALUE'")
        return tuple(ways)

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
    trust: bool = False,
    choice: RunChoice | None = None,
) -> RunValues:
    """Return the values of a run: of a file that describes it, or of the training script's tree of configs.

        run = load_run(config_file="run_config.yaml")
        run = load_run(["mixed_precision=fp8_current", "model.num_layers=32", "target=h100x8"])

    Args:
        overrides: Settings as on the training script's command line: ``mixed_precision=bf16_mixed``,
            ``target=h100x8``. They are written over those of the file or the tree.
        config_path: Folder of the Hydra tree; None: what `config_folder` finds.
        config_file: A file that describes a run, which is read instead of the tree: what `read_file` reads, or a folder
            with such a file; a relative path is looked up here, then in the repository.
        config_name: The tree's primary config, without ``.yaml``.
        config_dir: Another folder, of a team's own groups.
        strict: Refuse a precision that can never be right, a mode that nothing states, and misspelt fields of
            Megatron's. A check, which reports all three, does without.
        trust: Run the Python that `recipes_from` names in `config_file` or in the primary config.
        choice: The run of a `config_file` that has several, and the variables of a script.

    Returns:
        The precision and the sections of the run with the source of each value. `bridge.check` reports what is known to
        go wrong with it, and its `plan` has the format of every GEMM and tensor.

    Raises:
        RunConfigError: A file, section, key or override that cannot be used.
        PrecisionConfigError: The precision can never be right.
        UnknownRecipeError: No such recipe.
    """
    if config_file is not None:
        from bridge.front.config_file import read_config_file

        read = read_config_file(_file(config_file), overrides, trust=trust, choice=choice)
        run = replace(run_of(read.given(str(config_file))), reading=read.reading)
    else:
        run = _run_of_tree(config_folder(config_path), config_name, overrides, config_dir=config_dir, trust=trust)
    run = replace(run, reading=run.reading.released(target_of(run.target), is_stated=run.target is not None))
    refuse_impossible_sizes(run)
    if strict:
        run.require_strict()
    run.problems.raise_any()
    return run


def _run_of_tree(
    folder: Path, name: str, overrides: Sequence[str], *, config_dir: Path | str | None, trust: bool
) -> RunValues:
    from bridge.front.compose import compose  # Hydra is heavy
    from bridge.front.search import Search

    given, _ = compose(Search(str(folder), name, config_dir), overrides, trust=trust)
    run = run_of(given)
    decoded_sections(run, SECTIONS)
    return run


def run_of(given: GivenRun, *, resolve: bool = True) -> RunValues:
    """Return the values of a run as it was read, with its precision stated; its problems are not raised yet.

    Without `resolve` a run with ``mixed_precision=auto`` has no precision.
    """
    target = given.sections.get("target")
    if target is not None:  # target=[h100x8,te2.8] is what Hydra takes without quotes
        target = ",".join(map(str, target)) if isinstance(target, list) else str(target)
    place = target_of(target)
    if isinstance(given.sections.get(PRECISION), str):  # a name that is no option of a group
        given = replace(given, choice=given.sections[PRECISION], sections={**given.sections, PRECISION: None})
        given = given if is_auto(given.choice) else _over_recipe(given, str(given.choice))
    chosen = None
    if is_auto(given.choice) and not resolve:
        given = replace(given, choice=None, sections={**given.sections, PRECISION: None})
    elif is_auto(given.choice):
        name, chosen = resolve_precision(given.choice, given.sections.get("model") or {}, place)
        given = _over_recipe(given, name)
    problems = Problems(given.origins)
    precision = _stated(given, problems)
    sections = {key: value for key, value in given.sections.items() if key != PRECISION} | {"target": target}
    run = RunValues(precision=precision, choice=chosen, sections=sections, problems=problems, name=given.name)
    silence = sections.get("silence") or {}
    if isinstance(silence, Mapping):
        refuse_unknown({str(rule): reason for rule, reason in silence.items()})
    else:
        problems.add("silence", "must be a mapping of rules to reasons", silence)
    return run


def _over_recipe(given: GivenRun, name: str) -> GivenRun:
    """Return the run with a recipe of the registry below what it sets itself."""
    recipe = REGISTRY.get(name)
    own = recipe.to_dict()
    layer = Layer(origin=f"recipe {recipe_name(recipe)}", values=leaves({PRECISION: own}, ""), is_recipe=True)
    sections = {**given.sections, PRECISION: {**own, **(given.sections.get(PRECISION) or {})}}
    origins = given.origins.over(layer, instead_of=PRECISION)
    return replace(given, choice=name, recipe=recipe, sections=sections, origins=origins)


def _stated(given: GivenRun, problems: Problems) -> MixedPrecisionConfig | None:
    """Return the recipe with what other layers set stated over it; None where nothing is chosen or stated.

    The problems take fields that do not exist and values that do not fit.
    """
    fields, origins = given.sections.get(PRECISION), given.origins
    if not fields and given.choice is None:
        return None
    if not isinstance(fields, dict):
        problems.add(PRECISION, "must be a recipe's name or a mapping of fields", fields)
        return None
    config = with_only(given.recipe, fields) if given.recipe is not None else MixedPrecisionConfig()
    layers = _layers_over(config, fields, problems)
    ranked = [origin for origin in dict.fromkeys((*origins.order, *layers)) if origin in layers]
    of_recipe = [origin for origin in ranked if origin in origins.of_recipe]
    for origin in of_recipe:
        config.override(origin, **layers[origin])
    if given.choice is not None and given.recipe is None:
        mark_recipe(config, given.choice)
    for origin in ranked:
        if origin not in of_recipe:
            config.override(origin, **layers[origin])
    saved_as = fields.get(MADE_BY)
    if saved_as is not None:
        own = REGISTRY.get(saved_as).to_dict() if saved_as in REGISTRY else stated_values(config)
        over = [name for name, value in stated_values(config).items() if own.get(name) != value]
        mark_recipe(config, saved_as, over=over)
    return config


def _layers_over(
    config: MixedPrecisionConfig, fields: Mapping[str, Any], problems: Problems
) -> dict[str, dict[str, Any]]:
    """Return origin -> the fields that it set, but for what the recipe itself states."""
    own, origins = config.to_dict(), problems.origins
    layers: dict[str, dict[str, Any]] = {}
    for name, value in fields.items():
        path = f"{PRECISION}.{name}"
        origin = origins.of(path)
        if name == MADE_BY or (name in own and own[name] == value and origin in origins.of_recipe):
            continue
        if name not in field_names(config):
            problems.unknown(path, value, "no such field", field_names(config))
            continue
        try:
            layers.setdefault(origin, {})[name] = check_value(config, name, value)
        except PrecisionTypeError as error:
            for fault in error.faults:
                problems.add(path, fault.rule, fault.value, fault.remedy)
    return layers


def config_folder(given: Path | str | None = None) -> Path:
    """Return the folder of the Hydra tree: `given`, or ``conf`` here, or the one of this package."""
    if given is None:
        return Path("conf").resolve() if Path("conf/config.yaml").is_file() else shipped_folder()
    if os.path.isdir(Path(given)):  # noqa: PTH112  there is no path that is too long
        return Path(given).resolve()
    matches = close_matches(str(given), [path.name for path in Path().iterdir() if path.is_dir()])
    hint = did_you_mean(matches) or "Give the folder that holds config.yaml, or a file with --config."
    raise RunConfigError.of("--config-path", "there is no such folder", str(given), hint, matches)


def _file(given: Path | str) -> Path:
    if not str(given).isprintable():
        rule, remedy = "must be a path of printable characters", "Rename the file."
        raise RunConfigError.of("--config", rule, str(given), remedy)
    path, shipped = Path(given), shipped_folder().parent / given
    if not os.path.exists(path) and os.path.exists(shipped):  # noqa: PTH110  as above
        path = shipped
    if not os.path.isdir(path):  # noqa: PTH112  as above
        return path
    found = file_in(path)
    if found == path:
        rule, remedy = f"holds no {listed(FILES)}", "Give the folder of a run, or a file."
        raise RunConfigError.of("--config", rule, str(path), remedy)
    return found


def shipped_folder() -> Path:
    """Return the Hydra tree that comes with this package: inside it, or next to it in a checkout."""
    package = Path(str(bridge.__file__)).resolve().parent
    installed = package / "conf"
    if installed.is_dir():
        return installed
    return package.parent / "conf"
