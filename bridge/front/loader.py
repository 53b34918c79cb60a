"""`load_run`: a `Run` of the Hydra tree of the training script, or of a file that describes a run.

Such a file is one of `docs/showcase`, the ``config.yaml`` of a run folder, the YAML of a Megatron
Bridge `ConfigContainer`, or another that `bridge.read` reads. Overrides are the training script's
in either case. Neither torch nor Megatron Core is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bridge.errors import RunConfigError
from bridge.front.decode import decode_sections, refuse_impossible_sizes
from bridge.front.folders import find_config_folder, find_run_file
from bridge.front.stated_precision import apply_over_recipe, build_stated_precision
from bridge.model.section import SECTION_NAMES, read_section
from bridge.preflight.file_reading import RunChoice
from bridge.preflight.problems import Problems
from bridge.preflight.run import Run, resolve_precision
from bridge.preflight.silence import refuse_unknown_names
from bridge.read.model_sizes import refuse_without_sizes
from bridge.read.run_input import RunInput
from bridge.read.run_keys import PRECISION_KEY, SECTION_CLASSES
from bridge.registry.registry import is_auto
from bridge.rules.facts.near_names import find_near_fields
from bridge.target.declaration import make_target
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
    """Return a run: of a file that describes it, or of the training script's tree of configs.

        run = load_run(config_file="run_config.yaml")
        run = load_run(["mixed_precision=fp8_current", "model.num_layers=32", "target=h100x8"])

    Args:
        overrides: Settings as on the training script's command line:
            ``mixed_precision=bf16_mixed``, ``target=h100x8``. They are written over those of the
            file or the tree.
        config_path: Folder of the Hydra tree; None: what `find_config_folder` finds.
        config_file: A file that describes a run, which is read instead of the tree: what
            `read_file` reads, or a folder with such a file; a relative path is looked up here, then
            in the repository.
        config_name: The tree's primary config, without ``.yaml``.
        config_dir: Another folder, of a team's own groups.
        strict: Refuse a precision that can never be right, a mode that nothing states, and misspelt
            fields of Megatron's. A check, which reports all three, does without.
        trust: Run the Python that `recipes_from` names in `config_file` or in the primary config.
        choice: The run of a `config_file` that has several, and the variables of a script.

    Returns:
        The precision and the sections of the run with the source of each value. `bridge.check`
        reports what is known to go wrong with it, and its `plan` has the format of every GEMM and
        tensor.

    Raises:
        RunConfigError: A file, section, key or override that cannot be used.
        PrecisionConfigError: The precision can never be right.
        UnknownRecipeError: No such recipe.
    """
    if config_file is not None:
        from bridge.front.config_file import read_config_file

        read = read_config_file(find_run_file(config_file), overrides, trust=trust, choice=choice)
        run, problems = make_run(read.given(str(config_file)))
        run = replace(run, reading=read.reading)
    else:
        folder = find_config_folder(config_path)
        run, problems = _compose_tree_run(
            folder, config_name, overrides, config_dir=config_dir, trust=trust
        )
    run = replace(
        run, reading=run.reading.with_target_release(run.target, is_stated=run.states_target)
    )
    refuse_impossible_sizes(run, problems)
    if strict:
        require_plannable(run, problems)
    problems.raise_any()
    return run


def _compose_tree_run(
    folder: Path, name: str, overrides: Sequence[str], *, config_dir: Path | str | None, trust: bool
) -> tuple[Run, Problems]:
    """Return the run of a Hydra tree, its sections decoded, and its problems."""
    from bridge.front.compose import compose  # Hydra is heavy
    from bridge.front.search import Search

    source, _ = compose(Search(str(folder), name, config_dir), overrides, trust=trust)
    run, problems = make_run(source)
    decode_sections(run, SECTION_CLASSES, problems)
    return run, problems


def require_plannable(run: Run, problems: Problems | None = None) -> None:
    """Refuse a run that cannot be planned.

    Those are a mode that nothing states, values of a wrong type, fields that resemble one of
    Megatron's (a model provider's own fields resemble none), sizes that are not stated, and a
    precision that can never be right. So is a model with other layers than a language model's.
    RunConfigError has the `problems` that were found before too.
    """
    problems = problems or Problems(run.origins)
    if run.reading.other_layers is not None:
        raise RunConfigError(str(run.reading.no_plan_reason))
    run.require_mode()
    for key in SECTION_NAMES:
        section = read_section(key, run.section(key))
        for wrong in section.malformed:
            problems.add(wrong.path, wrong.rule, wrong.value, "Correct it")
        if key not in OWNER_FIELD_NAMES:
            continue
        for name, value in section.unknown.items():
            near = find_near_fields(key, name)
            if near:
                problems.unknown(f"{key}.{name}", value, "no such field", near)
    refuse_without_sizes(run.reading, run.model, run.name)
    problems.raise_any()
    if run.precision is not None:
        run.precision.finalize()


def make_run(source: RunInput, *, resolve: bool = True) -> tuple[Run, Problems]:
    """Return a run with its precision stated, and its problems, which are not raised yet.

    Without `resolve` a run with ``mixed_precision=auto`` has no precision.
    """
    stated_target = _get_stated_target(source)
    target = make_target(stated_target)
    source = _resolve_named_recipe(source)
    choice = None
    if is_auto(source.choice) and not resolve:
        source = replace(source, choice=None, sections={**source.sections, PRECISION_KEY: None})
    elif is_auto(source.choice):
        model = source.sections.get("model") or {}
        name, choice = resolve_precision(source.choice, model, target)
        source = apply_over_recipe(source, name)
    problems = Problems(source.origins)
    precision = build_stated_precision(source, problems)
    sections = dict(source.sections)
    sections.pop(PRECISION_KEY, None)
    sections["target"] = stated_target
    _check_sections(sections, problems)
    run = Run(
        precision=precision,
        choice=choice,
        sections=sections,
        target=target,
        origins=source.origins,
        name=source.name,
    )
    return run, problems


def _get_stated_target(source: RunInput) -> str | None:
    """Return the target that a run states, as text."""
    target = source.sections.get("target")
    if target is None:
        return None
    if isinstance(target, list):  # target=[h100x8,te2.8] is what Hydra takes without quotes
        return ",".join(map(str, target))
    return str(target)


def _resolve_named_recipe(source: RunInput) -> RunInput:
    """Return a run with the recipe that its precision names, where no option of a group does."""
    name = source.sections.get(PRECISION_KEY)
    if not isinstance(name, str):
        return source
    source = replace(source, choice=name, sections={**source.sections, PRECISION_KEY: None})
    if is_auto(name):
        return source
    return apply_over_recipe(source, name)


def _check_sections(sections: Mapping[str, Any], problems: Problems) -> None:
    """Note the sections that are no mappings; refuse rules of `silence` that do not exist."""
    for key in dict.fromkeys((*SECTION_NAMES, *SECTION_CLASSES)):
        section = sections.get(key) or {}
        if not isinstance(section, dict):
            problems.add(key, "must be a mapping of fields", section, f"Write {key}.FIELD=VALUE.")
    silence = sections.get("silence") or {}
    if isinstance(silence, Mapping):
        refuse_unknown_names({str(rule): reason for rule, reason in silence.items()})
    else:
        problems.add("silence", "must be a mapping of rules to reasons", silence)
