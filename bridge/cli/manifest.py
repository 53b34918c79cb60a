"""`precision-bridge manifest [OVERRIDES]`: a trained model's formats, and serving configs."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.cli.output import print_json, show, write_file
from bridge.cli.parser import add_json
from bridge.cli.planned_answer import plan_of
from bridge.cli.rollout_answer import add_rollout, answer_rollout, refuse_run_folder
from bridge.cli.run_arguments import add_run_arguments, read_run, read_saved
from bridge.convert.serving.formats import SYSTEMS

if TYPE_CHECKING:
    from bridge.convert.serving.manifest import Manifest
    from bridge.convert.serving.reader import ServingConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_run_arguments(parser)
    add_json(parser)
    text = "folder of a run, or a manifest in JSON, instead"
    parser.add_argument("--run", dest="run_folder", metavar="RUN", help=text)
    parser.add_argument(
        "--for", dest="system", choices=list(SYSTEMS), help="the system that serves the model"
    )
    parser.add_argument(
        "--against",
        metavar="FILE",
        type=Path,
        help="a config.json or hf_quant_config.json to compare",
    )
    add_rollout(parser)
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
        return answer_rollout(args)
    if args.against is not None:
        from bridge.convert.serving.reader import ServingConfig

        config = ServingConfig.read(args.against)
        return _compare(_read(args, config), config, args)
    manifest = _read(args)
    if args.system is not None:
        _export(manifest, args)
    elif args.json:
        print_json(asdict(manifest))
    else:
        from bridge.convert.serving.table import manifest_table

        show(manifest_table(manifest))
    return 0


def _read(args: argparse.Namespace, config: ServingConfig | None = None) -> Manifest:
    from bridge.convert.serving.manifest import Manifest
    from bridge.convert.serving.names import BY_TYPE

    model_type = args.model_type
    if not model_type and config is not None and config.model_type in BY_TYPE:
        model_type = config.model_type
    if args.run_folder is None:
        return Manifest.of(plan_of(read_run(args)), model_type=model_type)
    path = Path(args.run_folder)
    if path.is_file():
        return Manifest.read(path)
    from bridge.runtime.audit.run_folder import CONFIG_FILE, RunFolder

    folder = RunFolder.of(path)
    plan = plan_of(read_saved(args, str(folder.path / CONFIG_FILE)))
    return Manifest.of(plan, record=folder.record, model_type=model_type)


def _export(manifest: Manifest, args: argparse.Namespace) -> None:
    from bridge.convert.conversion import records
    from bridge.convert.serving.exporter import export
    from bridge.read.foreign.payload_text import as_json

    report = export(manifest, args.system)
    content: dict[str, Any] = {}
    if report.payload:
        content["quantization_config"] = report.payload
    if args.json:
        print_json({**content, "losses": records(report.unmapped, "export")})
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


def _compare(manifest: Manifest, config: ServingConfig, args: argparse.Namespace) -> int:
    """Print how a serving config differs from the manifest.

    Return 1 where it does, or where vLLM refuses it.
    """
    from bridge.convert.serving.comparison import compare

    comparison = compare(manifest, config, args.system)
    if args.json:
        content = {"precision": manifest.precision, "against": config.path}
        print_json({**content, **comparison.to_dict()})
    else:
        from bridge.convert.serving.table import comparison_table

        show(comparison_table(comparison, manifest.precision, config.path))
    return bool(comparison.differences or comparison.refused)
