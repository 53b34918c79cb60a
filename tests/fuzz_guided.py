"""One area of `tests.fuzz` with libFuzzer: inputs that reach new code are kept and changed further.

`python -m tests.fuzz_guided AREA SECONDS SEED MORE KEEP`; `tests.fuzz --guided` calls it for each area. It needs
atheris, which must instrument this package before anything imports it.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

READERS = ["bridge", "yaml", "omegaconf"]
MAX_BYTES = 4096


def guide(name: str, seconds: float, seed: str, more: str, keep: str) -> None:
    """Fuzz an area for some seconds, print its line and its faults, and end the process: 1 where a case failed."""
    from tests.fuzz import Faults, Guard, working_folder
    from tests.fuzz_areas import made, warm

    with working_folder() as folder:
        area = made(name, folder, Path(more) if more else None)
        corpus = (Path(keep) if keep else folder / "kept") / name
        corpus.mkdir(parents=True, exist_ok=True)
        for number, case in enumerate(area.seeds):
            (corpus / f"seed-{number}").write_bytes(case)
        words = folder / "words"
        quoted = ("".join(f"\\x{byte:02x}" for byte in word) for word in area.words if len(word) < 64)
        words.write_text("".join(f'"{word}"\n' for word in quoted))
        guard, faults = Guard(folder), Faults()
        warm(area)
        ends = time.monotonic() + seconds

        def one(case: bytes) -> None:
            faults.examine(guard, area, case)
            if time.monotonic() > ends:
                finish()

        def finish() -> None:
            print(guard.line(area, len(faults.found)), faults, sep="\n", flush=True)  # noqa: T201
            shutil.rmtree(folder)
            os._exit(bool(faults.found))

        limits = [f"-seed={seed}", "-timeout=60", "-rss_limit_mb=0"]
        limits += [f"-max_len={MAX_BYTES}", f"-dict={words}"] if area.words else ["-max_len=100", "-len_control=0"]
        atheris.Setup([sys.argv[0], *limits, str(corpus)], one)
        atheris.Fuzz()


if __name__ == "__main__":
    with atheris.instrument_imports(include=READERS, enable_loader_override=False):
        guide(sys.argv[1], float(sys.argv[2]), *sys.argv[3:])
