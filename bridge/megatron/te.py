"""The recipe object that Transformer Engine should get for a Megatron config, computed without Transformer Engine.

Megatron makes the same object at each forward pass (fp8_utils.get_fp8_recipe, fp4_utils.get_fp4_recipe). Here it is
computed once more, and independently, for three reasons: a setting can be lost between the config and the object
without a word, environment variables change the classes' defaults, and a run's report wants to say what it ran with.

    te_recipe(config)                  -> TERecipe      a plain value
    TERecipe.build(import_recipes())   -> the object, every keyword checked before and after
    TERecipe.differences(megatrons)    -> what another recipe object has otherwise
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge.errors import Finding, PrecisionConfigError, close_matches, did_you_mean
from bridge.megatron.te_recipe import TERecipe, import_recipes
from bridge.megatron.te_variables import NVTE_VARIABLES
from bridge.precision.schemes import FP4_SCHEMES, FP8_SCHEMES, Scheme

if TYPE_CHECKING:
    from bridge.megatron.te_environment import Environment

__all__ = ["TERecipe", "import_recipes", "te_recipe"]

_FORMATS = {"e4m3": "E4M3", "hybrid": "HYBRID"}
_DPA = {"fp8_dpa": "fp8_dot_product_attention"}
_CLASSES: dict[str, tuple[str, dict[str, str]]] = {
    "delayed": (
        "DelayedScaling",
        {
            "margin": "fp8_margin",
            "amax_history_len": "fp8_amax_history_len",
            "amax_compute_algo": "fp8_amax_compute_algo",
            **_DPA,
            "fp8_mha": "fp8_multi_head_attention",
        },
    ),
    "tensorwise": ("Float8CurrentScaling", _DPA),
    "blockwise": ("Float8BlockScaling", {}),
    "mxfp8": ("MXFP8BlockScaling", _DPA),
    "nvfp4": ("NVFP4BlockScaling", _DPA),
    "custom": ("CustomRecipe", {}),
}
"""Scheme -> Transformer Engine's class, and the config field behind each of its keywords.

Source: megatron-core 0.16.1 and 0.19.2 fp8_utils.get_fp8_recipe, fp4_utils.get_fp4_recipe, TEDelayedScaling."""

_MEGATRON_DEFAULTS: dict[str, object] = {
    "fp8_margin": 0,
    "fp8_amax_history_len": 1,
    "fp8_amax_compute_algo": "most_recent",
    "fp8_dot_product_attention": False,
    "fp8_multi_head_attention": False,
}
"""Defaults of `TransformerConfig`: another value was meant by somebody."""


def te_recipe(config: Any, environment: Environment | None = None) -> TERecipe | None:
    """Return the recipe for a config; None where it has no low-precision matrix multiplications.

    Args:
        config: Megatron's `TransformerConfig`, or anything with its precision fields.
        environment: what `read_environment` returned. Variables that add to the recipe without contradicting the
            config become keywords of it; each is in the notes. `environment_findings` judges them.

    Raises:
        PrecisionConfigError: formats or schemes that no recipe exists for; lists all faults.
    """
    fp8, fp4 = getattr(config, "fp8", None), getattr(config, "fp4", None)
    if not fp8 and not fp4:
        return None
    scheme = _scheme_of(config, fp8, fp4)
    name, fields = _CLASSES[scheme.name]
    keywords: dict[str, object] = {}
    if scheme.family == "fp8" and scheme.name != "custom":
        keywords["fp8_format"] = _FORMATS[str(fp8)]
    keywords |= {keyword: getattr(config, path, _MEGATRON_DEFAULTS[path]) for keyword, path in fields.items()}
    keywords |= _stated_by_scheme(scheme)
    if scheme.name == "custom":
        keywords["qfactory"] = getattr(config, f"{scheme.family}_quantizer_factory")
    notes = [*_config_notes(config, scheme, fields), *_environment_notes(scheme, keywords, environment)]
    return TERecipe(name=name, scheme=scheme.name, keywords=keywords, notes=tuple(notes))


def _scheme_of(config: Any, fp8: object, fp4: object) -> Scheme:
    """Return the row of the config's scheme, or refuse the config."""
    findings: list[Finding] = []

    def fault(path: str, rule: str, value: object, remedy: str) -> None:
        findings.append(Finding(path=path, rule=rule, value=value, remedy=remedy))

    if fp8 and fp4:
        fault("fp4", f"must be None beside fp8={fp8!r}", fp4, "Choose one of the two.")
    if fp8 and fp8 not in _FORMATS:
        fault("fp8", f"must be {' or '.join(_FORMATS)}", fp8, "Use one of these, or None for no FP8.")
    if fp4 and fp4 != "e2m1":
        fault("fp4", "must be e2m1", fp4, "Use it, or None for no FP4.")
    family, table = ("fp8", FP8_SCHEMES) if fp8 else ("fp4", FP4_SCHEMES)
    value = getattr(config, f"{family}_recipe", None)
    found = table.get(str(getattr(value, "value", value)))  # Megatron's Fp8Recipe and Fp4Recipe are string enums
    if found is None:
        hint = did_you_mean(close_matches(str(value), table)) or "Use one of these."
        fault(f"{family}_recipe", f"must be one of {', '.join(table)}", value, hint)
    elif found.name == "custom" and not getattr(config, f"{family}_quantizer_factory", None):
        path = f"{family}_quantizer_factory"
        fault(path, f"must name a function where {family}_recipe is custom", None, "Give its dotted path.")
    if found is None or findings:
        raise PrecisionConfigError("No Transformer Engine recipe can be made of this config:", findings)
    return found


