"""`precision-bridge manifest --against FILE`: the differences from a quantisation config."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from bridge.cli.output import print_json, print_report

if TYPE_CHECKING:
    from bridge.convert.serving.manifest import Manifest
    from bridge.convert.serving.serving_config import ServingConfig


def print_comparison(manifest: Manifest, config: ServingConfig, args: argparse.Namespace) -> int:
    """Print the differences between a manifest and a serving config.

    Returns:
        1 if there are differences, or vLLM refuses the config, else 0.
    """
    from bridge.convert.serving.comparison import compare_with_serving

    comparison = compare_with_serving(manifest, config, args.system)
    if args.json:
        content = {"precision": manifest.precision, "against": config.path}
        print_json({**content, **comparison.to_dict()})
    else:
        from bridge.convert.serving.table import make_comparison_table

        print_report(make_comparison_table(comparison, manifest.precision, config.path))
    return int(bool(comparison.differences or comparison.refused))
