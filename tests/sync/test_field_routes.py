"""Every field has a home in the installed Megatron, or a stated reason why not; every field of a precision is swept."""

import dataclasses
import importlib.util
import json
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from bridge import MixedPrecisionConfig, synchronize
from bridge.cli.explain.field import explain_field
from bridge.errors import PrecisionConfigError
from bridge.model.section import read_section
from bridge.precision.precision_config import FIELD_CHOICES, FIELD_DEFAULTS, FIELDS_BY_SUBJECT, MEGATRON_FIELDS
from bridge.precision.statements import get_field_value, is_stated, list_field_names
from bridge.precision.yaml_text import from_yaml, to_yaml
from bridge.sync.field_routes import ROUTES, Route, get_routes, load_route_notes
from bridge.sync.owner import OwnerValues, normalise_value
from bridge.sync.sync_plan import plan_sync
from bridge.sync.synchroniser import get_megatron_version
from bridge.target.fields import OWNER_DEFAULTS

ROOT = Path(__file__).resolve().parents[2]
SWEPT = json.loads((ROOT / "bridge/target/megatron_fields.json").read_text(encoding="utf-8"))
PLACES = {(row.owner, row.attribute) for row in ROUTES}
NOT_ROUTED = {
    (role, name): why for role, fields in load_route_notes()["not_routed"].items() for name, why in fields.items()
}

STATED: dict[str, Any] = {
    "mamba_training_ssm_states_dtype": "bf16",
    "attention_softmax_in_fp32": False,
    "main_grads_dtype": "bf16",
    "main_params_dtype": "fp16",
    "exp_avg_dtype": "fp8",
    "exp_avg_sq_dtype": torch.float16,
    "store_param_remainders": False,
    "muon_fp32_matmul_prec": "high",
    "param_name_patterns_for_fp32_local_accumulation": ["*.router.weight", "all"],
    "megatron_fsdp_main_params_dtype": None,
    "megatron_fsdp_main_grads_dtype": "float32",
    "megatron_fsdp_grad_comm_dtype": "torch.bfloat16",
    "moe_router_dtype": torch.float64,
    "moe_dispatch_fwd_dtype": "mxfp8",
    "moe_combine_bwd_dtype": "mxfp8",
    "fp8_quantizer_factory": "team.quantizers.make",
    "fp4_quantizer_factory": "team.quantizers.make",
}
"""Field -> a value away from its default; True for the others."""
WITH: dict[str, dict[str, Any]] = {
    "moe_router_padding_for_quantization": {"fp8": "hybrid"},
    "fp8_output_proj": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
    "tp_only_amax_red": {"fp8": "hybrid", "fp8_recipe": "delayed"},
    "fp8_quantizer_factory": {"fp8": "hybrid", "fp8_recipe": "custom"},
    "fp4_quantizer_factory": {"fp4": "e2m1", "fp4_recipe": "custom"},
    "param_name_patterns_for_fp32_local_accumulation": {"grad_reduce_in_fp32": False},
    "main_grads_dtype": {"use_precision_aware_optimizer": True},
    "main_params_dtype": {"use_precision_aware_optimizer": True},
    "exp_avg_dtype": {"use_precision_aware_optimizer": True},
    "exp_avg_sq_dtype": {"use_precision_aware_optimizer": True},
    "store_param_remainders": {"use_precision_aware_optimizer": True},
}
"""Field -> what its run needs besides."""
NCCL_EP = {
    "num_moe_experts": 2,
    "moe_token_dispatcher_type": "flex",
    "moe_flex_dispatcher_backend": "ncclep",
    "moe_grouped_gemm": True,
    "use_transformer_engine_op_fuser": True,
}
INVARIANT: dict[str, Any] = {"attention_backend": AttnBackend.flash, "attention_dropout": 0.0}
if "flash_attention_version" in {field.name for field in dataclasses.fields(TransformerConfig)}:
    INVARIANT["flash_attention_version"] = 3
OWNERS: dict[str, dict[str, Any]] = {
    "activation_func_fp8_input_store": {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu},
    "moe_router_padding_for_quantization": {"num_moe_experts": 2, "moe_token_dispatcher_type": "alltoall"},
    "batch_invariant_mode": INVARIANT,
    "moe_dispatch_fwd_dtype": NCCL_EP,
    "moe_combine_bwd_dtype": NCCL_EP,
}
"""Field -> fields of the model that its run needs."""


def version() -> tuple[int, ...]:
    return tuple(int(part) for part in get_megatron_version().split(".")[:3])


def config_with(field: str) -> MixedPrecisionConfig:
    return MixedPrecisionConfig(bf16=True, **WITH.get(field, {})).override(**{field: STATED.get(field, True)})


