"""`find_debugger_no_plan_reason`: why a run with Transformer Engine's debugger has no plan.

The debugger has features that change the precision of layers. Megatron Bridge takes them in the
section `tensor_inspect` of a run, as a mapping or as the name of a file. The plan applies those
that `bridge.precision.debug_features` knows. With any other such feature there is no plan. Features
that only log or save are ignored.

Source: Megatron Bridge 0.6.2 training/config.py, TensorInspectConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bridge.errors import RunConfigError
from bridge.precision import strict_yaml

if TYPE_CHECKING:
    from bridge.precision.debug_features import DebugFeatures
    from bridge.preflight.run import Run

SECTION = "tensor_inspect"
FEATURES = "features"
ENABLED = "enabled"
FILE_NOT_FOUND_MESSAGE = (
    "{path} names {file}, which is not found; "
    "the layers whose precision it changes are not known. {remedy}"
)
UNFOLLOWED_MESSAGE = (
    "{path}: {names} changes the precision of layers, and the plan does not follow it. {remedy}"
)
LEAVE_OUT_REMEDY = "Leave the feature out of the file to plan the run without it."
NO_ENTRY_MESSAGE = (
    "{file}: must have an entry that is on, got {content}; nvdlfw-inspect 0.2.2 raises an error. "
    "Write an entry, or leave out --debug-features."
)
DISABLE_REMEDY = f"Set {SECTION}.{ENABLED}=false to plan the run without it."


def replace_debug_features(run: Run, file: str) -> Run:
    """Return a run with the debugger's features of a file, instead of those that it states.

    Args:
        file: The features file, as `--debug-features` names it.

    Raises:
        RunConfigError: The file cannot be read, or the plan does not follow its features.
    """
    text = strict_yaml.decode_text(strict_yaml.read_bytes(file, error=RunConfigError), file)
    documents = strict_yaml.load_documents(text, file, error=RunConfigError)
    content = documents[0] if documents else None
    if content is None or content == {}:
        shown_content = "an empty file"
        if content is not None:
            shown_content = "{}"
        raise RunConfigError(NO_ENTRY_MESSAGE.format(file=file, content=shown_content), path=file)
    features = _parse_features_file(content, file)
    unfollowed = _format_unfollowed_features(features)
    if unfollowed:
        sentence = UNFOLLOWED_MESSAGE.format(path=file, names=unfollowed, remedy=LEAVE_OUT_REMEDY)
        raise RunConfigError(sentence, path=file)
    sections = {**run.sections, SECTION: {ENABLED: True, FEATURES: content}}
    return replace(run, sections=sections)


def _parse_features_file(content: object, file: str) -> DebugFeatures:
    """Return the features of a file.

    Raises:
        RunConfigError: The content is wrong. The message names the file instead of the section.
    """
    from bridge.precision.debug_features import (  # few runs have a debugger
        ERROR_PATH,
        DebugFeatures,
    )

    try:
        return DebugFeatures.from_content(content)
    except RunConfigError as error:
        path = error.path.replace(ERROR_PATH, file, 1)
        sentence = str(error).replace(ERROR_PATH, file, 1)
        raise RunConfigError(sentence, path=path, remedy=error.remedy) from None


def _format_unfollowed_features(features: DebugFeatures) -> str:
    """Return the names of the features that the plan does not follow; empty if it follows all."""
    from bridge.precision.debug_features import SUPPORTED_FEATURES

    return ", ".join(name for name in features.names if name not in SUPPORTED_FEATURES)


def find_debugger_no_plan_reason(sections: Mapping[str, Any]) -> str | None:
    """Return why a run with a debugger has no plan, as a sentence.

    Args:
        sections: The sections of the run.

    Returns:
        None if the run has no debugger, or only features that the plan follows or that change no
        precision.
    """
    section = sections.get(SECTION)
    if not isinstance(section, Mapping) or not section.get(ENABLED):
        return None
    from bridge.precision.debug_features import DebugFeatures  # few runs have a debugger

    content = section.get(FEATURES)
    path = f"{SECTION}.{FEATURES}"
    if isinstance(content, str) and content:
        return FILE_NOT_FOUND_MESSAGE.format(path=path, file=content, remedy=DISABLE_REMEDY)
    try:
        features = DebugFeatures.from_content(content)
    except RunConfigError as error:
        return f"{error} {DISABLE_REMEDY}"
    unfollowed = _format_unfollowed_features(features)
    if not unfollowed:
        return None
    return UNFOLLOWED_MESSAGE.format(path=path, names=unfollowed, remedy=DISABLE_REMEDY)
