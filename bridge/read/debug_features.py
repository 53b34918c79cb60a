"""`find_debugger_no_plan_reason`: why the plan does not follow the features of Transformer Engine's debugger.

Megatron Bridge has them in a section of a run, `tensor_inspect`, as a mapping or as the name of a
file. The plan follows those that `bridge.precision.debug_features` knows. Features that log and
save, and change nothing, are left alone.

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

SECTION, FEATURES, ENABLED = "tensor_inspect", "features", "enabled"
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
    """Return a run with a features file of the debugger, in the place of its own.

    Raises:
        RunConfigError: The file cannot be read, or the plan does not follow its features.
    """
    text = strict_yaml.decode_text(strict_yaml.read_bytes(file, error=RunConfigError), file)
    documents = strict_yaml.load_documents(text, file, error=RunConfigError)
    content = documents[0] if documents else None
    if content is None or content == {}:
        written = "an empty file"
        if content is not None:
            written = "{}"
        raise RunConfigError(NO_ENTRY_MESSAGE.format(file=file, content=written), path=file)
    from bridge.precision.debug_features import (  # few runs have a debugger
        ERROR_PATH,
        DebugFeatures,
    )

    try:
        features = DebugFeatures.from_content(content)
    except RunConfigError as error:
        path = error.path.replace(ERROR_PATH, file, 1)
        sentence = str(error).replace(ERROR_PATH, file, 1)
        raise RunConfigError(sentence, path=path, remedy=error.remedy) from None
    unknown = _list_unfollowed_features(features)
    if unknown:
        raise RunConfigError(
            UNFOLLOWED_MESSAGE.format(path=file, names=unknown, remedy=LEAVE_OUT_REMEDY), path=file
        )
    sections = {**run.sections, SECTION: {ENABLED: True, FEATURES: content}}
    return replace(run, sections=sections)


def _list_unfollowed_features(features: DebugFeatures) -> str:
    """Return the features that the plan does not follow, as words; empty where it follows all."""
    from bridge.precision.debug_features import SUPPORTED_FEATURES

    return ", ".join(name for name in features.names if name not in SUPPORTED_FEATURES)


def find_debugger_no_plan_reason(sections: Mapping[str, Any]) -> str | None:
    """Return why a run with a debugger has no plan, as a sentence.

    None where the plan follows its features, or they change no precision.
    """
    section = sections.get(SECTION)
    if not isinstance(section, Mapping) or not section.get(ENABLED):
        return None
    from bridge.precision.debug_features import DebugFeatures  # few runs have a debugger

    content, path = section.get(FEATURES), f"{SECTION}.{FEATURES}"
    if isinstance(content, str) and content:
        return FILE_NOT_FOUND_MESSAGE.format(path=path, file=content, remedy=DISABLE_REMEDY)
    try:
        features = DebugFeatures.from_content(content)
    except RunConfigError as error:
        return f"{error} {DISABLE_REMEDY}"
    unknown = _list_unfollowed_features(features)
    if not unknown:
        return None
    return UNFOLLOWED_MESSAGE.format(path=path, names=unknown, remedy=DISABLE_REMEDY)
