"""`precision-bridge manifest [OVERRIDES]`: a trained model's formats, and serving configs."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.cli.manifest.comparison import print_comparison
from bridge.cli.manifest.export import print_export
from bridge.cli.manifest.rollout import add_rollout_option, print_rollout_comparison
from bridge.cli.output import print_json, print_report
from bridge.cli.parser import add_json_option
from bridge.cli.run_answer import plan_run
from bridge.cli.run_arguments import add_run_arguments, read_run, read_without_overrides
from bridge.convert.serving.formats import SERVING_SYSTEMS

if TYPE_CHECKING:
    from bridge.convert.serving.manifest import Manifest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_run_arguments(parser)
    add_json_option(parser)
    help_text = "folder of a run, or a manifest in JSON, instead"
    parser.add_argument("--run", dest="run_folder", metavar="RUN", help=help_text)
    parser.add_argument(
        "--for",
        dest="system",
        choices=list(SERVING_SYSTEMS),
        help="the system that serves the model",
    )
    parser.add_argument(
        "--against",
        metavar="FILE",
        type=Path,
        help="a config.json or hf_quant_config.json to compare",
    )
    add_rollout_option(parser)
    parser.add_argument(
        "--model-type",
        metavar="NAME",
        help="model_type of the Hugging Face config: names of modules",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="write the config to this file instead of printing it"
    )


def run(args: argparse.Namespace) -> int:
    """Print the manifest, the config of a system, or a comparison.

    Returns:
        1 if a comparison finds differences, else 0.
    """
    if args.rollout is not None:
        return print_rollout_comparison(args)
    if args.against is not None:
        from bridge.convert.serving.serving_config import ServingConfig

        config = ServingConfig.from_file(args.against)
        manifest = _read_manifest(args, _choose_model_type(args, config.model_type))
        return print_comparison(manifest, config, args)
    manifest = _read_manifest(args, args.model_type)
    if args.system is not None:
        print_export(manifest, args)
    elif args.json:
        print_json(asdict(manifest))
    else:
        from bridge.convert.serving.table import make_manifest_table

        print_report(make_manifest_table(manifest))
    return 0


def _choose_model_type(args: argparse.Namespace, stated_in_config: str | None) -> str | None:
    """Return the model type of the command line, or else of the config if it is known."""
    from bridge.convert.serving.module_names import FAMILY_BY_TYPE

    model_type: str | None = args.model_type
    if not model_type and stated_in_config in FAMILY_BY_TYPE:
        return stated_in_config
    return model_type


def _read_manifest(args: argparse.Namespace, model_type: str | None) -> Manifest:
    """Return the manifest of the run that the arguments describe, of a run folder, or of a file."""
    from bridge.convert.serving.manifest import Manifest

    if args.run_folder is None:
        return Manifest.from_plan(plan_run(read_run(args)), model_type=model_type)
    path = Path(args.run_folder)
    if path.is_file():
        return Manifest.from_file(path)
    from bridge.runtime.audit.run_folder import CONFIG_FILE, RunFolder

    folder = RunFolder.from_path(path)
    plan = plan_run(read_without_overrides(args, str(folder.path / CONFIG_FILE)))
    return Manifest.from_plan(plan, record=folder.record, model_type=model_type)