def sweep() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sweep", ROOT / "scripts/write_megatron_fields.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_field_has_a_home_or_a_reason(megatron_owners) -> None:
    owners = megatron_owners()
    for row in ROUTES:
        if row.attribute is None or row.owner == "process":
            assert load_route_notes()[row.owner][row.field]["note"], "a field without an attribute says why"
            continue
        present = {f.name for f in dataclasses.fields(owners[row.owner])}
        since = tuple(int(part) for part in row.since.split("."))
        assert (row.attribute in present) == (version() >= since), f"{row.owner}.{row.attribute}"


def test_every_field_has_a_route() -> None:
    without_route = [field for field in list_field_names(MixedPrecisionConfig) if not get_routes(field)]
    assert without_route == [], "add a row to ROUTES in bridge/sync/field_routes.py"


def test_the_attribute_of_every_route_exists_in_a_known_release() -> None:
    unknown = []
    for owner, attribute in PLACES:
        if attribute is not None and owner != "process" and attribute not in SWEPT["fields"][owner]:
            unknown.append(f"{owner}.{attribute}")
    assert unknown == [], "no release in bridge/target/megatron_fields.json has the attribute"


def test_every_route_belongs_to_a_field_and_no_row_is_twice() -> None:
    assert {row.field for row in ROUTES} <= set(list_field_names(MixedPrecisionConfig))
    places = [(row.owner, row.attribute) for row in ROUTES if row.attribute]
    assert len(places) == len(set(places))


def test_every_precision_field_of_megatron_that_shares_a_name_is_routed(megatron_owners) -> None:
    for role, owner in megatron_owners().items():
        shared = {f.name for f in dataclasses.fields(owner)} & set(list_field_names(MixedPrecisionConfig))
        assert {(role, name) for name in shared} <= PLACES


# -- the sweep over Megatron's classes -----------------------------------------------------------------------------


def test_every_field_of_the_five_releases_that_speaks_of_a_precision_is_routed_or_has_a_reason() -> None:
    assert [name.partition(" ")[0] for name in SWEPT["releases"]] == ["0.16.1", "0.17.1", "0.18.2", "0.19.2", "main"]
    marked = {
        (role, name) for role, fields in SWEPT["fields"].items() for name, row in fields.items() if "precision" in row
    }
    assert marked - PLACES == set(NOT_ROUTED), (
        "a new field is routed in bridge/sync/field_routes.py, or listed with a reason"
    )
    assert all(reason and not reason.endswith(".") for reason in NOT_ROUTED.values())


def test_the_sweep_of_the_installed_release_finds_nothing_that_the_table_does_not_have() -> None:
    found = sweep().fields_of(str(distribution("megatron-core").locate_file("")))
    speaking = {(role, name) for role, fields in found.items() for name, row in fields.items() if "precision" in row}
    assert len(speaking) > 50
    assert speaking <= PLACES | set(NOT_ROUTED)


def test_a_field_that_appears_in_megatron_is_noticed(tmp_path: Path) -> None:
    script = sweep()
    installed = Path(str(distribution("megatron-core").locate_file("")))
    for file in {file for classes in script.CLASSES.values() for file, _ in classes}:
        copy = tmp_path / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        text = (installed / file).read_text(encoding="utf-8")
        addition = '    moe_wire: str = "bf16"\n    """Sent in this precision."""\n    moe_colour: str = "red"\n\n    '
        copy.write_text(text.replace("    fp16: bool = False", f"{addition}fp16: bool = False", 1), encoding="utf-8")
    found = script.fields_of(str(tmp_path))["model"]
    assert ("precision" in found["moe_wire"], "precision" in found["moe_colour"]) == (True, False)
    assert ("model", "moe_wire") not in PLACES | set(NOT_ROUTED)


def test_a_field_of_megatrons_reads_as_megatrons_own_default() -> None:
    for field in MEGATRON_FIELDS:
        (route,) = get_routes(field)
        assert route.attribute == field
        default = OWNER_DEFAULTS[route.owner][field]
        assert FIELD_DEFAULTS[field] == (tuple(default) if isinstance(default, list) else default), field
        assert FIELD_DEFAULTS[field] in {*FIELD_CHOICES.get(field, (FIELD_DEFAULTS[field],)), None}


def test_each_field_is_in_one_group() -> None:
    grouped = [name for names in FIELDS_BY_SUBJECT.values() for name in names]
    assert sorted(grouped) == sorted(list_field_names(MixedPrecisionConfig))


