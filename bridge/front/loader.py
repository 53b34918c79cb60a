"""`load_run`: the `Run` of a file that describes a run, or of the training script's Hydra tree.

Such a file is a file of `docs/showcase`, the ``config.yaml`` of a run folder, the YAML of a Megatron
Bridge `ConfigContainer`, or another file that `bridge.read` reads. A file and the tree accept the
same overrides as the training script. Neither torch nor Megatron Core is imported.

`make_run` makes the `Run` of both. Its precision is the recipe with the stated fields over it.
It returns the faults of the run too, since one error reports all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bridge.errors import RunConfigError
from bridge.front.container import add_decoding_faults, refuse_impossible_sizes
from bridge.front.folders import find_config_folder, find_run_file
from bridge.front.stated_precision import apply_over_recipe, build_stated_precision
from bridge.model.section import SECTION_NAMES, read_section
from bridge.preflight.file_reading import FileReading
from bridge.preflight.problems import Problems
from bridge.preflight.run import Run, resolve_precision
from bridge.preflight.run_choice import RunChoice
from bridge.preflight.silence import (
    REASONS_REMEDY,
    REASONS_RULE,
    parse_reasons,
    refuse_unknown_names,
)
from bridge.read.model_sizes import refuse_without_sizes
from bridge.read.run_input import RunInput
from bridge.read.run_keys import PRECISION_KEY, SECTION_CLASSES, add_malformed_sections
from bridge.registry.registry import is_auto
from bridge.rules.facts.near_names import find_near_fields
from bridge.target.declaration import format_target_text, make_target
from bridge.target.fields import OWNER_FIELD_NAMES


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
) -> Run:
    """Return the run of a file, or of the training script's tree of configs.

        run = load_run(config_file="run_config.yaml")
        run = load_run(["mixed_precision=fp8_current", "model.num_layers=32", "target=h100x8"])

    Args:
        overrides: Settings as on the training script's command line:
            ``mixed_precision=bf16_mixed``, ``target=h100x8``. They override the settings of the
            file or the tree.
        config_path: Folder of the Hydra tree. None: the folder that `find_config_folder` finds.
        config_file: A file that describes a run, or a folder with such a file. It is read instead
            of the tree. A relative path is looked up here, then in the repository.
        config_name: The tree's primary config, without ``.yaml``.
        config_dir: Another folder, with the groups of a team.
        strict: Whether to refuse a run that cannot be planned. Examples are a precision that is
            wrong in any run, an unstated mode and misspelt fields. A check passes False, because
            its findings report these faults.
        trust: Whether to run the Python that `recipes_from` names in `config_file` or in the
            primary config.
        choice: The run of a `config_file` that has several, and the variables of a script.

    Returns:
        The precision and the sections of the run, with the origin of each value. `bridge.check`
        reports its known faults. Its `plan` has the format of every GEMM and tensor.

    Raises:
        RunConfigError: A file, section, key or override cannot be used.
        PrecisionConfigError: The precision is wrong in any run.
        UnknownRecipeError: There is no such recipe.
    """
    reading = FileReading()
    if config_file is not None:
        from bridge.front.config_file import read_config_file

        file = read_config_file(find_run_file(config_file), overrides, trust=trust, choice=choice)
        run, problems = make_run(file.to_run_input(str(config_file)))
        reading = file.reading
    else:
        folder = find_config_folder(config_path)
        run, problems = _compose_tree_run(
            folder, config_name, overrides, config_dir=config_dir, trust=trust
        )
    reading = reading.with_target_release(run.target, is_stated=run.states_target)
    run = replace(run, reading=reading)
    refuse_impossible_sizes(run, problems)
    if strict:
        require_plannable(run, problems)
    problems.raise_any()
    return run


def _compose_tree_run(
    folder: Path, name: str, overrides: Sequence[str], *, config_dir: Path | str | None, trust: bool
) -> tuple[Run, Problems]:
    """Return the run of a Hydra tree, and its problems. The sections of our classes are decoded."""
    from bridge.front.compose import compose  # Hydra is heavy
    from bridge.front.search import Search

    composition = compose(Search(str(folder), name, config_dir), overrides, trust=trust)
    run, problems = make_run(composition.run_input)
    add_decoding_faults(run, SECTION_CLASSES, problems)
    return run, problems


def require_plannable(run: Run, problems: Problems | None = None) -> None:
    """Refuse a run that cannot be planned.

    Args:
        problems: The faults found before, which are raised together with those found here.

    Raises:
        RunConfigError: The model has other layers than a language model, nothing states the mode,
            a value is of a wrong type, a field is misspelt, or a size is not stated.
        PrecisionConfigError: The precision is wrong in any run.
    """
    problems = problems or Problems(run.origins)
    if run.reading.uncertainty.other_model_kind is not None:
        raise RunConfigError(str(run.reading.uncertainty.no_plan_reason))
    run.require_mode()
    for key in SECTION_NAMES:
        section = read_section(key, run.section(key))
        for wrong in section.malformed:
            problems.add(wrong.path, wrong.rule, wrong.value, "Correct it")
        if key not in OWNER_FIELD_NAMES:
            continue
        for name, value in section.unknown.items():
            near = find_near_fields(key, name)
            # The further fields of a model provider are not similar to Megatron's fields.
            if near:
                problems.add_unknown(f"{key}.{name}", value, "no such field", near)
    refuse_without_sizes(run.reading, run.model, run.name)
    problems.raise_any()
    if run.precision is not None:
        run.precision.finalize()


def make_run(run_input: RunInput, *, resolves_auto: bool = True) -> tuple[Run, Problems]:
    """Return the run of the sections that were read, and its problems, which are not raised yet.

    Args:
        run_input: The sections, the chosen recipe and the origin of each value.
        resolves_auto: Whether ``mixed_precision=auto`` is resolved. If not, such a run has no
            precision.
    """
    stated_target = run_input.sections.get("target")
    if stated_target is not None:
        stated_target = format_target_text(stated_target)
    target = make_target(stated_target)
    run_input = _resolve_named_recipe(run_input)
    choice = None
    if is_auto(run_input.requested_recipe) and not resolves_auto:
        sections = {**run_input.sections, PRECISION_KEY: None}
        run_input = replace(run_input, requested_recipe=None, sections=sections)
    elif is_auto(run_input.requested_recipe):
        model = run_input.sections.get("model") or {}
        name, choice = resolve_precision(run_input.requested_recipe, model, target)
        run_input = apply_over_recipe(run_input, name)
    problems = Problems(run_input.origins)
    precision = build_stated_precision(run_input, problems)
    sections = dict(run_input.sections)
    sections.pop(PRECISION_KEY, None)
    sections["target"] = stated_target
    _add_section_faults(sections, problems)
    run = Run(
        precision=precision,
        choice=choice,
        sections=sections,
        target=target,
        origins=run_input.origins,
        name=run_input.name,
    )
    return run, problems


def _resolve_named_recipe(run_input: RunInput) -> RunInput:
    """Return the sections with the recipe that ``mixed_precision: NAME`` names.

    Hydra resolves an option of its group `mixed_precision` itself. Other sources keep the name.
    """
    name = run_input.sections.get(PRECISION_KEY)
    if not isinstance(name, str):
        return run_input
    sections = {**run_input.sections, PRECISION_KEY: None}
    run_input = replace(run_input, requested_recipe=name, sections=sections)
    if is_auto(name):
        return run_input
    return apply_over_recipe(run_input, name)


def _add_section_faults(sections: Mapping[str, Any], problems: Problems) -> None:
    """Add the faults of sections that are not mappings.

    Raises:
        RunConfigError: `silence` names a rule that does not exist.
    """
    add_malformed_sections(sections, dict.fromkeys((*SECTION_NAMES, *SECTION_CLASSES)), problems)
    silence = sections.get("silence") or {}
    if isinstance(silence, Mapping):
        refuse_unknown_names(parse_reasons(silence))
    else:
        problems.add("silence", REASONS_RULE, silence, REASONS_REMEDY)
