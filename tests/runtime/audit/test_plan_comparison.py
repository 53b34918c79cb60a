"""A record compared with the plan that it was made from, and with one that differs from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bridge import MixedPrecisionConfig, get_mixed_precision_config
from bridge.errors import RunConfigError
from bridge.plan.precision_plan import PrecisionPlan, precision_plan
from bridge.precision.schemes import GEMMS
from bridge.runtime.audit.plan_comparison import GEMM_MODULE_KINDS, compare_records, compare_with_plan
from bridge.runtime.audit.record import CensusRow, GemmRow, Record, make_layer_sort_key, merge_gemm_rows

SHAPE = {"num_layers": 6, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": 256, "bf16": True}
KINDS = {
    "dense": {},
    "gated, GQA": {"gated_linear_unit": True, "num_query_groups": 2},
    "experts": {"num_moe_experts": 4, "moe_ffn_hidden_size": 128, "moe_shared_expert_intermediate_size": 128},
    "prediction": {"mtp_num_layers": 1},
}


def plan_of(recipe: str = "fp8_current", **model) -> PrecisionPlan:
    """Return the plan of a small model."""
    return precision_plan(get_mixed_precision_config(recipe), {**SHAPE, **model})


def record_of(plan: PrecisionPlan) -> Record:
    """Return a record in which everything ran as planned, written by hand from the plan's rows."""
    rows = []
    for layer in plan.layers:
        for module in layer.modules:
            if module.kind not in GEMM_MODULE_KINDS:
                continue
            for gemm in GEMMS.values():
                left, _, right = module.row(gemm.name).format.partition(" x ")
                own = {"left": left, "right": right or left, "scheme": module.scheme or "none"}
                rows.append(GemmRow(layer=layer.label, module=module.name, gemm=gemm.name, **own))
    return Record(gemms=merge_gemm_rows(rows))


def changed(record: Record, where, **columns) -> Record:
    """Return a record with other columns in the rows that `where` takes."""
    return replace(record, gemms=tuple(replace(row, **columns) if where(row) else row for row in record.gemms))


@pytest.mark.parametrize("model", KINDS.values(), ids=KINDS)
def test_a_record_as_planned_has_no_mismatch(model):
    for recipe in ("bf16_mixed", "fp8_current", "mxfp8", "nvfp4", "fp8_delayed"):
        plan = plan_of(recipe, **model)
        assert compare_with_plan(plan, record_of(plan)) == ()


def texts(plan: PrecisionPlan, record: Record) -> list[str]:
    return [str(one) for one in compare_with_plan(plan, record)]


def test_other_formats_are_one_sentence_with_all_layers_and_the_cause():
    plan = plan_of()
    bf16 = {"left": "bf16", "right": "bf16", "scheme": "none", "context": "off"}

    def is_fc1(row: GemmRow) -> bool:
        return row.layer in "2345" and row.module == "linear_fc1" and row.gemm == "fprop"

    assert texts(plan, changed(record_of(plan), is_fc1, **bf16)) == [
        "planned e4m3 x e4m3 (tensorwise), ran bf16: layers 2-5, linear_fc1, fprop; the autocast was not entered."
    ]
    swapped = {**bf16, "context": "", "by": "torch.nn.Linear"}
    assert texts(plan, changed(record_of(plan), lambda row: is_fc1(row) and row.layer == "3", **swapped)) == [
        "planned e4m3 x e4m3 (tensorwise), ran bf16: layer 3, linear_fc1, fprop; the module is a torch.nn.Linear, "
        "which multiplies in high precision."
    ]


def test_a_kept_layer_in_fp8_is_named():
    plan = plan_of()
    fp8 = {"left": "e4m3", "right": "e4m3", "scheme": "delayed", "context": "delayed"}
    record = changed(record_of(plan), lambda row: row.layer == "1" and row.gemm == "fprop", **fp8)
    assert texts(plan, record) == [
        "planned bf16, ran e4m3 x e4m3 (delayed): layer 1, linear_qkv, linear_proj, linear_fc1, linear_fc2, fprop; the "
        "layer that the plan keeps in high precision ran inside an autocast (delayed)."
    ]


def test_rows_without_a_partner_are_named():
    plan = plan_of()
    record = record_of(plan)
    gone = replace(record, gemms=tuple(row for row in record.gemms if row.module != "linear_fc2"))
    assert "planned e4m3 x e4m3 (tensorwise), recorded no such GEMM: layers 2-5, linear_fc2, fprop." in texts(
        plan, gone
    )
    assert "planned bf16, recorded no such GEMM: layers 1, 6, linear_fc2." in texts(plan, gone)
    extra = GemmRow(layer="2", module="adapter", gemm="fprop", left="bf16", right="bf16")
    assert texts(plan, replace(record, gemms=(*record.gemms, extra))) == [
        "ran bf16, which is not in the plan: layer 2, adapter, fprop."
    ]


