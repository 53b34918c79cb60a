"""`precision-bridge check [OVERRIDES]`: everything known to go wrong with a run, before a GPU is held."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.errors import PrecisionConfigError, RunConfigError, close_matches, did_you_mean
from bridge.precision.auto import is_auto

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from bridge.front.origin import Origins
    from bridge.preflight.check import Report

__all__ = ["add_parser"]

CONF = Path(__file__).resolve().parents[2] / "conf"


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("check", help="say what is known to go wrong with a run, without running it")
    parser.add_argument("overrides", nargs="*", help="as for scripts/train.py: mixed_precision=NAME model.FIELD=VALUE")
    parser.add_argument("--config-path", default=None, help="folder of the config tree; default: conf")
    parser.add_argument("--config-name", default="config", help="the primary config in it")
    parser.add_argument("--config-dir", default=None, help="another folder, of a team's own groups")
    parser.add_argument("--config", metavar="FILE", help="a saved run's config.yaml, or Megatron Bridge's, instead")
    parser.add_argument("--target", help="where it will run: h100x8,te2.8,cuda12.9,mcore0.16, or auto for this machine")
    parser.add_argument("--backend", choices=("te", "emulated"), help="what runs FP8 and FP4 matrix multiplications")
    parser.add_argument("--strict", action="store_true", help="exit with 1 where there are warnings")
    parser.add_argument("--silence", action="append", default=[], metavar="RULE=REASON", help="leave a rule out")
    parser.add_argument("--quiet", action="store_true", help="leave out what is for information only")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--sarif", metavar="FILE", help="also write SARIF 2.1.0, for code review")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Print every finding; return 2 with errors, 1 with warnings under --strict, else 0."""
    silenced = dict(_reason(word) for word in chosen.silence)
    report = _checked(chosen, silenced)
    if chosen.sarif:
        _write_sarif(report, chosen)
    if chosen.json:
        from bridge.report.findings import findings_dict

        print(json.dumps(findings_dict(report, strict=chosen.strict), indent=2))
    else:
        _print(report, is_quiet=chosen.quiet)
    return report.exit_code(strict=chosen.strict)


def _print(report: Report, *, is_quiet: bool) -> None:
    from rich.console import Console

    from bridge.report.findings import findings_text, render_findings

    if sys.stdout.isatty():
        Console(highlight=False).print(findings_text(report, is_quiet=is_quiet))
    else:
        print(render_findings(report, is_quiet=is_quiet), end="")


def _reason(word: str) -> tuple[str, str]:
    name, _, reason = word.partition("=")
    if not reason.strip():
        raise RunConfigError(f"--silence: needs a reason, got {word!r}. Write {name or 'PB306'}=why it is all right.")
    return name.strip(), reason.strip()


def _checked(chosen: argparse.Namespace, silenced: Mapping[str, str]) -> Report:
    """Read the run that is meant, as scripts/train.py would, and check it. Imports Hydra, not Megatron or torch."""
    from bridge.cli.run_values import as_overrides
    from bridge.front.container import precision_of
    from bridge.front.problems import Problems
    from bridge.preflight.run_check import check_run, target_of

    words = as_overrides(chosen.overrides)
    target = target_of(chosen.target) if chosen.target else None
    whole, origins, choice = _composed(chosen, words)
    problems = Problems(origins)
    precision = precision_of(whole, choice, problems, origins)
    problems.raise_any()
    request = choice if is_auto(choice) else None
    stated = dict(whole.get("mixed_precision") or {}) if request else None
    return check_run(
        {**whole, "mixed_precision": request or precision},
        stated=stated,
        target=target,
        silenced=silenced,
        backend=chosen.backend,
        origins=origins.of,
    )


def _composed(chosen: argparse.Namespace, words: list[str]) -> tuple[dict[str, Any], Origins, str | None]:
    """Return the sections, who set their keys, and the recipe that was chosen."""
    if chosen.config:
        from bridge.front.config_file import read_config_file

        return read_config_file(Path(chosen.config), words)
    from bridge.front.compose import composed
    from bridge.front.plain import plain
    from bridge.front.search import Search

    search = Search(
        main=str(_folder(chosen.config_path)),
        extra=Path(chosen.config_dir) if chosen.config_dir else None,
        config_name=chosen.config_name,
    )
    with composed(search, words) as composition:
        with contextlib.suppress(PrecisionConfigError):  # its faults are findings here, beside the others
            composition.check()
        whole = plain(composition.config, composition.origins, missing=True)
        return whole, composition.origins, composition.choice


def _folder(given: str | None) -> Path:
    """Return the folder of the config tree: as given, else ``conf`` here, else that of this package's checkout."""
    if given is None:
        return Path("conf").resolve() if Path("conf/config.yaml").is_file() else CONF
    folder = Path(given)
    if not folder.is_dir():
        beside = [path.name for path in Path().iterdir() if path.is_dir()]
        hint = did_you_mean(close_matches(given, beside)) or "Give the folder that holds config.yaml."
        raise RunConfigError(f"--config-path: there is no such folder, got {given!r}. {hint}")
    return folder.resolve()


def _write_sarif(report: Report, chosen: argparse.Namespace) -> None:
    from importlib.metadata import version

    from bridge.report.sarif import sarif

    file = Path(chosen.config) if chosen.config else _folder(chosen.config_path) / f"{chosen.config_name}.yaml"
    with contextlib.suppress(ValueError):
        file = file.resolve().relative_to(Path.cwd())
    log = sarif(report, file=file.as_posix(), version=version("precision-bridge"))
    try:
        Path(chosen.sarif).write_text(json.dumps(log, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunConfigError(
            f"--sarif: cannot be written ({error}), got {chosen.sarif!r}. Give another file."
        ) from None
