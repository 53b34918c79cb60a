"""`Checkpoint`: the facts of a Hugging Face checkpoint about a run: the model's settings, and the dtype of its weights.

    checkpoint = read_checkpoint("Qwen/Qwen3-8B", path, choice, MEGATRON_BRIDGE)
    sections["model"] |= checkpoint.unstated(sections["model"])

A framework that converts such a checkpoint makes the model's config of the checkpoint's own `config.json`. So its sizes
are not known from the framework's file, and neither are the fields that a bridge sets for one family of models. Where
that `config.json` is at hand, it is read; where it is not, the settings are open.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bridge.errors import PayloadError, RunConfigError, UnreadFileError
from bridge.preflight.run_choice import RunChoice
from bridge.read.framework.hf_config import (
    BridgedModel,
    build_bridged_model,
    list_unknown_fields,
    load_hf_config,
)
from bridge.read.text.repository_files import find_repository_file

CONFIG_FILE = "config.json"
UNNAMED_CHECKPOINT = "the checkpoint"
"""A checkpoint whose name no file states."""
SIZES_READ_FROM_FILE = "{name}: {file} decides the model's sizes, by {bridge}."
CONFIG_NOT_FOLLOWED = "{file}: {why}; the sizes of the model are not known from it."
HUB_CACHE_VARIABLE = "HF_HUB_CACHE"
"""Variable with the folder of downloaded checkpoints; HF_HOME has that folder in it."""
DEFAULT_HF_HOME = Path("~/.cache/huggingface")
HOME_VARIABLES = ("${HOME}", "$HOME")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint of Hugging Face, and the model in it."""

    source: str
    """What decides the model's settings, as a noun: "config.json of Qwen/Qwen3-8B"."""
    model: BridgedModel = field(default_factory=BridgedModel)
    """The model of its `config.json`; one without fields where that is not at hand, or not followed."""
    bridge: str = ""
    """The bridge that makes the model."""
    read_too: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    """As in `FileReading`."""
    not_followed: str | None = None
    """As in `FileReading`."""

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Parts that bear on the bytes and are not counted, as in `FileReading`."""
        if self.model.other_parts is None:
            return ()
        return (self.source,)

    def get_unstated_fields(self, section: Mapping[str, object]) -> dict[str, object]:
        """Return the model's fields that a section does not state."""
        return {name: value for name, value in self.model.fields.items() if name not in section}

    def get_origin(self, name: str) -> str:
        """Return what sets a field of the model: `config.json`, or the bridge that reads it."""
        if name in self.model.set_by_bridge:
            return self.bridge
        return self.source

    def opened(self, section: Mapping[str, object], known: Collection[str] = ()) -> dict[str, str]:
        """Return each setting that the checkpoint decides and whose value is not known -> the checkpoint.

        Args:
            section: The fields of the model that are known.
            known: Other fields, whose values the framework sets itself.
        """
        opened = {}
        for name in list_unknown_fields(is_read=bool(self.model.fields)):
            if name not in section and name not in known:
                opened[f"model.{name}"] = self.source
        return opened


def read_checkpoint(
    name: object,
    path: Path,
    choice: RunChoice,
    bridge: str,
    overrides: Mapping[str, object] | None = None,
) -> Checkpoint:
    """Return what is known of the checkpoint that a run starts from.

    Args:
        name: Its name or path in the framework's file; None where the file states none.
        path: The framework's file, from whose folder a relative path is looked up too.
        choice: The folder of the checkpoint that the command line states is in it.
        bridge: The bridge that makes the model.
        overrides: Keys that the framework writes over those of `config.json`.

    Raises:
        RunConfigError: The stated folder has no `config.json`.
        UnreadFileError: The file cannot be read.
    """
    shown = UNNAMED_CHECKPOINT
    if name:
        shown = str(name)
    source = f"{CONFIG_FILE} of {shown}"
    file = _resolve_stated_config(choice.checkpoint) or _find_local_config(shown, path)
    if file is None:
        return Checkpoint(source=source, bridge=bridge)
    try:
        config = load_hf_config(file)
    except PayloadError as error:
        raise UnreadFileError(str(error)) from None
    model = build_bridged_model({**config, **(overrides or {})}, bridge)
    unknown = []
    read_too = []
    not_followed = None
    if model.unread is not None:
        not_followed = CONFIG_NOT_FOLLOWED.format(file=file, why=model.unread)
        unknown.append(not_followed)
    else:
        read_too.append(SIZES_READ_FROM_FILE.format(name=shown, file=file, bridge=bridge))
    if model.other_parts is not None:
        unknown.append(f"{file}, {model.other_parts}")
    return Checkpoint(
        source=source,
        model=model,
        bridge=bridge,
        read_too=tuple(read_too),
        unknown=tuple(unknown),
        not_followed=not_followed,
    )


def _resolve_stated_config(folder: str | None) -> Path | None:
    """Return the `config.json` that the command line states; None where it states none."""
    if folder is None:
        return None
    file = Path(folder).expanduser()
    if file.suffix != ".json":
        file /= CONFIG_FILE
    if not file.is_file():
        rule = f"must be a folder with a {CONFIG_FILE}"
        remedy = "Give the folder of the checkpoint."
        raise RunConfigError.of("--context checkpoint", rule, folder, remedy)
    return file


def _find_local_config(name: str, path: Path) -> Path | None:
    """Return the `config.json` of a checkpoint; None where it is not at hand."""
    for variable in HOME_VARIABLES:
        if name.startswith(f"{variable}/"):
            name = f"~{name.removeprefix(variable)}"
    local = find_repository_file(f"{Path(name).expanduser()}/{CONFIG_FILE}", path)
    return local or _find_downloaded_config(name)


def _find_downloaded_config(name: str) -> Path | None:
    """Return the `config.json` of a checkpoint that was downloaded from Hugging Face; None where it was not."""
    if name.count("/") != 1 or name.startswith((".", "~", "$", "/")):
        return None
    home = Path(os.environ.get("HF_HOME", DEFAULT_HF_HOME)).expanduser()
    hub = Path(os.environ.get(HUB_CACHE_VARIABLE, home / "hub")).expanduser()
    snapshots = hub / f"models--{name.replace('/', '--')}" / "snapshots"
    config_files = sorted(snapshots.glob(f"*/{CONFIG_FILE}"), key=lambda file: file.stat().st_mtime)
    return config_files[-1] if config_files else None