def _stated_by_scheme(scheme: Scheme) -> dict[str, object]:
    """Return keywords that Megatron leaves to their defaults and that the scheme's row decides."""
    if scheme.name == "blockwise":
        return {"use_f32_scales": not scheme.power_of_two_scale}
    if scheme.name == "nvfp4":
        weight = scheme.operand("weight")
        return {
            "disable_rht": not scheme.operand("input").hadamard,
            "disable_stochastic_rounding": not scheme.operand("grad_output").stochastic,
            "disable_2d_quantization": weight.row != weight.column,
        }
    return {}


def _config_notes(config: Any, scheme: Scheme, fields: dict[str, str]) -> list[str]:
    """Return what of a config does not reach Transformer Engine."""
    notes = []
    for path, default in _MEGATRON_DEFAULTS.items():
        value = getattr(config, path, default)
        if value != default and path not in fields.values():
            notes.append(f"{path}={value!r} has no effect: {_CLASSES[scheme.name][0]} gets no such keyword.")
    if getattr(config, "fp8_dot_product_attention", False) and scheme.name in ("mxfp8", "nvfp4"):
        since = "0.18" if scheme.name == "mxfp8" else "0.17"
        notes.append(f"fp8_dot_product_attention is passed on under {scheme.name} from megatron-core {since}.")
    if getattr(config, "fp8", None) and not getattr(config, "fp8_wgrad", True):
        notes.append("fp8_wgrad=False has no effect: Transformer Engine 2.0 dropped it, and wgrad runs in FP8.")
    if scheme.name == "custom" and scheme.family == "fp8":
        notes.append(f"fp8={config.fp8!r} switches FP8 on and no more: the factory chooses the formats.")
    if getattr(config, "fp8", None) == "hybrid" and scheme.name in ("blockwise", "mxfp8"):
        notes.append(f"fp8='hybrid' under {scheme.name} makes gradients E5M2; Transformer Engine's default is E4M3.")
    if getattr(config, "tp_only_amax_red", False):
        notes.append("tp_only_amax_red=True is no keyword: it chooses the group that autocast reduces amaxes over.")
    return notes


def _environment_notes(scheme: Scheme, keywords: dict[str, object], environment: Environment | None) -> list[str]:
    """Add to the keywords what the environment adds to the recipe; return a sentence about each variable."""
    notes = []
    for name, text in () if environment is None else environment.values.items():
        row = NVTE_VARIABLES[name]
        if row.keyword is None or not row.concerns(scheme.name, attention=bool(keywords.get("fp8_dpa"))):
            continue
        try:
            if not row.is_active(text):
                continue
        except ValueError:
            continue  # `environment_findings` has the error
        if text in row.contradicts or scheme.name in row.refused_by:
            notes.append(f"{name}={text} is not followed: it contradicts the config.")
        else:
            keywords[row.keyword] = row.parse(text)
            notes.append(f"{row.keyword}={row.parse(text)} comes from {name}={text}.")
    return notes
