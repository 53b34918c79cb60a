"""`ImportBuilder`: builds the report of an import, while an importer reads settings into fields.

    builder = ImportBuilder("Megatron-LM 0.20")
    builder.map("--fp8-format", fp8="hybrid")                            # a setting becomes a field
    builder.imply("--fp8-recipe", "delayed", fp8_recipe="delayed")       # a default decides
    builder.record("axolotl.tf32-off-in-place-of-auto", "tf32", "auto")  # no field has the meaning
    builder.finish("megatron_o2")

Each setting is mapped or reported, so that none is dropped silently.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from bridge.errors import PayloadError, PrecisionTypeError
from bridge.precision.stated_field import LAYER_COUNTS
from bridge.read.foreign.effective_fields import find_equivalent_recipe
from bridge.read.foreign.reports import DEFAULT_REMEDIES, ImportReport, Unmapped
from bridge.read.foreign.semantics import get_semantics
from bridge.read.foreign.table import format_sentence
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.target.fields import OWNER_DEFAULTS

DELAYED_SCALING_DEFAULTS = {
    name: OWNER_DEFAULTS["model"][name]
    for name in ("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo")
}
"""Setting of delayed scaling -> its default in the class of Megatron Core."""
MODES = ("fp32", "fp16", "bf16")
NO_FIELDS: Mapping[str, Any] = MappingProxyType({})


def require_field_values(setting: str, fields: Mapping[str, Any]) -> None:
    """Refuse a setting whose fields cannot have its value.

    Args:
        setting: The setting as it is written.
        fields: The fields that it becomes, with their values.

    Raises:
        PayloadError: A field cannot have the value.
    """
    try:
        MixedPrecisionConfig.from_dict(dict(fields))
    except PrecisionTypeError as error:
        remedy = "Correct the value there."
        raise PayloadError.of(setting, error.rule, error.value, remedy) from None


class ImportBuilder:
    """Builds the report of an import.

    Args:
        system: The name of the other system in the report.
    """

    def __init__(self, system: str) -> None:
        self.system = system
        self.fields: dict[str, Any] = {}
        """The fields of the precision that are stated so far."""
        self.mapped: dict[str, tuple[str, ...]] = {}
        """Setting -> the fields that it became."""
        self.unmapped: list[Unmapped] = []
        """The settings that cannot be converted exactly."""
        self.decided_by: str | None = None
        """The source that decides the mode, as a noun; None if the settings do."""
        self.default_mode: str | None = "fp32"
        """The mode of the system if nothing states one; None if it has no default."""

    def map(self, setting: str, /, **fields: Any) -> None:
        """Record that a setting became these fields.

        Args:
            setting: The setting as it is written.
            fields: The fields with their values. Empty: the value agrees with unstated fields.

        Raises:
            PayloadError: A field cannot have the value.
        """
        require_field_values(setting, fields)
        names = dict.fromkeys((*self.mapped.get(setting, ()), *fields))
        self.mapped[setting] = tuple(names)
        self.fields.update(fields)

    def report(self, setting: str, value: object, reason: str, detail: str, remedy: str) -> None:
        """Record that a setting cannot be converted exactly. The same record is kept once.

        Args:
            setting: The setting as it is written.
            reason: A key of `DEFAULT_REMEDIES`.
            detail: The difference, as a clause.
            remedy: The advice, as a sentence.
        """
        entry = Unmapped(setting, value, reason, detail, remedy)
        for record in self.unmapped:
            if entry == record and type(value) is type(record.value):  # 0 and False are two values
                return
        self.unmapped.append(entry)

    def record(
        self,
        sentence_name: str,
        setting: str,
        value: object,
        fields: Mapping[str, Any] = NO_FIELDS,
        /,
        **facts: object,
    ) -> None:
        """Record that a setting cannot be converted exactly, by a sentence of a table.

        Args:
            sentence_name: The sentence, such as "axolotl.documented-as-no-amp".
            setting: The setting as it is written.
            value: Its value, which the sentence may name.
            fields: The nearest fields, which are stated.
            facts: Further facts that the sentence names.
        """
        self.fields.update(fields)
        all_facts = {"system": self.system, "value": value, **facts}
        sentence = format_sentence(sentence_name, **all_facts)
        self.report(setting, value, sentence.reason, sentence.detail, sentence.remedy)

    def imply(self, setting: str, value: object, why: str = "", /, **fields: Any) -> None:
        """State and record a default of the system, which decides since the setting is not written.

        Args:
            value: Its default.
            why: The reason, as a clause; empty: the usual one.
            fields: The fields that the default becomes.
        """
        detail = why or f"it is not written, and {self.system} takes this value"
        self.report(setting, value, "implied default", detail, DEFAULT_REMEDIES["implied default"])
        self.fields.update(fields)

    def imply_scheme(
        self,
        spell: Callable[[str], str],
        *,
        fp8_recipe: str = "delayed",
        delayed: Mapping[str, Any] = DELAYED_SCALING_DEFAULTS,
        in_fp32: bool | None = None,
        layers: int | None = None,
        why: Mapping[str, str] = NO_FIELDS,
    ) -> None:
        """State and record the defaults of a system on Megatron Core, for fields not stated yet.

        Args:
            spell: Returns the name of the setting for the name of a field.
            fp8_recipe: The default FP8 recipe.
            delayed: The defaults of delayed scaling.
            in_fp32: The default of `grad_reduce_in_fp32`; None: there is none.
            layers: The default number of layers that `first_last_layers_bf16` keeps at each end;
                None: there is none.
            why: Field -> the reason for its default, as a clause, if it is not the usual one.
        """
        fields = self.fields
        defaults: dict[str, Any] = {}
        if fields.get("fp8"):
            defaults["fp8_recipe"] = fp8_recipe
        if fields.get("fp4"):
            defaults["fp4_recipe"] = "nvfp4"
        if fields.get("fp8") and fields.get("fp8_recipe", fp8_recipe) == "delayed":
            for name in DELAYED_SCALING_DEFAULTS:
                defaults[name] = delayed[name]
        if in_fp32 is not None:
            defaults["grad_reduce_in_fp32"] = in_fp32
        if fields.get("first_last_layers_bf16") and layers is not None:
            for name in LAYER_COUNTS:
                defaults[name] = layers
        for name, value in defaults.items():
            if name not in fields:
                self.imply(spell(name), value, why.get(name, ""), **{name: value})

    def leave_mode(self, decided_by: str, *, default: str | None = "fp32") -> None:
        """Leave the mode unstated, and record the source that decides it.

        Args:
            decided_by: The source, as a noun.
            default: The system's default mode; None if the source always states a mode.
        """
        self.decided_by = decided_by
        self.default_mode = default
        detail = f"nothing in the file states it; {decided_by} decides"
        remedy = "Give that."
        if default is not None:
            remedy = f"Give that, or take {default} with --assume-defaults."
        self.report("mode", None, "unsupported", detail, remedy)

    def finish(
        self,
        semantics: str = "",
        *,
        label: str = "",
        recipe: str | None = None,
        is_whole: bool = True,
    ) -> ImportReport:
        """Return the report.

        Args:
            semantics: A key of `semantics.SEMANTICS`; empty: the computation of Megatron Core.
            label: The run, if the file starts several.
            recipe: The equivalent recipe; None: it is looked up.
            is_whole: Whether the fields are the complete precision of the run. Otherwise no recipe
                is looked up.

        Raises:
            PayloadError: A field was stated with a value that it cannot have.
        """
        try:
            config = MixedPrecisionConfig.from_dict(self.fields, source=self.system)
        except PrecisionTypeError as error:
            raise PayloadError(f"{self.system}: {error} Correct the value there.") from None
        semantics = semantics or get_semantics(config)
        if self.decided_by is not None:
            semantics = "unstated"
            self._report_scheme_without_mode()
        # FP32 shards under FSDP are master weights. So a policy of FSDP has an equivalent recipe.
        is_of_megatron = semantics in (get_semantics(config), "fsdp_policy")
        if recipe is None and is_whole and is_of_megatron:
            recipe = find_equivalent_recipe(config)
        return ImportReport(
            config=config,
            semantics=semantics,
            unmapped=tuple(self.unmapped),
            mapped=dict(self.mapped),
            recipe=recipe,
            label=label,
            decided_by=self.decided_by,
            default_mode=self.default_mode,
        )

    def _report_scheme_without_mode(self) -> None:
        """Record FP8 or FP4 if no mode is stated with it."""
        for name in ("fp8", "fp4"):
            if not self.fields.get(name):
                continue
            detail = (
                f"no mode is stated with it; {self.decided_by} decides in what all but its GEMMs "
                "runs"
            )
            remedy = "State bf16, fp16 or fp32 with it."
            self.report(name, self.fields[name], "unsupported", detail, remedy)
