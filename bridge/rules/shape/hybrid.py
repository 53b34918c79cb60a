"""The layer pattern of a hybrid model: its layers, its pipeline chunks and its multi-token-prediction layers.

    pattern = HybridPattern.of({"hybrid_layer_pattern": "MEM*|EMEM/*E/*E"})
    pattern.layers       # 'MEM*EMEM'
    pattern.chunks       # (4, 4)
    pattern.mtp          # '*E', at two depths

Each letter is a layer. ``|`` ends a pipeline chunk, and ``/`` begins the pattern of a prediction depth; all depths have
the same one. Source: Megatron-LM models/hybrid/hybrid_layer_allocation.py and hybrid_model.py, 0.19.2 and main of
2026-08-22. Megatron-core 0.16.1 has the first four letters, and calls the field `hybrid_override_pattern`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bridge.rules.fields import read_field, whole_number

LETTERS = {"M": "mamba", "*": "attention", "+": "latent_attention", "-": "mlp", "E": "moe"}
"""Letter of a pattern -> kind of that layer."""
UNPLANNED = {"G": "Gated DeltaNet", "D": "DeepSeek sparse attention"}
"""Letters that Megatron knows and the plan does not -> their layer."""
CHUNK, DEPTH = "|", "/"
RATIOS = ("hybrid_attention_ratio", "hybrid_mlp_ratio")
"""Arguments of older model classes, from which they derive a pattern."""

HybridFault = tuple[str, str, object, str]
"""Field, rule, value and remedy of something that no model can be built with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HybridPattern:
    """A pattern after it was read."""

    layers: str
    """A letter for each layer of the decoder, in order."""
    chunks: tuple[int, ...] = ()
    """Layers of each pipeline chunk in order of execution; empty where the pattern does not name the chunks."""
    mtp: str = ""
    """A letter for each layer inside a multi-token-prediction layer."""
    depths: int = 0
    faults: tuple[HybridFault, ...] = ()

    @classmethod
    def of(cls, model: Any) -> HybridPattern | None:
        """Return the pattern of a hybrid model, None where the model is none."""
        fields = [name for name in ("hybrid_layer_pattern", "hybrid_override_pattern") if _text(model, name)]
        if not fields:
            return _without_pattern(model)
        field = fields[0]
        main, *depths = _text(model, field).replace(" ", "").split(DEPTH)
        depths = [depth for depth in depths if depth] or _legacy_depths(model)
        letters = main.replace(CHUNK, "")
        faults = [
            *([(field, "must not be stated together with hybrid_override_pattern", main, "State one of them")])
            * (len(fields) - 1),
            *_letter_faults(field, letters + "".join(depths)),
        ]
        if len(set(depths)) > 1:
            rule = "must have the same pattern at each multi-token-prediction depth"
            faults.append((field, rule, DEPTH.join(depths), "Correct it"))
        faults += _count_faults(model, field, len(letters), len(depths), has_experts="E" in letters + "".join(depths))
        return cls(
            layers=letters,
            chunks=tuple(map(len, main.split(CHUNK))) if CHUNK in main else (),
            mtp=depths[0] if depths else "",
            depths=len(depths),
            faults=tuple(faults),
        )

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kind of each layer of the decoder."""
        return tuple(LETTERS.get(letter, "mlp") for letter in self.layers)

    @property
    def mtp_kinds(self) -> tuple[str, ...]:
        """Kind of each layer inside a multi-token-prediction layer."""
        return tuple(LETTERS.get(letter, "mlp") for letter in self.mtp)


def _without_pattern(model: Any) -> HybridPattern | None:
    """Return the fault of a hybrid model whose layers are not named, None for a model that is no hybrid."""
    ratios = [name for name in RATIOS if read_field(model, name, 0) not in (0, "0", "0.0")]
    marked = str(read_field(model, "is_hybrid_model", default=False)).lower() in ("true", "1")
    if not marked and not ratios:
        return None
    field = ratios[0] if ratios else "is_hybrid_model"
    rule = "cannot plan: a hybrid model needs a letter for each of its layers"
    fault = (field, rule, read_field(model, field), "State hybrid_layer_pattern, M-M*- say")
    return HybridPattern(layers="-", faults=(fault,))


def _legacy_depths(model: Any) -> list[str]:
    """Return the pattern of each prediction depth as `mtp_hybrid_override_pattern` and `mtp_num_layers` state it."""
    pattern = _text(model, "mtp_hybrid_override_pattern")
    depths = whole_number(read_field(model, "mtp_num_layers", 0)) or 0
    return [pattern] * depths if pattern else []


def _letter_faults(field: str, letters: str) -> list[HybridFault]:
    unknown = sorted(set(letters) - set(LETTERS))
    unplanned = [letter for letter in unknown if letter in UNPLANNED]
    if unplanned:
        names = " and ".join(f"{letter} ({UNPLANNED[letter]})" for letter in unplanned)
        return [(field, f"cannot plan: {names}", "".join(unplanned), "Plan a model without these layers")]
    if unknown:
        return [(field, f"must consist of {' '.join(LETTERS)}", "".join(unknown), "Correct it")]
    if {"*", "+"} <= set(letters):
        return [(field, "must not have both * and +, which Megatron refuses", letters, "Use one of them")]
    return []


def _count_faults(model: Any, field: str, layers: int, depths: int, *, has_experts: bool) -> list[HybridFault]:
    """Return the numbers of layers and experts that contradict a pattern."""
    faults: list[HybridFault] = []
    if has_experts and not read_field(model, "num_moe_experts"):
        rule = f"must be stated where {field} has the letter E"
        faults.append(("num_moe_experts", rule, None, "State the number of experts"))
    stated = whole_number(read_field(model, "num_layers", 0))
    if stated and stated != layers:
        rule = f"must have a letter for each of the {stated} layers"
        faults.append((field, rule, layers, "Correct it or num_layers"))
    predicted = whole_number(read_field(model, "mtp_num_layers", 0))
    is_repeated = bool(read_field(model, "mtp_use_repeated_layer", default=False))
    if predicted and predicted != depths and not (is_repeated and depths):
        rule = f"must be the number of multi-token-prediction depths in {field}, which is {depths}"
        remedy = "Write a / and the pattern for each depth, or correct mtp_num_layers"
        faults.append(("mtp_num_layers", rule, predicted, remedy))
    return faults


def _text(model: Any, name: str) -> str:
    return str(read_field(model, name, ""))
