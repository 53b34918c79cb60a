"""Runs on NPUs of Ascend, for which MindSpeed changes Megatron Core."""

from __future__ import annotations

from collections.abc import Iterable

NPU_VARIABLES = ("HCCL_", "ASCEND_", "PYTORCH_NPU_")
"""Beginnings of the names of variables that the libraries of NPUs of Ascend alone read."""
NPU_CHANGES = (
    "MindSpeed changes Megatron Core for NPUs of Ascend. Its changes are not read, and no "
    "target has such a device."
)


def find_npu_variable(names: Iterable[str]) -> str | None:
    """Return the first name of a variable that NPUs alone read; None without such a name."""
    for name in names:
        if name.startswith(NPU_VARIABLES):
            return name
    return None
