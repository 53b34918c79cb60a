"""`ImportBuilder`: the report of an import, while the settings of a system are read into fields.

    builder = ImportBuilder("Megatron-LM 0.20")
    builder.map("--fp8-format", fp8="hybrid")                         # a setting becomes a field
    builder.implied("--fp8-recipe", "delayed", fp8_recipe="delayed")  # the system's default decides
    builder.record("axolotl.tf32-off-in-place-of-auto", "tf32", "auto")         # no field has the meaning
    builder.finish("megatron_o2")

Each setting is mapped or reported, so that none is dropped silently. `record` takes the name of a
sentence in the table of a system.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from bridge.errors import PayloadError, PrecisionTypeError
from bridge.precision.fields import LAYER_COUNTS
from bridge.read.foreign.effective_fields import find_equivalent_recipe
from bridge.read.foreign.reports import DEFAULT_REMEDIES, ImportReport, Unmapped
from bridge.read.foreign.semantics import get_semantics
from bridge.read.foreign.table import format_sentence
from bridge.registry.config import MixedPrecisionConfig
from bridge.target.fields import OWNER_DEFAULTS

DELAYED_SCALING_DEFAULTS = {
    name: OWNER_DEFAULTS["model"][name]
    for name in ("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo")
}
"""Settings of delayed scaling -> the defaults of Megatron Core's own class."""
MODES = ("fp32", "fp16", "bf16")
NO_FIELDS: Mapping[str, Any] = MappingProxyType({})


class ImportBuilder:
    """The report of an import."""

    def __init__(self, system: str) -> None:
        self.system = system
        self.fields: dict[str, Any] = {}
        """The fields of the precision that are stated so far."""
        self.mapped: dict[str, tuple[str, ...]] = {}
        self.unmapped: list[Unmapped] = []
        self.decided_by: str | None = None
        self.default_mode: str | None = "fp32"

    def map(self, setting: str, /, **fields: Any) -> None:
        """Record that a setting became these fields; without fields it agrees with what is unstated.

        Raises:
            PayloadError: A field cannot have the value.
        """
        try:
            MixedPrecisionConfig.from_dict(dict(fields))
        except PrecisionTypeError as error:
            remedy = "Correct the value there."
            raise PayloadError.of(setting, error.rule, error.value, remedy) from None
        names = dict.fromkeys((*self.mapped.get(setting, ()), *fields))
        self.mapped[setting] = tuple(names)
        self.fields.update(fields)

    def report(self, setting: str, value: object, reason: str, detail: str, remedy: str) -> None:
        """Record that a setting cannot be converted exactly; the same is recorded once."""
        entry = Unmapped(setting, value, reason, detail, remedy)
        for other in self.unmapped:
            if entry == other and type(value) is type(other.value):  # 0 and False are two values
                return
        self.unmapped.append(entry)

    def record(
        self,
        sentence: str,
        setting: str,
        value: object,
        fields: Mapping[str, Any] = NO_FIELDS,
        /,
        **facts: object,
    ) -> None:
        """Record that a setting cannot be converted exactly, in the words of a sentence.

        Args:
            sentence: Its name, "axolotl.documented-as-no-amp".
            setting: The setting.
            value: Its value, which may stand in the words.
            fields: The fields that the setting comes to all the same.
            facts: What else stands in the words.
        """
        self.fields.update(fields)
        words = format_sentence(sentence, **{"system": self.system, "value": value, **facts})
        self.report(setting, value, words.reason, words.detail, words.remedy)

    def imply(self, setting: str, value: object, why: str = "", /, **fields: Any) -> None:
        """State a default of the system that decides, since the setting is not written, and record it."""
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
        """State the defaults of a system over Megatron that decide, where the fields are not stated yet.

        Args:
            spell: Turns the name of a field into that of the setting.
            fp8_recipe: The system's FP8 recipe.
            delayed: Its settings of delayed scaling.
            in_fp32: Whether it reduces gradients in FP32, or None for a system without a default.
            layers: The layers that `first_last_layers_bf16` keeps at each end, or None.
            why: Field -> a special clause about its default.
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
        """Leave the mode unstated, and record what decides it.

        Args:
            decided_by: The source that decides, as a noun.
            default: The system's own default mode, or None where the source always states a mode.
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
            semantics: A key of `semantics.SEMANTICS`; those of Megatron Core where it is empty.
            label: The run, where the file starts several.
            recipe: The recipe of the same meaning; None: it is looked up.
            is_whole: Whether the fields are the whole precision of the run. Otherwise no recipe is
                looked up.

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
        is_of_megatron = semantics in (
            get_semantics(config),
            "fsdp_policy",
        )  # FP32 shards are masters
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
        """Record FP8 or FP4 for which no mode is stated."""
        for scheme in ("fp8", "fp4"):
            if self.fields.get(scheme):
                detail = f"no mode is stated with it; {self.decided_by} decides in what all but its GEMMs runs"
                remedy = "State bf16, fp16 or fp32 with it."
                self.report(scheme, self.fields[scheme], "unsupported", detail, remedy)
