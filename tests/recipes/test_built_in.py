"""The built-in recipes: the peer's values, honest names and docstrings, and what each one states (golden files)."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bridge import MixedPrecisionConfig, get_mixed_precision_config
from bridge.precision.mode import get_mode, get_scheme
from bridge.precision.statements import get_recipe_name
from bridge.precision.yaml_text import from_yaml, to_yaml
from bridge.registry.registry import REGISTRY

HERE = Path(__file__).parent
PEER = json.loads((HERE / "peer_recipes.json").read_text())
STATED = json.loads((HERE / "stated.json").read_text())
BUILT_IN = [r.name for r in REGISTRY.recipes() if r.function.__module__.startswith("precision_bridge_recipes.")]
MISNAMED = "nanov2_bf16_with_fp8_current_scaling_mixed"

pytestmark = pytest.mark.filterwarnings("ignore::bridge.errors.BridgeWarning")


@pytest.mark.parametrize("name", PEER["recipes"])
def test_a_recipe_of_megatron_bridge_reads_as_it_does_there(name: str) -> None:
    config = get_mixed_precision_config(name)
    expected = {**PEER["defaults"], **PEER["recipes"][name]}
    for family in ("fp8", "fp4"):
        expected[f"{family}_param"] = expected[f"{family}_param_gather"]
    read = {field: getattr(config, field) for field in expected}
    assert {f: str(v) if isinstance(v, torch.dtype) else v for f, v in read.items()} == expected


@pytest.mark.parametrize("name", BUILT_IN)
class TestConformance:
    """What every recipe has to fulfil."""

    def test_it_can_be_right(self, name: str) -> None:
        get_mixed_precision_config(name).finalize()

    def test_it_states_what_the_golden_file_says_and_no_more(self, name: str) -> None:
        assert get_mixed_precision_config(name).to_dict() == STATED[name]

    def test_it_round_trips(self, name: str) -> None:
        config = get_mixed_precision_config(name)
        assert from_yaml(MixedPrecisionConfig, to_yaml(config)).to_dict() == config.to_dict()

    def test_its_name_says_what_its_values_are(self, name: str) -> None:
        config = get_mixed_precision_config(name)
        scheme = {"current_scaling": "tensorwise", "delayed_scaling": "delayed", "subchannel_scaling": "blockwise"}
        scheme |= {"mxfp8": "mxfp8", "nvfp4": "nvfp4"}
        named = [value for token, value in scheme.items() if token in name]
        if name == MISNAMED:
            assert (named, get_scheme(config)) == (["tensorwise"], "blockwise")
            return
        assert named == ([get_scheme(config)] if get_scheme(config) else [])
        base = re.search(r"(?:^|_)(fp32|fp16|bf16)(?:_|$)", name)
        assert base is not None
        assert base[1] == (get_mode(config) if not config.autocast_enabled else "bf16")

    def test_its_docstring_names_formats_scheme_hardware_status_and_source(self, name: str) -> None:
        config, text = get_mixed_precision_config(name), REGISTRY.recipe(name).function.__doc__ or ""
        parts = dict(re.findall(r"^    (Formats|Scheme|Hardware|Status|Source): (.*)$", text, re.MULTILINE))
        assert list(parts) == ["Formats", "Scheme", "Hardware", "Status", "Source"]
        expected = {"hybrid": ("E4M3", "E5M2", "hybrid"), "e4m3": ("E4M3",), "e2m1": ("E2M1",)}
        format_ = config.fp8 or config.fp4
        tokens = expected[format_] if format_ else (get_mode(config).upper(),)
        assert all(token in parts["Formats"] for token in tokens), parts["Formats"]
        if format_ == "e4m3":
            assert "E5M2" not in parts["Formats"]
        if get_scheme(config):
            assert get_scheme(config) in parts["Scheme"]
        assert re.match(r"(experimental|validated|kept)", parts["Status"])

    def test_it_synchronises_into_fresh_megatron_configs(self, name: str, megatron_owners) -> None:
        from bridge import synchronize

        report = synchronize(name, **megatron_owners(), strict=True)
        homeless = [f.path for f in report.findings]
        assert homeless in ([], ["mixed_precision.fp4_param_gather"])


def test_short_aliases_and_the_names_of_nemo_2_resolve() -> None:
    for alias, name in {
        "mxfp8": "bf16_with_mxfp8_mixed",
        "blockwise": "bf16_with_fp8_subchannel_scaling_mixed",
        "nvfp4": "bf16_with_nvfp4_mixed",
        "fp8_delayed": "bf16_with_fp8_delayed_scaling_mixed",
        "fp8_current": "bf16_with_fp8_current_scaling_mixed",
        "bf16_with_fp8_mixed": "bf16_with_fp8_delayed_scaling_mixed",
        "fp16-with-fp8-mixed": "fp16_with_fp8_delayed_scaling_mixed",
    }.items():
        assert get_recipe_name(get_mixed_precision_config(alias)) == name


def test_the_misnamed_recipe_warns_once_and_has_a_truthful_twin() -> None:
    code = (
        "import warnings\nfrom bridge import get_mixed_precision_config as get\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        f"    one = get('{MISNAMED}'); get('{MISNAMED}')\n"
        "assert one == get('nanov2_bf16_with_fp8_subchannel_scaling_mixed')\n"
        "print(len(caught), caught[0].category.__name__, str(caught[0].message).partition(',')[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == f"1 BridgeWarning {MISNAMED}: the name says current scaling\n", done.stderr


def test_listing_and_calling_recipes_needs_no_torch() -> None:
    code = (
        "import sys\nfrom bridge.registry.registry import REGISTRY\n"
        "for name in REGISTRY.names(): REGISTRY.get(name).finalize()\n"
        "print('torch' in sys.modules, 'megatron' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "False False\n", done.stderr


def test_every_file_of_recipes_is_imported_by_the_package():
    package = HERE.parents[1] / "recipes"
    imported = (package / "__init__.py").read_text()
    for path in package.glob("*.py"):
        if path.name != "__init__.py":
            assert f"from .{path.stem} import" in imported, f"recipes/__init__.py does not import {path.name}"
