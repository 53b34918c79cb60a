"""The rows of `foreign/tables/command_lines.yaml`, by which a launch, its system and its precision are known."""

from __future__ import annotations

import re

from bridge.read.foreign.row_files import load_rows

COMMAND_LINE_ROWS = load_rows("command_lines")
STATED_PRECISION_PATTERN = re.compile(COMMAND_LINE_ROWS["stating"])
"""An option that states a mode or a scheme."""
OTHER_PRECISION_OPTIONS = re.compile(COMMAND_LINE_ROWS["other options"])
"""An option that affects precision in a system other than Megatron-LM."""
PRECISION_PATTERN = re.compile(COMMAND_LINE_ROWS["precision"])
"""A piece of a script that affects precision."""
ARGUMENTS_VARIABLE_PATTERN = re.compile(COMMAND_LINE_ROWS["holds arguments"])
"""A part of the name of a variable that holds arguments."""
NON_TRAINING_PROGRAMS = frozenset(COMMAND_LINE_ROWS["quiet"].split())
"""Programs that start no training."""
MEGATRON_ARGUMENTS = frozenset(COMMAND_LINE_ROWS["megatron-lm"].split())
"""Arguments by which a command line of Megatron-LM is known."""
