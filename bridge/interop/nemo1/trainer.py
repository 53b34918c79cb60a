"""NeMo 1.x models that are not Megatron's: speech, BERT on Hugging Face weights, translation.

Their training scripts hand the section `trainer` to Lightning's Trainer as it stands, so that Lightning's own words
count: 16 is torch's autocast under a torch GradScaler (or Apex), not Megatron's scaler of 2**32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bridge.interop.lightning import importer as lightning
from bridge.interop.megatron_lm.flags import bears_on_precision

if TYPE_CHECKING:
    from bridge.interop.builders import ImportBuilder
    from bridge.interop.contract import ImportReport
    from bridge.interop.nemo1.file import File

__all__ = ["trained_by_lightning"]

READ = ("precision", "accelerator", "strategy", "plugins", "amp_backend", "amp_level")
ASSUMED = "no key of a Megatron model is in the file, so Lightning's own mixed precision was read"


def trained_by_lightning(file: File, builder: ImportBuilder) -> ImportReport:
    """Return what Lightning's Trainer makes of the section `trainer`, or of the file where there is none."""
    section = file.payload.get("trainer")
    prefix = "trainer." if isinstance(section, Mapping) else ""
    given: Mapping[Any, Any] = section if isinstance(section, Mapping) else file.payload
    trainer = {str(key): value for key, value in given.items()}
    for key in READ:
        if key in trainer:
            trainer[key] = file.follow(trainer[key], f"{prefix}{key}")
    precision = trainer.get("precision")
    if isinstance(precision, float) and precision.is_integer():
        trainer["precision"] = int(precision)
    for key, value in file.model.items() if prefix and file.model is not file.payload else ():
        if bears_on_precision(str(key)) and value not in (None, False):
            detail = "a setting of the model that no recipe has"
            builder.report(f"model.{key}", value, "unsupported", detail, "Keep it in the model's configuration.")
    builder.report("model", None, "implied default", ASSUMED, "State model.megatron_amp_O2 if it is one of Megatron's.")
    read = lightning.import_({"trainer": trainer} if prefix else trainer)
    return replace(read, unmapped=(*read.unmapped, *builder.finish("fp32").unmapped))
