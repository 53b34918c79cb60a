"""Each recipe in each other system: a run there in another precision than the recipe's is reported by the export.

The run is read with the system's own code where that can be installed: Megatron Bridge, NeMo 2, transformers and
DeepSpeed. Elsewhere our own importer reads it.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from bridge.convert import huggingface
from bridge.convert.systems import get_system, list_systems
from bridge.precision.coercion import parse_dtype
from bridge.precision.mode import get_mode
from bridge.read import deepspeed
from bridge.read.foreign.reports import ImportReport
from bridge.read.foreign.semantics import get_semantics
from bridge.read.foreign.system import System
from bridge.read.foreign_system_signs import DOCUMENT_KINDS
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY
from bridge.runtime.pytorch.loop import get_compute_dtype
from tests.read.properties import reasons
from tests.read.test_nemo2_plugin import PLUGIN, real
from tests.read.test_real_engines import held
from tests.read.test_real_libraries import UNUSED
from tests.recipes.test_peer import PEER

pytestmark = pytest.mark.filterwarnings("ignore")
LIBRARIES = {"huggingface": "transformers", "deepspeed": "deepspeed"}
EXPORTERS = [one.name for one in list_systems()]
O1 = {"fp32": True, "autocast_enabled": True, "autocast_dtype": "bf16"}
"""Autocast to BF16 over FP32 weights, as `bf16: true` of Hugging Face."""
O1_FP16 = {"fp16": True, "params_dtype": "fp32", "autocast_enabled": True, "autocast_dtype": "fp16"}
CONFIGS = {
    **{row.name: REGISTRY.get(row.name) for row in REGISTRY.recipes() if "misnamed" not in row.tags},
    "bf16: true of Hugging Face": huggingface.import_({"bf16": True}).config,
    "fp16: true of Hugging Face": huggingface.import_({"fp16": True}).config,
    "BF16 autocast": MixedPrecisionConfig.from_dict(O1),
    "FP16 autocast": MixedPrecisionConfig.from_dict(O1_FP16),
    "FP16 autocast without a mode of FP16": MixedPrecisionConfig.from_dict(
        {**O1, "autocast_dtype": "fp16", "loss_scale": 1024.0}
    ),
    "BF16 autocast in a mode of BF16": MixedPrecisionConfig.from_dict(
        {"bf16": True, "params_dtype": "fp32", "autocast_enabled": True, "autocast_dtype": "bf16"}
    ),
    "BF16 autocast over BF16 weights": MixedPrecisionConfig(bf16=True, autocast_enabled=True),
    "BF16 autocast with FP8": MixedPrecisionConfig.from_dict({**O1, "fp8": "hybrid", "fp8_recipe": "tensorwise"}),
    "BF16 autocast with MXFP8": MixedPrecisionConfig.from_dict({**O1, "fp8": "e4m3", "fp8_recipe": "mxfp8"}),
}


class Ran(NamedTuple):
    """The facts of a run that its export must keep or report."""

    weights: str
    """The dtype that the model's weights are held in while it trains."""
    masters: bool
    """Whether FP32 values of the weights are kept anywhere."""
    autocast: str | None
    """The dtype that torch.autocast casts to, None without autocast."""
    scheme: str | None
    """Format and scheme of FP8 or FP4."""


MODES = ("fp32", "fp16", "bf16")
REPORTED_BY = {
    "weights": (*MODES, "params_dtype"),
    "masters": (*MODES, "params_dtype"),
    "autocast": (*MODES, "params_dtype", "autocast_enabled", "autocast_dtype"),
    "scheme": ("fp8", "fp8_recipe", "fp4", "fp4_recipe"),
}
"""A fact of the run -> fields whose record reports that it differs."""
LOSSES = {"semantics", "unsupported", "approximated"}


def of_config(config: MixedPrecisionConfig, semantics: str | None = None) -> Ran:
    semantics = semantics or get_semantics(config)
    weights = "fp32" if semantics in ("amp_o1", "fp32") else get_mode(config)
    autocast = get_compute_dtype(config) if config.autocast_enabled else None
    scheme = f"{config.fp8} {config.fp8_recipe}" if config.fp8 else None
    scheme = f"{config.fp4} {config.fp4_recipe}" if config.fp4 else scheme
    return Ran(weights, semantics != "true", autocast, scheme)


def of_import(imported: ImportReport) -> Ran:
    return of_config(imported.config, imported.semantics)


def of_megatron(model: Any) -> Ran:
    """A config of Megatron Core's own class: Float16Module casts every weight under `fp16` and `bf16`."""
    half = "fp16" if model.fp16 else "bf16" if model.bf16 else None
    autocast = parse_dtype(model.autocast_dtype) if model.enable_autocast else None
    scheme = f"{model.fp8} {model.fp8_recipe}" if model.fp8 else None
    scheme = f"{model.fp4} {model.fp4_recipe}" if model.fp4 else scheme
    return Ran(half or parse_dtype(model.params_dtype), True, autocast, scheme)


