"""`accelerate_launch_args` in a Trainer's file: what fms-hf-tuning starts `accelerate launch` with, before the Trainer.

The launcher's precision counts where neither fp16 nor bf16 is on, and its sharding counts in any case. A file that it
is given is not read.
Source: fms-hf-tuning 0.0.1 tests/build/dummy_job_config.json; accelerate 1.15.0 commands/launch.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bridge.interop.huggingface.model import LOOKS_LIKE_PRECISION

if TYPE_CHECKING:
    from bridge.interop.builders import ImportBuilder
    from bridge.interop.settings import Settings

__all__ = ["LAUNCHER", "launchers_precision", "launchers_sharding", "report_launcher"]

LAUNCHER = "accelerate_launch_args"
PRECISIONS = ("no", "fp16", "bf16", "fp8")
FILES = {
    "config_file": "a file for `accelerate launch`, which is not read, and can set the precision and the sharding",
    "deepspeed_config_file": "DeepSpeed's own file decides with these arguments, and is not read",
}
SHARDING = {
    "use_deepspeed": "the launcher has DeepSpeed keep the weights",
    "use_fsdp": "the launcher has FSDP shard the weights, and accelerate's policy reduces in the compute dtype",
}


def launchers_precision(top: Settings) -> str | None:
    """Return the launcher's precision, None where it is not among its arguments."""
    value = _block(top).get("mixed_precision")
    return value if value in PRECISIONS else None


def launchers_sharding(top: Settings) -> str | None:
    """Return "deepspeed" or "fsdp" where the launcher shards so."""
    block = _block(top)
    return next((name.removeprefix("use_") for name in SHARDING if block.get(name) is True), None)


def report_launcher(builder: ImportBuilder, top: Settings) -> bool:
    """Report the launcher's arguments; return whether a file that is not read may decide the precision."""
    block = _block(top)
    for key, value in block.items():
        name = f"{LAUNCHER}.{key}"
        if value in (None, False):
            builder.map(name) if key in SHARDING else None
        elif key in FILES:
            remedy = f"Convert it by itself, from {'accelerate' if key == 'config_file' else 'deepspeed'}."
            builder.report(name, value, "unsupported", FILES[key], remedy)
        elif key in SHARDING:
            builder.report(name, value, "unsupported", SHARDING[key], "Set it up by hand where you train next.")
        elif LOOKS_LIKE_PRECISION.search(str(key)) and not (key == "mixed_precision" and value in PRECISIONS):
            detail = "an argument of `accelerate launch`"
            builder.report(name, value, "unsupported", detail, "Convert it from accelerate.")
    return any(block.get(key) for key in FILES) and launchers_precision(top) is None


def _block(top: Settings) -> Mapping[Any, Any]:
    block = top.values.get(LAUNCHER)
    return block if isinstance(block, Mapping) else {}