# -- each field of Megatron's --------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", MEGATRON_FIELDS)
def test_a_stated_field_is_explained_and_survives_every_round_trip(field: str) -> None:
    config = config_with(field)
    assert field in config.stated
    assert get_field_value(config, field) != FIELD_DEFAULTS[field]
    for back in (
        from_yaml(MixedPrecisionConfig, to_yaml(config)),
        eval(repr(config)),  # noqa: S307
        dataclasses.replace(config),
    ):
        assert (back.to_dict(), back.stated) == (config.to_dict(), config.stated)
    told = explain_field(field)
    assert told["meaning"].endswith(".")
    assert told["homes"][0]["source"]


@pytest.mark.parametrize("field", MEGATRON_FIELDS)
def test_a_stated_field_is_written_and_a_second_sync_changes_nothing(field: str, megatron_owners) -> None:
    config, (route,) = config_with(field), get_routes(field)
    is_there = version() >= tuple(int(part) for part in route.since.split("."))
    owners = megatron_owners(**OWNERS.get(field, {}) if is_there else {})
    if config.use_precision_aware_optimizer or field == "moe_router_padding_for_quantization":
        # Megatron's own class refuses these where Transformer Engine is not installed.
        owners[route.owner] = SimpleNamespace(**vars(owners[route.owner]))
    report = synchronize(config, **owners)
    row = report.row(f"{route.owner}.{field}")
    if row.verdict == "absent":
        assert [one.id for one in report.findings if one.path == f"mixed_precision.{field}"][:1] == ["PB129"]
        return
    assert getattr(owners[route.owner], field) == getattr(config, field)
    assert synchronize(config, **owners).changes == ()


def owner_of(route: Route, values: dict[str, Any]) -> OwnerValues:
    return OwnerValues.from_section(route.owner, read_section(route.owner, values), version=None)


@pytest.mark.parametrize("field", MEGATRON_FIELDS)
def test_an_owners_own_value_of_a_field_that_is_not_stated_stays_and_is_listed(field: str) -> None:
    (route,) = get_routes(field)
    own = getattr(config_with(field), field)
    held = {field: normalise_value(own)}
    for recipe in (MixedPrecisionConfig(bf16=True), MixedPrecisionConfig(fp32=True), config_with("tp_only_amax_red")):
        if is_stated(recipe, field):
            continue
        (row,) = (row for row in plan_sync(recipe, [owner_of(route, held)]) if row.attribute == field)
        assert (row.verdict, row.new) == ("keep", held[field])
    rows = plan_sync(MixedPrecisionConfig(bf16=True), [owner_of(route, {})])
    (row,) = (row for row in rows if row.attribute == field)
    assert (row.verdict, row.new) == ("agree", OWNER_DEFAULTS[route.owner][field])


def test_objects_of_no_class_of_megatrons_keep_what_is_not_stated_and_get_what_is() -> None:
    optimizer = SimpleNamespace(bf16=False, exp_avg_dtype=torch.bfloat16, store_param_remainders=None)
    synchronize("bf16_mixed", optimizer=optimizer)
    assert (optimizer.exp_avg_dtype, optimizer.store_param_remainders) == (torch.bfloat16, None)
    config = MixedPrecisionConfig(bf16=True, exp_avg_dtype="fp8", use_precision_aware_optimizer=True)
    synchronize(config, optimizer=optimizer)
    assert optimizer.exp_avg_dtype is torch.uint8


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"moe_router_dtype": "fp23"}, "moe_router_dtype: must be 'fp32' or 'fp64', got 'fp23'. Use one of these."),
        ({"main_params_dtype": "bf16"}, "main_params_dtype: must be 'fp32' or 'fp16', got 'bf16'. Use one of these."),
        ({"exp_avg_dtype": "fp64"}, "exp_avg_dtype: must be 'fp32', 'fp16', 'bf16' or 'fp8', got 'fp64'."),
        (
            {"moe_dispatch_fwd_dtype": "e4m3"},
            "moe_dispatch_fwd_dtype: must be 'bf16' or 'mxfp8', got 'e4m3'. Use one of these.",
        ),
    ],
)
def test_a_value_that_megatron_does_not_take_is_refused_in_one_sentence(
    values: dict[str, Any], message: str, megatron_owners
) -> None:
    owners = megatron_owners()
    before = {role: dict(vars(owner)) for role, owner in owners.items()}
    with pytest.raises(PrecisionConfigError) as caught:
        synchronize(MixedPrecisionConfig(bf16=True, **values), **owners)
    (line,) = str(caught.value).splitlines()[1:]
    assert line.startswith(f"  mixed_precision.{message}")
    assert {role: dict(vars(owner)) for role, owner in owners.items()} == before
