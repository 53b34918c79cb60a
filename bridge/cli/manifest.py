"""`precision-bridge manifest [OVERRIDES]`: a trained model's formats, and serving configs."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.cli.output import print_json, print_report, write_file
from bridge.cli.parser import add_json_option
from bridge.cli.rollout import add_rollout_option, print_rollout_comparison, refuse_run_folder
from bridge.cli.run_answer import plan_run
from bridge.cli.run_arguments import add_run_arguments, read_run, read_without_overrides
from bridge.convert.serving.formats import SERVING_SYSTEMS

if TYPE_CHECKING:
    from bridge.convert.serving.manifest import Manifest
    from bridge.convert.serving.serving_config import ServingConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_run_arguments(parser)
    add_json_option(parser)
    text = "folder of a run, or a manifest in JSON, instead"
    parser.add_argument("--run", dest="run_folder", metavar="RUN", help=text)
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
    """Print the manifest, the config of a system, or the comparison.

    Return 1 where that finds differences.
    """
    if args.rollout is not None:
        refuse_run_folder(args)
        return print_rollout_comparison(args)
    if args.against is not None:
        from bridge.convert.serving.serving_config import ServingConfig

        config = ServingConfig.from_file(args.against)
        return _compare_config(_read_manifest(args, config), config, args)
    manifest = _read_manifest(args)
    if args.system is not None:
        _export_manifest(manifest, args)
    elif args.json:
        print_json(asdict(manifest))
    else:
        from bridge.convert.serving.table import make_manifest_table

        print_report(make_manifest_table(manifest))
    return 0


def _read_manifest(args: argparse.Namespace, config: ServingConfig | None = None) -> Manifest:
    from bridge.convert.serving.manifest import Manifest
    from bridge.convert.serving.module_names import FAMILY_BY_TYPE

    model_type = args.model_type
    if not model_type and config is not None and config.model_type in FAMILY_BY_TYPE:
        model_type = config.model_type
    if args.run_folder is None:
        return Manifest.from_plan(plan_run(read_run(args)), model_type=model_type)
    path = Path(args.run_folder)
    if path.is_file():
        return Manifest.from_file(path)
    from bridge.runtime.audit.run_folder import CONFIG_FILE, RunFolder

    folder = RunFolder.from_path(path)
    plan = plan_run(read_without_overrides(args, str(folder.path / CONFIG_FILE)))
    return Manifest.from_plan(plan, record=folder.record, model_type=model_type)


def _export_manifest(manifest: Manifest, args: argparse.Namespace) -> None:
    from bridge.convert.conversion import format_records
    from bridge.convert.serving.exporter import export
    from bridge.read.foreign.payload_text import as_json

    report = export(manifest, args.system)
    content: dict[str, Any] = {}
    if report.payload:
        content["quantization_config"] = report.payload
    if args.json:
        print_json({**content, "losses": format_records(report.unmapped, "export")})
        return
    if not content:
        text = (
            f"{manifest.precision} has every linear layer in {manifest.mode}: "
            "there is nothing to state."
        )
        print(text, file=sys.stderr)
    for entry in report.unmapped:
        print(entry, file=sys.stderr)
    if args.out is None:
        print(as_json(content), end="")
    else:
        write_file(args.out, as_json(content), "--out")
        print(f"wrote {args.out}")


def _compare_config(manifest: Manifest, config: ServingConfig, args: argparse.Namespace) -> int:
    """Print how a serving config differs from the manifest.

    Return 1 where it does, or where vLLM refuses it.
    """
    from bridge.convert.serving.comparison import compare_with_serving

    comparison = compare_with_serving(manifest, config, args.system)
    if args.json:
        content = {"precision": manifest.precision, "against": config.path}
        print_json({**content, **comparison.to_dict()})
    else:
        from bridge.convert.serving.table import make_comparison_table

        print_report(make_comparison_table(comparison, manifest.precision, config.path))
    return bool(comparison.differences or comparison.refused)
