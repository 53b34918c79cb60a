"""Random recipes and random payloads, and the properties of every import and export."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from hypothesis import strategies as st

from bridge.errors import BridgeError
from bridge.precision.mode import get_mode
from bridge.precision.precision_config import FIELD_CHOICES, FIELD_DEFAULTS, MEGATRON_FIELDS
from bridge.precision.statements import list_field_names
from bridge.read.foreign.reports import ExportReport, ImportReport
from bridge.read.foreign.semantics import SEMANTICS
from bridge.registry.mixed_precision_config import MixedPrecisionConfig, find_config_faults

SCHEMES = (
    {},
    {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    {"fp8": "e4m3", "fp8_recipe": "tensorwise"},
    {"fp8": "hybrid", "fp8_recipe": "delayed"},
    {"fp8": "e4m3", "fp8_recipe": "delayed"},
    {"fp8": "hybrid", "fp8_recipe": "blockwise"},
    {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
    {"fp4": "e2m1", "fp4_recipe": "nvfp4"},
)
FREE = {
    "grad_reduce_in_fp32": st.booleans(),
    "fp8_margin": st.integers(0, 3),
    "fp8_amax_history_len": st.sampled_from([1, 16, 1024]),
    "fp8_amax_compute_algo": st.sampled_from(["max", "most_recent"]),
    "fp8_wgrad": st.booleans(),
    "fp8_dot_product_attention": st.booleans(),
    "fp8_multi_head_attention": st.booleans(),
    "fp8_param_gather": st.booleans(),
    "fp4_param_gather": st.booleans(),
    "first_last_layers_bf16": st.booleans(),
    "num_layers_at_start_in_bf16": st.integers(0, 3),
    "num_layers_at_end_in_bf16": st.integers(1, 3),
    "loss_scale": st.sampled_from([None, 1.0, 1024.0, 3.0]),
    "initial_loss_scale": st.sampled_from([65536.0, 2.0**32, 2.0**20, 1000.0, 1.5]),
    "min_loss_scale": st.sampled_from([1.0, 2.0, 0.5]),
    "loss_scale_window": st.sampled_from([1000, 2000, 1, 200.0]),
    "hysteresis": st.integers(1, 4),
    "tf32": st.booleans(),
    "reuse_grad_buf_for_mxfp8_param_ag": st.booleans(),
    **{name: st.sampled_from(FIELD_CHOICES[name]) for name in sorted(FIELD_CHOICES)},
    **{name: st.booleans() for name in sorted(MEGATRON_FIELDS) if isinstance(FIELD_DEFAULTS[name], bool)},
    "megatron_fsdp_main_params_dtype": st.sampled_from(["fp32", "bf16"]),
    "megatron_fsdp_grad_comm_dtype": st.sampled_from(["fp32", "bf16"]),
    "fp8_quantizer_factory": st.just("team.quantizers.make"),
    "param_name_patterns_for_fp32_local_accumulation": st.just(["*.router.weight"]),
}


@st.composite
def configs(draw: Any) -> MixedPrecisionConfig:
    """A config that states a random part of what it could, and that could be trained with."""
    mode = draw(st.sampled_from(["fp32", "bf16", "fp16"]))
    given: dict[str, Any] = {mode: True}
    if draw(st.booleans()):
        given["autocast_enabled"] = True
        given["autocast_dtype"] = "bf16" if mode == "fp32" else mode
        if mode != "fp32":
            given["params_dtype"] = draw(st.sampled_from(["fp32", mode]))
    elif draw(st.booleans()):
        given |= {"params_dtype": mode, "pipeline_dtype": mode, "autocast_enabled": False}
    given |= draw(st.sampled_from(SCHEMES))
    for name in draw(st.lists(st.sampled_from(sorted(FREE)), unique=True, max_size=8)):
        given[name] = draw(FREE[name])
    for other in draw(st.lists(st.sampled_from(["fp32", "bf16", "fp16"]), max_size=2)):
        given.setdefault(other, False)
    config = MixedPrecisionConfig.from_dict(given)
    for _ in range(6):  # take back what cannot stand beside the rest
        found = find_config_faults(config)
        if not found:
            break
        for finding in found:
            name = finding.path.removeprefix("mixed_precision.")
            given.pop(name, None)
        config = MixedPrecisionConfig.from_dict(given)
    return config if not find_config_faults(config) else MixedPrecisionConfig.from_dict({mode: True})


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        ["auto", "true", "bf16", "fp16", "fp8", "no", "NO", "bfloat16", "full", "16", "tensorwise", "TE"]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def payloads(keys: Collection[str]) -> st.SearchStrategy[Any]:
    """Anything at all, and mappings whose keys are the system's own down to the third level."""
    inner = st.dictionaries(st.sampled_from(sorted(keys)), JSON, max_size=4)
    middle = st.dictionaries(st.sampled_from(sorted(keys)), JSON | inner | st.lists(inner, max_size=2), max_size=4)
    return JSON | middle | st.dictionaries(st.sampled_from(sorted(keys)), JSON | middle, max_size=5)


def check_export(config: MixedPrecisionConfig, exported: ExportReport) -> None:
    """Every stated field is carried or reported, never both."""
    lost = {loss.field for loss in exported.unmapped}
    assert set(exported.mapped) | (lost & config.stated) == config.stated
    assert not lost & set(exported.mapped)
    for loss in exported.unmapped:
        assert loss.detail[-1:] not in ("", "."), loss
        assert loss.remedy.endswith((".", "?")), loss


def check_return(config: MixedPrecisionConfig, exported: ExportReport, imported: ImportReport) -> None:
    """What was carried out comes back as it was."""
    before, after = _resolved(config), _resolved(imported.config)
    assert {name: after[name] for name in exported.mapped} == {name: before[name] for name in exported.mapped}


def _resolved(config: MixedPrecisionConfig) -> dict[str, Any]:
    values = config.to_dict(full=True)
    return values | {name: values[name] or get_mode(config) for name in ("params_dtype", "pipeline_dtype")}


def check_import(imported: ImportReport, *, sound: bool = True) -> None:
    """An import is a config, `sound` if it can be trained with, under one of the known meanings."""
    assert imported.semantics in SEMANTICS
    assert find_config_faults(imported.config) == [] or not sound
    fields = {name for into in imported.mapped.values() for name in into}
    assert fields <= set(list_field_names(imported.config))


def paths(payload: Mapping[str, Any], under: str = "") -> Iterator[str]:
    """The names of all settings in a payload, "fp16.enabled" say; null is as good as not there."""
    for key, value in payload.items():
        name = f"{under}{key}"
        if isinstance(value, Mapping) and value:
            yield from paths(value, f"{name}.")
        elif not isinstance(value, Mapping) and value is not None:
            yield name


def check_nothing_dropped(payload: Mapping[str, Any], imported: ImportReport, beside: Collection[str] = ()) -> None:
    """Every setting is carried or reported, by its own name or by that of the block it stands in."""
    known = {*imported.mapped, *(loss.field for loss in imported.unmapped), *beside}
    for name in paths(payload):
        parts = name.split(".")
        assert any(".".join(parts[:count]) in known for count in range(1, len(parts) + 1)), name


def survives(import_: Callable[..., ImportReport], payload: object, *, sound: bool = True, **context: object) -> None:
    """An import ends well, or with one of our own errors of one line."""
    try:
        imported = import_(payload, **context)
    except BridgeError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 600
    else:
        check_import(imported, sound=sound)


def reasons(imported: ImportReport | ExportReport, field: str) -> list[str]:
    return [loss.reason for loss in imported.unmapped if loss.field == field]
