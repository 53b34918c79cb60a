"""Train the same model on the same data with several recipes and compare the losses.

    python scripts/compare.py bf16_mixed fp8_current mxfp8
    python scripts/compare.py bf16_mixed "fp8_delayed mixed_precision.fp8_margin=8" --out comparison -- train=smoke

Each recipe is one run of scripts/train.py, with the overrides after it in the same word and those after ``--``. The
first is the reference. Prints a table, and writes it as ``comparison.json`` and ``comparison.md``, with a plot.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

from bridge.report.curves import plot_comparison

ROOT = Path(__file__).resolve().parents[1]


def run(words: str, common: list[str], folder: Path) -> dict[str, object]:
    """Train one recipe and return its summary; one that has run into this folder already is not run again."""
    recipe, *overrides = words.split()
    if not (folder / "summary.json").is_file():
        command = [sys.executable, str(ROOT / "scripts" / "train.py"), f"mixed_precision={recipe}"]
        command += [*overrides, *common, f"hydra.run.dir={folder}"]
        print(f"training: {words}", file=sys.stderr, flush=True)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{words}: {done.stderr[-2000:]}")
    summary: dict[str, object] = json.loads((folder / "summary.json").read_text())
    return summary


def points(folder: Path, kind: str) -> list[tuple[int, float]]:
    """Return (step, loss) of a run's records of one kind."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(record["step"], record["loss"]) for record in records if record["kind"] == kind]


def table(rows: list[dict[str, object]]) -> str:
    """Return the comparison as Markdown."""
    lines = ["| recipe | validation loss | against the first | tokens/s |", "|---|---|---|---|"]
    lines += [
        "| {recipe} | {validation_loss:.4f} | {percent:+.2f} % | {tokens_per_second:,.0f} |".format(**row)
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Train, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", help="a recipe, or one with overrides after it in the same word")
    parser.add_argument("--out", type=Path, default=Path("outputs/comparison"), help="folder for runs and results")
    words, common = sys.argv[1:], []
    if "--" in words:
        words, common = words[: words.index("--")], words[words.index("--") + 1 :]
    chosen = parser.parse_args(words)
    folders = {
        recipe: (chosen.out / re.sub(r"[^A-Za-z0-9_.]+", "-", recipe.replace("mixed_precision.", ""))).resolve()
        for recipe in chosen.recipes
    }
    rows: list[dict[str, object]] = []
    for recipe, folder in folders.items():
        summary = run(recipe, common, folder)
        loss = float(str(summary["validation_loss"]))
        first = float(str(rows[0]["validation_loss"])) if rows else loss
        rows.append(
            {
                "recipe": recipe,
                "validation_loss": loss,
                "percent": 100 * (loss / first - 1),
                "tokens_per_second": summary["tokens_per_second"],
                "seconds": summary["seconds"],
            }
        )
    plot_comparison(
        chosen.out / "comparison.png",
        train={recipe: points(folder, "train") for recipe, folder in folders.items()},
        validation={recipe: points(folder, "validation") for recipe, folder in folders.items()},
    )
    (chosen.out / "comparison.json").write_text(json.dumps(rows, indent=2) + "\n")
    (chosen.out / "comparison.md").write_text(table(rows))
    print(table(rows), end="")


if __name__ == "__main__":
    main()
