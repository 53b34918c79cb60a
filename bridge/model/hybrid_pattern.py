"""The layer pattern of a hybrid model: layers, pipeline chunks and prediction layers.

    pattern = HybridPattern.from_model({"hybrid_layer_pattern": "MEM*|EMEM/*E/*E"})
    pattern.layers       # 'MEM*EMEM'
    pattern.chunks       # (4, 4)
    pattern.mtp          # '*E', at two depths

Each letter is a layer. ``|`` ends a pipeline chunk. ``/`` begins the pattern of a prediction depth,
which is the same for all depths.

Source: Megatron-LM models/hybrid/hybrid_layer_allocation.py and hybrid_model.py, 0.19.2 and main of
2026-08-22. Megatron-core 0.16.1 knows only the first four letters, and calls the field
`hybrid_override_pattern`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bridge.errors import Finding
from bridge.model.section import Section, read_section

KIND_BY_LETTER = {"M": "mamba", "*": "attention", "+": "latent_attention", "-": "mlp", "E": "moe"}
"""Letter of a pattern -> the kind of the layer."""
UNPLANNED_LETTERS = {"G": "gated delta net", "D": "DeepSeek sparse attention"}
"""Letter that Megatron knows and the plan does not know -> the name of the layer."""
CHUNK, DEPTH = "|", "/"
PATTERN_FIELDS = ("hybrid_layer_pattern", "hybrid_override_pattern")
"""Names of the field of the pattern: the newer name, and the name in megatron-core 0.16.1."""
RATIO_FIELDS = ("hybrid_attention_ratio", "hybrid_mlp_ratio")
"""Arguments from which older model classes derive a pattern."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HybridPattern:
    """The layers of a hybrid model, by its pattern."""

    field: str = "hybrid_layer_pattern"
    """The field of the model that has the pattern."""
    layers: str
    """A letter for each layer of the decoder, in order."""
    chunks: tuple[int, ...] = ()
    """The number of layers of each pipeline chunk, in order of execution.

    Empty: the pattern does not divide the layers into chunks.
    """
    mtp: str = ""
    """A letter for each layer inside a multi-token-prediction layer."""
    depths: int = 0
    """The number of multi-token-prediction depths."""
    faults: tuple[Finding, ...] = ()

    @classmethod
    def from_model(cls, model: object) -> HybridPattern | None:
        """Return the pattern of a hybrid model, or None for another model.

        Args:
            model: The section of the model, a mapping or an object.
        """
        section = read_section("model", model)
        fields = [name for name in PATTERN_FIELDS if section.get_stated(name)]
        if not fields:
            return _make_missing_pattern(section)
        field = fields[0]
        main, *depths = str(section.get_stated(field)).replace(" ", "").split(DEPTH)
        depths = list(filter(None, depths))
        depth_pattern = str(section.get_stated("mtp_hybrid_override_pattern", ""))
        if depth_pattern and not depths:
            depths = [depth_pattern] * section.get_stated("mtp_num_layers", 0)
        layers = main.replace(CHUNK, "")
        letters = layers + "".join(depths)
        faults: list[Finding] = []
        if len(fields) > 1:
            rule = "must not be stated together with hybrid_override_pattern"
            faults.append(make_model_fault(field, rule, main, "State one of them."))
        faults += _check_letters(field, letters)
        if len(set(depths)) > 1:
            rule = "must have the same pattern at each multi-token-prediction depth"
            faults.append(make_model_fault(field, rule, DEPTH.join(depths)))
        faults += _check_counts(
            section, field, len(layers), len(depths), has_experts="E" in letters
        )
        chunks: tuple[int, ...] = ()
        if CHUNK in main:
            chunks = tuple(map(len, main.split(CHUNK)))
        mtp = ""
        if depths:
            mtp = depths[0]
        return cls(
            field=field,
            layers=layers,
            chunks=chunks,
            mtp=mtp,
            depths=len(depths),
            faults=tuple(faults),
        )

    @property
    def unplanned_letters(self) -> dict[str, str]:
        """Letter in the pattern that the plan does not know -> the name of the layer."""
        letters = self.layers + self.mtp
        return {letter: name for letter, name in UNPLANNED_LETTERS.items() if letter in letters}

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer of the decoder."""
        return _get_layer_kinds(self.layers)

    @property
    def mtp_kinds(self) -> tuple[str, ...]:
        """The kind of each layer inside a multi-token-prediction layer."""
        return _get_layer_kinds(self.mtp)


def _get_layer_kinds(letters: str) -> tuple[str, ...]:
    """Return the kind of layer of each letter. An unknown letter counts as an MLP."""
    return tuple(KIND_BY_LETTER.get(letter, "mlp") for letter in letters)


def format_pattern(kinds: Sequence[str]) -> str:
    """Return the pattern of layers of these kinds."""
    letter_by_kind = {kind: letter for letter, kind in KIND_BY_LETTER.items()}
    return "".join(letter_by_kind[kind] for kind in kinds)


def _make_missing_pattern(model: Section) -> HybridPattern | None:
    """Return a pattern with a fault if a hybrid model has no pattern. None for another model."""
    fields = [name for name in (*RATIO_FIELDS, "is_hybrid_model") if model.get_stated(name)]
    if not fields:
        return None
    rule = "cannot plan: a hybrid model needs a letter for each of its layers"
    remedy = "State hybrid_layer_pattern, M-M*- say."
    fault = make_model_fault(fields[0], rule, model.get_stated(fields[0]), remedy)
    return HybridPattern(layers="-", faults=(fault,))


def _check_letters(field: str, letters: str) -> list[Finding]:
    unknown = sorted(set(letters) - {*KIND_BY_LETTER, *UNPLANNED_LETTERS})
    if unknown:
        return [
            make_model_fault(field, f"must consist of {' '.join(KIND_BY_LETTER)}", "".join(unknown))
        ]
    if {"*", "+"} <= set(letters):
        rule = "must not have both * and +, which Megatron refuses"
        return [make_model_fault(field, rule, letters, "Use one of them.")]
    return []


def _check_counts(
    model: Section, field: str, layers: int, depths: int, *, has_experts: bool
) -> list[Finding]:
    faults: list[Finding] = []
    if has_experts and not model.get_stated("num_moe_experts"):
        rule = f"must be stated where {field} has the letter E"
        faults.append(
            make_model_fault("num_moe_experts", rule, None, "State the number of experts.")
        )
    stated = model.get_stated("num_layers")
    if stated and stated != layers:
        rule = f"must have a letter for each of the {stated} layers"
        faults.append(make_model_fault(field, rule, layers, "Correct it or num_layers."))
    predicted = model.get_stated("mtp_num_layers")
    is_repeated = bool(model.get_stated("mtp_use_repeated_layer"))
    if predicted and predicted != depths and not (is_repeated and depths):
        rule = f"must be the number of multi-token-prediction depths in {field}, which is {depths}"
        remedy = "Write a / and the pattern for each depth, or correct mtp_num_layers."
        faults.append(make_model_fault("mtp_num_layers", rule, predicted, remedy))
    return faults


def make_model_fault(field: str, rule: str, value: object, remedy: str = "Correct it.") -> Finding:
    """Return a finding about a field of the model."""
    return Finding(path=f"model.{field}", rule=rule, value=value, remedy=remedy)
