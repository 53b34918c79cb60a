"""The golden values of Megatron-LM's functional tests: losses of a run that a later one must repeat.

    {"lm loss": {"start_step": 1, "end_step": 50, "step_interval": 5, "values": {"1": 11.0, ...}}}

They are TensorBoard's values at single steps, and "nan" stands for a step without a value. The
arguments of the run are those in the `model_config.yaml` of the same folder.

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
CONFIG_FILE = "model_config.yaml"
ARGUMENTS_KEY = "MODEL_ARGS"
ABSENT_VALUE = "nan"
"""Word for a step without a value; a loss that was NaN is a word too, and fails the test."""


def is_of(content: object) -> bool:
    """Return whether parsed JSON is golden values of a training run."""
    if not isinstance(content, dict) or not content:
        return False
    for metric in content.values():
        if not isinstance(metric, dict) or not isinstance(metric.get("values"), dict):
            return False
    return True


def read(content: Mapping[str, Any], path: Path) -> RunLog:
    """Return the run of golden values.

    Raises:
        UnreadFileError: There are none of a training loss.
    """
    series: dict[str, dict[int, float]] = {}
    for name, metric in content.items():
        values: dict[int, float] = {}
        for word, cell in metric["values"].items():
            step, value = parse_step(word), parse_number(cell)
            if step is not None and value is not None and cell != ABSENT_VALUE:
                values[step] = value
        series[name] = values
    config = path.parent / CONFIG_FILE
    arguments = _read_arguments(config)
    described_by = None
    if arguments:
        described_by = config
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
    """Return the arguments of a test's run by name; empty where the file does not stand there."""
    if not config.is_file():
        return {}
    content = strict_yaml.read_bytes(config, error=UnreadFileError)
    text = strict_yaml.decode_text(content, str(config), error=UnreadFileError)
    documents = strict_yaml.load_documents(text, str(config), error=UnreadFileError)
    if not documents or not isinstance(documents[0], dict):
        return {}
    group = documents[0].get(ARGUMENTS_KEY)
    if not isinstance(group, dict):
        return {}
    arguments = {}
    for flag, value in group.items():
        arguments[str(flag).lstrip("-").replace("-", "_")] = value
    return arguments
