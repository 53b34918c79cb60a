"""What the check assumes after the sync is what the synchroniser writes into Megatron's own classes."""

import dataclasses
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from bridge.precision.coercion import parse_dtype
from bridge.preflight.check_context import CheckContext
from bridge.preflight.rule_check import check
from bridge.preflight.run import Run
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY
from bridge.registry.synchronize import synchronize
from bridge.sync.field_routes import ROUTES
from bridge.target import versions
from bridge.target.fields import OWNER_FIELDS

FILE = Path(__file__).resolve().parents[2] / "bridge" / "target" / "megatron_fields.json"
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "write_megatron_fields.py"

OWNERS = {
    "bare": ({}, {}, {}),
    "a provider's layers": ({"first_last_layers_bf16": True}, {}, {}),
    "a provider's counts": (
        {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 3, "num_layers_at_end_in_bf16": 0},
        {},
        {},
    ),
    "counts that switch off": (
        {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 0},
        {},
        {},
    ),
    "an owner in FP8": (
        {"fp8": "e4m3", "fp8_recipe": "tensorwise", "fp8_margin": 2},
        {"fp8_recipe": "tensorwise"},
        {"grad_reduce_in_fp32": True},
    ),
    "an owner in FP16": ({"fp16": True}, {"fp16": True, "loss_scale": 8.0}, {"check_for_nan_in_grad": True}),
    "autocast": ({"enable_autocast": True}, {}, {}),
}


OPEN = {
    "a scheme of the model's own": ({"fp8_recipe": "mxfp8"}, {}, {}),
    "a scheme of the optimizer's own": ({}, {"fp8_recipe": "blockwise"}, {}),
    "stored weights of DDP's own": ({}, {}, {"fp8_param_gather": True}),
    "stored weights of the model's own": ({"fp8": "e4m3", "fp8_param": True}, {}, {}),
    "a buffer of one owner's own": ({"fp8_recipe": "mxfp8"}, {"reuse_grad_buf_for_mxfp8_param_ag": True}, {}),
}
"""What one owner has of its own and a config leaves open."""


@pytest.mark.parametrize("owners", OWNERS, ids=str)
def test_a_setup_holds_what_a_sync_writes(owners: str, megatron_owners: Any) -> None:
    for name in set(REGISTRY.names()) - {"nanov2_bf16_with_fp8_current_scaling_mixed"}:
        holds(name, OWNERS[owners], megatron_owners())


@pytest.mark.parametrize("owners", OPEN, ids=str)
def test_a_setup_holds_what_a_sync_writes_where_one_owner_decides(owners: str, megatron_owners: Any) -> None:
    config = MixedPrecisionConfig(bf16=True, fp8="e4m3")
    if "buffer" in owners:
        config.fp8_param_gather = True
    holds(config, OPEN[owners], megatron_owners())


def holds(precision: Any, owners: tuple[dict[str, Any], ...], made: Any) -> None:
    for role, changes in zip(("model", "optimizer", "ddp"), owners, strict=True):
        for attribute, value in changes.items():
            setattr(made[role], attribute, value)
    setup = CheckContext(Run.from_configs(precision, **made))
    before = setup.prediction.values
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            synchronize(precision, **made)
    except ValueError:  # Megatron refuses this pair, and nothing is written: so does the check
        assert check(setup.run).verdict == "error"
        return
    for route in ROUTES:
        if route.attribute is not None and route.owner in made and hasattr(made[route.owner], route.attribute):
            written = getattr(made[route.owner], route.attribute)
            assert before[route.owner][route.attribute] == plain(written), (
                f"{precision}: {route.owner}.{route.attribute}"
            )
    assert before["ddp"]["check_for_nan_in_grad"] == made["ddp"].check_for_nan_in_grad


def test_a_setup_made_after_the_sync_sees_the_owners_own_values(megatron_owners: Any) -> None:
    made = megatron_owners(first_last_layers_bf16=True)
    first = CheckContext(Run.from_configs("bf16_with_fp8_current_scaling_mixed", **made))
    synchronize("bf16_mixed", **made)
    assert (
        CheckContext(Run.from_configs("bf16_with_fp8_current_scaling_mixed", **made)).model.values == first.model.values
    )


def test_the_rows_are_those_of_the_installed_classes(megatron_owners: Any) -> None:
    installed = versions.get_installed_version("mcore")
    written = json.loads(FILE.read_text(encoding="utf-8"))["fields"]
    for role, owner in megatron_owners().items():
        fields = dataclasses.fields(owner)
        theirs = {field.name: field.default for field in fields}
        made = {field.name: field.default_factory() for field in fields if callable(field.default_factory)}
        rows = {name: row for name, row in OWNER_FIELDS[role].items() if row.is_megatron}
        here = {name for name, row in rows.items() if row.has is None or row.has.holds(installed)}
        missing = {name for name in theirs if name not in here and not name.startswith("_")}
        assert not missing, f"{role}: scripts/write_megatron_fields.py writes them"
        for name in here & set(theirs):
            row = rows[name]
            if row.kind != "any" and theirs[name] is not dataclasses.MISSING:
                default = written[role][name].get("earlier", {}).get(versions.get_installed_text("mcore"), row.default)
                assert plain(theirs[name]) == default, f"{role}.{name}"
        assert {name: rows[name].default for name in made} == made, role


def test_the_file_of_fields_is_what_its_script_reads_in_the_installed_release() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "the installed release is as the file says\n")


def plain(value: Any) -> Any:
    is_dtype = type(value).__module__ == "torch" and type(value).__name__ == "dtype"
    return parse_dtype(value) if is_dtype else getattr(value, "value", value)
