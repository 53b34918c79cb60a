"""`ExportBuilder`: builds the report of an export, while an exporter writes fields into settings.

    builder = ExportBuilder(config, "DeepSpeed 0.19")
    builder.map("bf16", "bf16.enabled")                             # a field becomes a setting
    builder.record("pytorch.casts-fp32-weights", "params_dtype")    # no setting has its meaning
    builder.finish({"bf16": {"enabled": True}})

No stated field is lost. For each field that the exporter did not mention, `finish` decides: the
field agrees with the other system, has no effect, or is reported as unmapped.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bridge.precision.mode import get_mode, get_scheme
from bridge.precision.precision_config import FIELD_DEFAULTS, MEGATRON_FIELDS
from bridge.precision.statements import list_field_names
from bridge.read.foreign.effective_fields import collect_inert_everywhere
from bridge.read.foreign.reports import ExportReport, Unmapped
from bridge.read.foreign.sentence import Sentence
from bridge.read.foreign.table import UnwrittenFields, format_sentence
from bridge.runtime.pytorch.loop import finalize_config

INACTIVE_VALUES = {
    name: default
    for name, default in FIELD_DEFAULTS.items()
    if default is False or name in MEGATRON_FIELDS
}
INACTIVE_VALUES |= {"fp8": None, "fp4": None, "loss_scale": None, "fp8_wgrad": True}
"""Field -> the value with which a system that does not have the field behaves the same."""
NO_SETTING_REASONS: Mapping[str, tuple[str, str]] = {
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
"""Field -> a clause about a system without such a setting, and the remedy."""


class ExportBuilder:
    """Builds the report of an export.

    Args:
        config: The precision.
        system: The name of the other system in the report.

    Raises:
        PrecisionConfigError: The config contradicts itself.
    """

    def __init__(self, config: object, system: str) -> None:
        self.config = finalize_config(config)
        self.system = system
        self.values = self.config.to_dict(full=True)
        """Field -> its value, stated or not."""
        self.exported_mode = get_mode(self.config)
        """The mode that the other system reads from the payload. The exporter may change it."""
        self.mapped: dict[str, tuple[str, ...]] = {}
        """Stated field -> the settings that it became."""
        self.unmapped: dict[str, list[Unmapped]] = {}
        """Field -> its records."""
        self.files: dict[str, str] = {}
        """Name of a file that the payload names -> its text."""

    def map(self, field: str, *settings: str) -> None:
        """Record that a field, if it is stated, became these settings.

        Args:
            settings: The settings. Empty: the other system behaves so without a setting.
        """
        if field in self.config.stated:
            names = dict.fromkeys((*self.mapped.get(field, ()), *settings))
            self.mapped[field] = tuple(names)

    def map_dtype(self, field: str, *settings: str) -> bool:
        """Map a dtype to the settings of the mode if the two are equal. Return whether they are."""
        follows_mode = self.values[field] in (None, get_mode(self.config))
        if follows_mode:
            self.map(field, *settings)
        return follows_mode

    def report(self, field: str, reason: str, detail: str, remedy: str) -> None:
        """Record that a field, stated or not, cannot be converted exactly.

        Args:
            reason: A key of `DEFAULT_REMEDIES`.
            detail: The difference in the other system, as a clause.
            remedy: The advice, as a sentence.
        """
        entry = Unmapped(field, self.values[field], reason, detail, remedy)
        self.unmapped.setdefault(field, []).append(entry)

    def record(self, sentence_name: str, field: str, /, **facts: object) -> None:
        """Record that a field, stated or not, cannot be converted exactly.

        Args:
            sentence_name: The sentence of a table that explains it, "SYSTEM.SENTENCE".
            facts: The facts that the sentence names.
        """
        sentence = format_sentence(sentence_name, system=self.system, **facts)
        self.report(field, sentence.reason, sentence.detail, sentence.remedy)

    def record_if_stated(self, sentence_name: str, /, *fields: str, **facts: object) -> None:
        """Record each of several fields that is stated, as `record` does."""
        for field in fields:
            if field in self.config.stated:
                self.record(sentence_name, field, **facts)

    def finish(
        self, payload: Any, unwritten: Sequence[UnwrittenFields] = (), **facts: object
    ) -> ExportReport:
        """Return the report, with each stated field that was not mentioned mapped or reported.

        Args:
            payload: The settings.
            unwritten: Sentences about fields without a setting, from the table of the system.
            facts: Facts that these sentences name. They may also name the value of any field, and
                `mode`, `scheme` and `system`.
        """
        all_facts = {
            **self.values,
            "mode": get_mode(self.config),
            "scheme": get_scheme(self.config),
            "system": self.system,
            **facts,
        }
        inert = collect_inert_everywhere(self.config)
        fields = list_field_names(self.config)
        for field in fields:
            is_mentioned = field in self.mapped or field in self.unmapped
            if field in self.config.stated and not is_mentioned:
                self._map_or_report(field, inert.get(field), unwritten, all_facts)
        unmapped: list[Unmapped] = []
        mapped: dict[str, tuple[str, ...]] = {}
        for field in fields:
            unmapped += self.unmapped.get(field, ())
            if field in self.mapped and field not in self.unmapped:
                mapped[field] = self.mapped[field]
        return ExportReport(
            payload=payload, unmapped=tuple(unmapped), mapped=mapped, files=self.files
        )

    def _map_or_report(
        self,
        field: str,
        inert_reason: str | None,
        unwritten: Sequence[UnwrittenFields],
        facts: Mapping[str, object],
    ) -> None:
        """Map or report a stated field that the exporter did not mention.

        Args:
            inert_reason: The reason why it has no effect in this config. None: it has an effect.
            unwritten: Sentences of the system's table about fields without a setting.
            facts: Facts that these sentences name.
        """
        value = self.values[field]
        is_inert_default = inert_reason is not None and value == getattr(type(self.config), field)
        is_inactive = field in INACTIVE_VALUES and value == INACTIVE_VALUES[field]
        sentence = _find_sentence(field, unwritten, facts)
        if field == self.exported_mode and not value:
            # The recipe states that this mode is off. The other system computes in it regardless.
            detail = f"what {self.system} does instead is {field} to Megatron"
            remedy = "See the record of the mode that was stated."
            self.report(field, "semantics", detail, remedy)
        elif is_inert_default or is_inactive:
            self.map(field)
        elif inert_reason is not None:
            remedy = "Drop it: it changes nothing in this recipe either."
            self.report(field, "dead knob", inert_reason, remedy)
        elif sentence is not None:
            self.report(field, *sentence.fill(facts))
        else:
            self._report_without_setting(field)

    def _report_without_setting(self, field: str) -> None:
        """Report a field for which neither the exporter nor the table has a sentence."""
        clause, remedy = NO_SETTING_REASONS.get(
            field, ("has no such setting", "Do without it there.")
        )
        reason = "unsupported"
        if field == "modules":
            reason = "semantics"
        self.report(field, reason, f"{self.system} {clause}", remedy)


def _find_sentence(
    field: str, unwritten: Sequence[UnwrittenFields], facts: Mapping[str, object]
) -> Sentence | None:
    """Return the first sentence about a field whose fact holds; None if there is none."""
    for row in unwritten:
        if field in row.fields and (row.when is None or facts[row.when]):
            return row.sentence
    return None
