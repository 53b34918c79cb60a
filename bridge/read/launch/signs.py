"""The words of `rows/command_lines.yaml`: by them a launch, its system and its precision are known."""

from __future__ import annotations

import re

from bridge.read.foreign.row_files import rows

ROWS = rows("command_lines")
STATING = re.compile(ROWS["stating"])
"""An option that states a mode or a scheme."""
OTHER_OPTIONS = re.compile(ROWS["other options"])
"""An option that bears on precision in a system other than Megatron-LM."""
PRECISION_WORDS = re.compile(ROWS["precision"])
"""A piece of a script that bears on precision."""
HOLDS_ARGUMENTS = re.compile(ROWS["holds arguments"])
"""In the name of a variable that holds arguments."""
QUIET = frozenset(ROWS["quiet"].split())
"""Programs that start no training."""
MEGATRON_ARGUMENTS = frozenset(ROWS["megatron-lm"].split())
"""Arguments by which a command line of Megatron-LM is known."""