COLUMNS = {
    "output": ("fp32", "planned a bf16 result, got fp32"),
    "accumulate": ("fp32", "planned an fp32 fast accumulator, ran with fp32"),
    "storage": ("e5m2", "planned e4m3 as the stored format of the weight, got e5m2"),
    "left_tile": ("1x32", "planned a scale for each tensor and tensor, ran with one for each 1x32 and tensor"),
}


def test_each_column_is_compared():
    plan = plan_of()
    whole = changed(record_of(plan), lambda row: row.scheme != "none", right_tile="tensor", left_tile="tensor")
    assert compare_with_plan(plan, whole) == ()
    for column, (value, text) in COLUMNS.items():
        record = changed(
            whole, lambda row: (row.layer, row.module, row.gemm) == ("2", "linear_fc1", "fprop"), **{column: value}
        )
        assert texts(plan, record) == [f"{text}: layer 2, linear_fc1, fprop."]


def test_tensors_in_other_dtypes_are_named():
    census = (
        CensusRow(kind="gradient reduction", dtype="float32", bytes=4, read_from=""),
        CensusRow(kind="master weights", dtype="bfloat16", bytes=2, read_from=""),
    )
    found = [str(one) for one in compare_with_plan(plan_of(), replace(record_of(plan_of()), census=census))]
    assert found == ["planned fp32, got bf16: master weights."]


def test_two_records_differ_where_one_layer_does():
    record = record_of(plan_of())
    other = changed(record, lambda row: row.layer == "2" and row.module == "linear_fc1", left="bf16", scheme="none")
    assert compare_records(record, record) == ()
    assert [str(one) for one in compare_records(record, other)] == [
        "e5m2 x e4m3 (tensorwise) in the first, bf16 x e4m3 in the second: layer 2, linear_fc1, dgrad, wgrad.",
        "e4m3 x e4m3 (tensorwise) in the first, bf16 x e4m3 in the second: layer 2, linear_fc1, fprop.",
    ]


def test_a_record_is_read_back_as_it_was_written(tmp_path):
    census = (CensusRow(kind="parameters", dtype="bfloat16", bytes=2, read_from="the modules' parameters"),)
    record = replace(record_of(plan_of(mtp_num_layers=1)), census=census, backend="emulated", step=1)
    record.write(tmp_path / "record.json")
    assert Record.read(tmp_path / "record.json") == record
    layers = list(dict.fromkeys(row.layer for row in record.gemms))
    assert layers == sorted(layers, key=make_layer_sort_key) == ["1", "2", "3", "4", "5", "6", "mtp 1", "output"]
    (tmp_path / "other.json").write_text('{"gemms": 3}')
    with pytest.raises(RunConfigError, match="must be a record of a run"):
        Record.read(tmp_path / "other.json")


def test_a_factory_decides_its_formats_and_may_miss_no_layer():
    precision = MixedPrecisionConfig(
        bf16=True, fp8="e4m3", fp8_recipe="custom", fp8_quantizer_factory="team.factory", first_last_layers_bf16=False
    )
    plan = precision_plan(precision, SHAPE)
    factory = {"left": "e4m3", "right": "e4m3", "scheme": "tensorwise"}
    record = changed(record_of(plan), lambda row: row.scheme == "custom", **factory)
    assert compare_with_plan(plan, record) == ()
    missed = {"left": "bf16", "right": "bf16", "scheme": "none", "context": "custom"}
    found = compare_with_plan(plan, changed(record, lambda row: row.module == "linear_fc2", **missed))
    assert [str(one) for one in found] == [
        "planned custom x custom (custom), ran bf16: layers 1-6, linear_fc2; the autocast (custom) was on and the "
        "module multiplied unquantised operands."
    ]


HALF = {"left": "bf16", "right": "bf16", "storage": "bf16"}


@pytest.mark.parametrize(
    ("columns", "is_planned"),
    [
        ({**HALF, "output": "fp32"}, True),
        ({**HALF, "output": "bf16"}, False),
        ({**HALF, "output": "fp32", "storage": "fp32"}, False),
        ({**HALF, "output": "fp32", "right": "fp32"}, False),
    ],
    ids=["exact", "rounded result", "rounded weight", "mixed operands"],
)
def test_a_router_in_fp32_may_multiply_its_bf16_tensors_into_an_fp32_result(columns, is_planned):
    """Transformer Engine's GEMM does so, and each product of two BF16 values is exact in FP32."""
    plan = plan_of("bf16_mixed", **KINDS["experts"], moe_router_dtype="fp32")
    record = changed(record_of(plan), lambda row: row.module == "router" and row.gemm == "fprop", **columns)
    assert (compare_with_plan(plan, record) == ()) is is_planned


def test_a_linear_layer_in_fp32_multiplies_no_bf16_tensors():
    plan = precision_plan(get_mixed_precision_config("fp32"), {**SHAPE, "bf16": False})
    record = changed(record_of(plan), lambda row: row.module == "linear_fc1", **HALF, output="fp32")
    assert [one.column for one in compare_with_plan(plan, record)] == ["formats"]
