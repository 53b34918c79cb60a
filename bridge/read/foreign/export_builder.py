"""`ExportBuilder`: the report of an export, while stated fields are written into settings.

    builder = ExportBuilder(config, "DeepSpeed 0.19")
    builder.map("bf16", "bf16.enabled")                # a field becomes a setting
    builder.record("pytorch.casts-fp32-weights", "params_dtype")    # no setting has its meaning
    builder.finish({"bf16": {"enabled": True}})

Each stated field is accounted for. A field that the exporter did not mention agrees with the other
system already, has no effect, or is reported as unmapped.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bridge.precision.config import FIELD_DEFAULTS, MEGATRON_FIELDS
from bridge.precision.mode import get_mode, get_scheme
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
"""Field -> the value of it that another system honours by not having the field."""
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
"""Field -> clause about a system without such a setting, and the remedy."""


class ExportBuilder:
    """The report of an export.

    Raises:
        PrecisionConfigError: The config can never be right, so that nothing of it would mean
            anything elsewhere either.
    """

    def __init__(self, config: object, system: str) -> None:
        self.config = config = finalize_config(config)
        self.system = system
        self.values = config.to_dict(full=True)
        """Field -> its value, stated or not."""
        self.exported_mode = get_mode(config)
        """The mode that the other system reads in the payload."""
        self.mapped: dict[str, tuple[str, ...]] = {}
        self.unmapped: dict[str, list[Unmapped]] = {}
        self.files: dict[str, str] = {}
        """Name of a file that the payload names -> its text."""

    def map(self, field: str, *settings: str) -> None:
        """Record that a field, if it is stated, became these settings; without settings it holds there."""
        if field in self.config.stated:
            names = dict.fromkeys((*self.mapped.get(field, ()), *settings))
            self.mapped[field] = tuple(names)

    def map_dtype(self, field: str, *settings: str) -> bool:
        """Map a dtype to the settings of the mode, and return True, where it is that of the mode."""
        follows_mode = self.values[field] in (None, get_mode(self.config))
        if follows_mode:
            self.map(field, *settings)
        return follows_mode

    def report(self, field: str, reason: str, detail: str, remedy: str) -> None:
        """Record that a field, stated or not, cannot be converted exactly."""
        entry = Unmapped(field, self.values[field], reason, detail, remedy)
        self.unmapped.setdefault(field, []).append(entry)

    def record(self, sentence: str, field: str, /, **facts: object) -> None:
        """Record that a field, stated or not, cannot be converted exactly, in the words of a sentence."""
        words = format_sentence(sentence, system=self.system, **facts)
        self.report(field, words.reason, words.detail, words.remedy)

    def record_if_stated(self, sentence: str, /, *fields: str, **facts: object) -> None:
        """Record that fields cannot be converted exactly, each that is stated."""
        for field in fields:
            if field in self.config.stated:
                self.record(sentence, field, **facts)

    def finish(
        self, payload: Any, unwritten: Sequence[UnwrittenFields] = (), **facts: object
    ) -> ExportReport:
        """Return the report, after the stated fields that were not mentioned are mapped or reported.

        Args:
            payload: The settings.
            unwritten: Sentences about fields without a setting, from the table of the system.
            facts: Facts that these name. They may name the values of all fields too, and `mode`,
                `scheme` and `system`.
        """
        known = {
            **self.values,
            "mode": get_mode(self.config),
            "scheme": get_scheme(self.config),
            "system": self.system,
            **facts,
        }
        unread = collect_inert_everywhere(self.config)
        names = list_field_names(self.config)
        for field in names:
            is_mentioned = field in self.mapped or field in self.unmapped
            if field in self.config.stated and not is_mentioned:
                self._map_or_report(field, unread.get(field), unwritten, known)
        unmapped: list[Unmapped] = []
        mapped: dict[str, tuple[str, ...]] = {}
        for name in names:
            unmapped += self.unmapped.get(name, ())
            if name in self.mapped and name not in self.unmapped:
                mapped[name] = self.mapped[name]
        return ExportReport(
            payload=payload, unmapped=tuple(unmapped), mapped=mapped, files=self.files
        )

    def _map_or_report(
        self,
        field: str,
        unread: str | None,
        unwritten: Sequence[UnwrittenFields],
        facts: Mapping[str, object],
    ) -> None:
        """Map or report a stated field that the exporter did not mention.

        Args:
            field: The field.
            unread: Why it has no effect, or None.
            unwritten: Sentences of the system's table about fields without a setting.
            facts: Facts that these name.
        """
        value = self.values[field]
        sentence = _find_sentence(field, unwritten, facts)
        is_unread_default = unread is not None and value == getattr(type(self.config), field)
        if field == self.exported_mode and not value:
            detail = f"what {self.system} does instead is {field} to Megatron"
            remedy = "See the record of the mode that was stated."
            self.report(field, "semantics", detail, remedy)
        elif is_unread_default or (field in INACTIVE_VALUES and value == INACTIVE_VALUES[field]):
            self.map(field)
        elif unread is not None:
            remedy = "Drop it: it changes nothing in this recipe either."
            self.report(field, "dead knob", unread, remedy)
        elif sentence is not None:
            self.report(field, *sentence.fill(facts))
        else:
            clause, remedy = NO_SETTING_REASONS.get(
                field, ("has no such setting", "Do without it there.")
            )
            reason = "semantics" if field == "modules" else "unsupported"
            self.report(field, reason, f"{self.system} {clause}", remedy)


def _find_sentence(
    field: str, unwritten: Sequence[UnwrittenFields], facts: Mapping[str, object]
) -> Sentence | None:
    """Return the first sentence about a field without a setting; None where there is none."""
    for row in unwritten:
        if field in row.fields and (row.when is None or facts[row.when]):
            return row.sentence
    return None
