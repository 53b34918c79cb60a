"""The golden values of Megatron-LM's functional tests: losses that a later run has to repeat.

    {"lm loss": {"start_step": 1, "end_step": 50, "step_interval": 5, "values": {"1": 11.0, ...}}}

A file has the values of TensorBoard's metrics at some steps. The text "nan" is a step without a
value. The `model_config.yaml` in the same folder has the arguments of the run.

Source: Megatron-LM d98e8a64 tests/functional_tests/python_test_utils/common.py GoldenValueMetric.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge.errors import UnreadFileError
from bridge.precision import strict_yaml
from bridge.read.logs.series import make_run_log, parse_number, parse_step
from bridge.runtime.audit.run_log import RunLog

SOURCE = "a file of golden values"
FILE_PATTERN = "golden_values*.json"
"""A folder has a file for each environment, `golden_values_dev_dgx_h100.json` for example."""
CONFIG_FILE = "model_config.yaml"
ARGUMENTS_KEY = "MODEL_ARGS"
ABSENT_VALUE = "nan"
"""The text for a step without a value. It never means NaN: such a loss would fail the test."""


def list_files(folder: Path) -> list[Path]:
    """Return the files of golden values in a folder, without the reports written next to them."""
    files = []
    for file in sorted(folder.glob(FILE_PATTERN)):
        if "." not in file.stem:
            files.append(file)
    return files


def is_of(content: object) -> bool:
    """Return whether parsed JSON has the form of golden values."""
    if not isinstance(content, dict) or not content:
        return False
    for metric in content.values():
        if not isinstance(metric, dict) or not isinstance(metric.get("values"), dict):
            return False
    return True


def read(content: Mapping[str, Any], path: Path) -> RunLog:
    """Return the run of golden values.

    Args:
        content: The parsed JSON, for which `is_of` is True.
        path: The file.

    Raises:
        UnreadFileError: The file has no values of a training loss.
    """
    series: dict[str, dict[int, float]] = {}
    for name, metric in content.items():
        values: dict[int, float] = {}
        for step_text, cell in metric["values"].items():
            step = parse_step(step_text)
            value = parse_number(cell)
            if step is not None and value is not None and cell != ABSENT_VALUE:
                values[step] = value
        series[name] = values
    config = path.parent / CONFIG_FILE
    arguments = _read_arguments(config)
    described_by = config if arguments else None
    train_iters = arguments.get("train_iters")
    if not isinstance(train_iters, int):
        train_iters = None
    return make_run_log(
        series,
        path=path,
        source=SOURCE,
        train_iters=train_iters,
        arguments=arguments,
        described_by=described_by,
    )


def _read_arguments(config: Path) -> dict[str, Any]:
    """Return name of an argument of the run -> its value. Empty if the file does not exist."""
    if not config.is_file():
        return {}
    content = strict_yaml.read_bytes(config, error=UnreadFileError)
    config_yaml = strict_yaml.decode_text(content, str(config), error=UnreadFileError)
    documents = strict_yaml.load_documents(config_yaml, str(config), error=UnreadFileError)
    if not documents or not isinstance(documents[0], dict):
        return {}
    group = documents[0].get(ARGUMENTS_KEY)
    if not isinstance(group, dict):
        return {}
    arguments = {}
    for flag, value in group.items():
        arguments[str(flag).lstrip("-").replace("-", "_")] = value
    return arguments