def of_bridge(payload: dict[str, Any], request: pytest.FixtureRequest, folder: Path) -> Ran:
    """Megatron Bridge's `MixedPrecisionConfig.setup`, over Megatron's own configs."""
    if not PEER.exists():
        pytest.skip("needs Megatron Bridge's file next to the environment: make setup")
    import torch

    peer, owners = request.getfixturevalue("peer"), request.getfixturevalue("megatron_owners")()
    values = {name: value for name, value in payload["mixed_precision"].items() if name != "_target_"}
    for name, value in values.items():
        if isinstance(value, dict):
            values[name] = getattr(torch, value["_target_"].removeprefix("torch."))
    made = peer.MixedPrecisionConfig(**values)
    made.finalize()
    made.setup(*owners.values())
    return of_megatron(owners["model"])


def of_nemo2(payload: dict[str, Any], request: pytest.FixtureRequest, folder: Path) -> Ran:
    """NeMo's plugin, and the function with which its strategy writes it into Megatron's own config."""
    if not PLUGIN.exists():
        pytest.skip("needs NeMo's files next to the environment: make setup")
    nemo, owners = request.getfixturevalue("nemo"), request.getfixturevalue("megatron_owners")()
    plugin = nemo.plugin(**real(payload))
    module = sys.modules[nemo.plugin.__module__]
    return of_megatron(module.update_config_with_dtype_overrides(plugin.dtype_config, owners["model"]))


def of_transformers(payload: dict[str, Any], request: pytest.FixtureRequest, folder: Path) -> Ran:
    from transformers import TrainingArguments

    values = {name: value for name, value in payload.items() if (name, value) != ("tf32", True)}
    made = TrainingArguments(output_dir=UNUSED, use_cpu=True, **values)  # tf32 raises without an Ampere GPU
    return Ran("fp32", True, None if made.mixed_precision == "no" else made.mixed_precision, None)


def of_deepspeed(payload: dict[str, Any], request: pytest.FixtureRequest, folder: Path) -> Ran:
    if "torch_autocast" in payload:  # written and not read
        return Ran("fp32", True, parse_dtype(payload["torch_autocast"]["dtype"]), None)
    return of_import(deepspeed.import_(held(payload)))


def of_importer(one: System, payload: Any) -> Ran:
    """The payload as a file, read by our own importer."""
    text = one.write(payload)
    if DOCUMENT_KINDS[one.name][0] == "shell":
        return of_import(one.import_(payload))
    load = json.loads if DOCUMENT_KINDS[one.name][0] == "json" else yaml.safe_load
    return of_import(one.import_(load(text)).assume_default())


READERS = {
    "megatron-bridge": of_bridge,
    "nemo2": of_nemo2,
    "huggingface": of_transformers,
    "deepspeed": of_deepspeed,
}


@pytest.mark.parametrize("name", EXPORTERS)
def test_a_run_in_another_precision_is_reported(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    pytest.importorskip(LIBRARIES.get(name, "json"), reason="pip install precision-bridge[interop]")
    faults = []
    for recipe, config in CONFIGS.items():
        exported = get_system(name).export(config)
        if exported.payload is None:  # nothing is written
            found = Ran("none", True, None, None)
        elif name in READERS:
            found = READERS[name](exported.payload, request, tmp_path)
        else:
            found = of_importer(get_system(name), exported.payload)
        wanted = of_config(config)
        for fact, asked, runs in zip(Ran._fields, wanted, found, strict=True):
            reported = {reason for field in REPORTED_BY[fact] for reason in reasons(exported, field)}
            if asked != runs and not reported & LOSSES:
                faults.append(f"{recipe}: {fact} {asked} would be {runs}, and no record says so")
    assert not faults, "\n".join([name, *faults])


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("megatron-bridge", "Megatron Bridge 0.7 copies fields of the same name, and Megatron's is enable_autocast"),
        ("nemo2", "NeMo 2.6 copies fields of the same name, and Megatron's is enable_autocast"),
        ("megatron-lm", "no flag turns autocast on"),
    ],
)
def test_autocast_that_a_system_over_megatron_drops_names_the_run_and_the_other_choice(name: str, why: str) -> None:
    def said(config: MixedPrecisionConfig) -> list[str]:
        wanted = ("params_dtype", "autocast_enabled")
        return [str(loss) for loss in get_system(name).export(config).unmapped if loss.field in wanted]

    assert said(huggingface.import_({"bf16": True}).config) == [
        f"autocast_enabled=True (semantics): {why}; it trains in FP32. "
        "FP32 there; take bf16_mixed if BF16 weights are meant."
    ]
    remedy = "FP16 weights there, as fp16_mixed; take fp32 if FP32 weights are meant."
    runs = "it trains FP16 weights with FP32 masters"
    assert said(huggingface.import_({"fp16": True}).config) == [
        f"params_dtype='fp32' (semantics): fp16 casts every weight, and {why}; {runs}. {remedy}",
        f"autocast_enabled=True (semantics): {why}; {runs}. {remedy}",
    ]
    assert said(MixedPrecisionConfig(bf16=True, autocast_enabled=True)) == [
        f"autocast_enabled=True (semantics): {why}; it trains BF16 weights with FP32 masters. "
        "BF16 there, in norms and softmax too; state autocast_enabled=False if that is meant."
    ]
    assert said(REGISTRY.get("bf16_mixed")) == []
