"""Builders of an import's and an export's report: each setting is mapped or reported, so that none is dropped silently.

    builder = ImportBuilder("Megatron-LM 0.20")
    builder.map("--fp8-format", fp8="hybrid")                        # written there, stated here
    builder.implied("--fp8-recipe", "delayed", fp8_recipe="delayed")  # the system's default decides
    builder.record("axolotl.auto-would-turn", "tf32", "auto")         # no field holds it: a row of rows/axolotl.yaml
    builder.finish("megatron_o2")

An export finishes only with every stated field accounted for: a field that the exporter did not
mention agrees with the other system already, has no effect, or is reported as unmapped.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from bridge.errors import PayloadError, PrecisionTypeError
from bridge.precision.config import FIELD_DEFAULTS, MEGATRON_FIELDS
from bridge.precision.fields import LAYER_COUNTS
from bridge.precision.mode import mode_of, scheme_of
from bridge.precision.statements import field_names
from bridge.read.meaning import recipe_named, semantics_of, unread_fields
from bridge.read.reports import ExportReport, ImportReport, Unmapped
from bridge.read.table import UnwrittenFields, sentence_named
from bridge.registry.config import MixedPrecisionConfig
from bridge.runtime.pytorch.loop import checked
from bridge.target.fields import DEFAULTS

DELAYED = {
    name: DEFAULTS["model"][name]
    for name in ("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo")
}
"""Settings of delayed scaling -> the defaults of Megatron Core's own class."""

MODES = ("fp32", "fp16", "bf16")
OFF = {
    name: default
    for name, default in FIELD_DEFAULTS.items()
    if default is False or name in MEGATRON_FIELDS
}
OFF |= {"fp8": None, "fp4": None, "loss_scale": None, "fp8_wgrad": True}
"""Field -> the value of it that another system honours by not having the field."""
ABSENT = {
    "pipeline_dtype": (
        "does not say in what pipeline stages send activations",
        "Nothing to do without such stages.",
    ),
    "tf32": (
        "does not decide about TF32",
        "Set torch.backends.cuda.matmul.fp32_precision in the program.",
    ),
    "modules": (
        "chooses no precision per module",
        "The run's precision there in every module; drop the rows for it.",
    ),
    "first_last_layers_bf16": (
        "cannot keep whole layers in BF16",
        "Expect FP8 in the first and last layer too.",
    ),
}


