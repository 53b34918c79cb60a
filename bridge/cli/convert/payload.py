"""`Payload`: the text that a conversion writes, and its further files."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from bridge.cli.output import write_file


@dataclass(frozen=True, kw_only=True)
class Payload:
    """The result of a conversion as files."""

    text: str = ""
    """The text of the main file. Empty: there is nothing to write."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Name of a further file, next to the main one -> its text."""

    def write(self, path: str) -> None:
        """Write the main file, and the further files next to it.

        Raises:
            RunConfigError: A file cannot be written.
        """
        write_file(path, self.text, "--out")
        for name, content in self.files.items():
            write_file(Path(path).parent / name, content, "--out")

    def print_names(self, path: str, system: str) -> None:
        """Print the names of the written files, or that nothing was written."""
        if not self.text:
            print(
                f"nothing to write: {system} has nothing to say of this precision, "
                f"and {path} is left alone"
            )
            return
        paths = [path]
        for name in self.files:
            paths.append(str(Path(path).parent / name))
        print(f"wrote {', '.join(paths)}")

    def print_text(self, report: TextIO) -> None:
        """Print the main file on standard output, and the further files on `report`."""
        sys.stderr.flush()  # the report on stderr comes before the payload
        main_text = self.text
        if not main_text.endswith("\n"):
            main_text += "\n"
        print(main_text, end="")
        for name, content in self.files.items():
            print(f"{name}, which --out writes too:\n{content}", file=report)