class ImportBuilder:
    """The report of an import while the settings of a system are read into fields."""

    def __init__(self, system: str) -> None:
        self.system = system
        self.fields: dict[str, Any] = {}
        self.mapped: dict[str, tuple[str, ...]] = {}
        self.unmapped: list[Unmapped] = []
        self.decided_by: str | None = None
        self.default_mode: str | None = "fp32"

    def map(self, setting: str, /, **fields: Any) -> None:
        """Record that `setting` became these fields.

        None at all: it agrees with what is unstated.
        """
        try:
            MixedPrecisionConfig.from_dict(dict(fields))
        except PrecisionTypeError as error:
            raise PayloadError.of(
                setting, error.rule, error.value, "Correct the value there."
            ) from None
        self.mapped[setting] = tuple(dict.fromkeys((*self.mapped.get(setting, ()), *fields)))
        self.fields.update(fields)

    def report(self, setting: str, value: object, reason: str, detail: str, remedy: str) -> None:
        """Record that `setting` cannot be converted exactly."""
        entry = Unmapped(setting, value, reason, detail, remedy)
        if not any(entry == other and type(value) is type(other.value) for other in self.unmapped):
            self.unmapped.append(entry)

    def record(
        self,
        row: str,
        setting: str,
        value: object,
        state: Mapping[str, Any] = MappingProxyType({}),
        /,
        **facts: object,
    ) -> None:
        """Record that `setting` cannot be converted exactly, in the words of a row: "axolotl.documented-as-no-amp".

        `facts` stand in its words, as the value does; `state` are the fields that it comes to all
        the same.
        """
        self.fields.update(state)
        words = sentence_named(row, **{"system": self.system, "value": value, **facts})
        self.report(setting, value, words.reason, words.detail, words.remedy)

    def implied(self, setting: str, value: object, why: str = "", /, **fields: Any) -> None:
        """Record a default of the system that decides, since the setting is not written, and state it."""
        detail = why or f"it is not written, and {self.system} takes this value"
        self.report(
            setting, value, "implied default", detail, "Write it down if the run depends on it."
        )
        self.fields.update(fields)

    def imply_scheme(
        self,
        spell: Callable[[str], str],
        *,
        fp8_recipe: str = "delayed",
        delayed: Mapping[str, Any] = DELAYED,
        in_fp32: bool | None = None,
        layers: int | None = None,
        why: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """State the defaults of a system over Megatron that decide, where the fields are not stated yet.

        `spell` turns a field's name into the setting's; `layers` are those that
        `first_last_layers_bf16` keeps. None for `in_fp32` or `layers`: nothing to state. `why` has
        what is special about the default of a field.
        """
        fields = self.fields
        defaults: dict[str, Any] = {"fp8_recipe": fp8_recipe} if fields.get("fp8") else {}
        defaults |= {"fp4_recipe": "nvfp4"} if fields.get("fp4") else {}
        if fields.get("fp8") and fields.get("fp8_recipe", fp8_recipe) == "delayed":
            defaults |= {name: delayed[name] for name in DELAYED}
        defaults |= {} if in_fp32 is None else {"grad_reduce_in_fp32": in_fp32}
        if fields.get("first_last_layers_bf16") and layers is not None:
            defaults |= dict.fromkeys(LAYER_COUNTS, layers)
        for name, value in defaults.items():
            if name not in fields:
                self.implied(spell(name), value, why.get(name, ""), **{name: value})

    def leave_mode(self, decided_by: str, *, default: str | None = "fp32") -> None:
        """Leave the mode unstated, and record what decides it, a noun, and the system's own default mode.

        Without a default, what decides always states a mode itself.
        """
        self.decided_by, self.default_mode = decided_by, default
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
        """Return the report; PayloadError should a field have been given a value it cannot hold.

        Without `semantics` they are those of Megatron Core. No recipe is named where the fields are
        not the whole precision of the run.
        """
        try:
            config = MixedPrecisionConfig.from_dict(self.fields, source=self.system)
        except PrecisionTypeError as error:
            raise PayloadError(f"{self.system}: {error} Correct the value there.") from None
        semantics = semantics or semantics_of(config)
        if self.decided_by is not None:
            semantics = "unstated"
            for scheme in ("fp8", "fp4"):
                if self.fields.get(scheme):
                    detail = f"no mode is stated with it; {self.decided_by} decides in what all but its GEMMs runs"
                    remedy = "State bf16, fp16 or fp32 with it."
                    self.report(scheme, self.fields[scheme], "unsupported", detail, remedy)
        same = is_whole and semantics in (
            semantics_of(config),
            "fsdp_policy",
        )  # FP32 shards are FP32 masters
        return ImportReport(
            config=config,
            semantics=semantics,
            unmapped=tuple(self.unmapped),
            mapped=dict(self.mapped),
            recipe=recipe or (recipe_named(config) if same else None),
            label=label,
            decided_by=self.decided_by,
            default_mode=self.default_mode,
        )


class ExportBuilder:
    """The report of an export while stated fields are written into settings of a system.

    PrecisionConfigError for a config that can never be right; nothing of it would mean anything
    elsewhere either.
    """

    def __init__(self, config: object, system: str) -> None:
        self.config = config = checked(config)
        self.system = system
        self.values = config.to_dict(full=True)
        self.exported_mode = mode_of(config)
        """The mode that the other system reads in the payload."""
        self.mapped: dict[str, tuple[str, ...]] = {}
        self.unmapped: dict[str, list[Unmapped]] = {}
        self.files: dict[str, str] = {}

    def map(self, field: str, *settings: str) -> None:
        """Record that `field`, if it is stated, became these settings too.

        None: it holds there without one.
        """
        if field in self.config.stated:
            self.mapped[field] = tuple(dict.fromkeys((*self.mapped.get(field, ()), *settings)))

    def map_dtype(self, field: str, *settings: str) -> bool:
        """Map a dtype to the settings of the mode, where it is that of the mode.

        Return whether it is.
        """
        follows = self.values[field] in (None, mode_of(self.config))
        if follows:
            self.map(field, *settings)
        return follows

    def report(self, field: str, reason: str, detail: str, remedy: str) -> None:
        """Record that `field` cannot be converted exactly, stated or not."""
        entry = Unmapped(field, self.values[field], reason, detail, remedy)
        self.unmapped.setdefault(field, []).append(entry)

    def record(self, row: str, field: str, /, **facts: object) -> None:
        """Record that `field` cannot be converted exactly, stated or not, in the words of a row."""
        words = sentence_named(row, system=self.system, **facts)
        self.report(field, words.reason, words.detail, words.remedy)

    def record_if_stated(self, row: str, /, *fields: str, **facts: object) -> None:
        """Record that fields cannot be converted exactly, each that is stated."""
        for field in fields:
            if field in self.config.stated:
                self.record(row, field, **facts)

    def finish(
        self, payload: Any, unwritten: Sequence[UnwrittenFields] = (), **facts: object
    ) -> ExportReport:
        """Return the report, after stated fields not mentioned so far are mapped or reported, by a row of `unwritten`.

        In the words of a row stand `facts`, the values of all fields, and `mode`, `scheme` and
        `system`.
        """
        unread = unread_fields(self.config)
        words = {
            "mode": mode_of(self.config),
            "scheme": scheme_of(self.config),
            "system": self.system,
        }
        known = {**self.values, **words, **facts}
        for field in field_names(self.config):
            if field not in self.config.stated or field in self.mapped or field in self.unmapped:
                continue
            why, value = unread.get(field), self.values[field]
            about = [
                row.sentence
                for row in unwritten
                if field in row.fields and (row.when is None or known[row.when])
            ]
            if field == self.exported_mode and not value:
                detail = f"what {self.system} does instead is {field} to Megatron"
                self.report(
                    field, "semantics", detail, "See the record of the mode that was stated."
                )
            elif (field in OFF and value == OFF[field]) or (
                why is not None and value == getattr(type(self.config), field)
            ):
                self.map(field)
            elif why is not None:
                self.report(
                    field, "dead knob", why, "Drop it: it changes nothing in this recipe either."
                )
            elif about:
                self.report(field, *about[0].filled(known))
            else:
                detail, remedy = ABSENT.get(field, ("has no such setting", "Do without it there."))
                reason = "semantics" if field == "modules" else "unsupported"
                self.report(field, reason, f"{self.system} {detail}", remedy)
        names = field_names(self.config)
        unmapped = tuple(entry for name in names for entry in self.unmapped.get(name, ()))
        mapped = {
            name: self.mapped[name]
            for name in names
            if name in self.mapped and name not in self.unmapped
        }
        return ExportReport(payload=payload, unmapped=unmapped, mapped=mapped, files=self.files)
