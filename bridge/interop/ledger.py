"""The ledgers of a crossing: what became of each setting, so that nothing is dropped without a record.

`Arrival` keeps the book of an import, `Departure` that of an export. A departure closes only with every stated field of
the config in it: what the exporter did not mention is looked at here, and is met, without effect, or a loss.
"""

from __future__ import annotations

from typing import Any

from bridge.errors import PayloadError, PrecisionTypeError
from bridge.interop.contract import Exported, Imported, Loss
from bridge.interop.meaning import recipe_named, semantics_of, unread_fields
from bridge.registry.config import MixedPrecisionConfig

__all__ = ["Arrival", "Departure", "inert", "semantics_of"]

MODES = ("fp32", "fp16", "bf16")
OFF_SWITCHES = (
    *MODES,
    "autocast_enabled",
    "fp8_param",
    "fp8_param_gather",
    "fp4_param",
    "fp4_param_gather",
    "fp8_dot_product_attention",
    "fp8_multi_head_attention",
    "first_last_layers_bf16",
    "reuse_grad_buf_for_mxfp8_param_ag",
)
"""Switches that another system honours by not having them, once they are off."""
ABSENT = {
    "pipeline_dtype": ("does not say in what pipeline stages send activations", "Nothing to do without such stages."),
    "tf32": ("does not decide about TF32", "Set torch.backends.cuda.matmul.fp32_precision in the program."),
    "first_last_layers_bf16": ("cannot keep whole layers in BF16", "Expect FP8 in the first and last layer too."),
}


class Arrival:
    """The book of an import: foreign settings on their way into fields."""

    def __init__(self, system: str) -> None:
        self.system = system
        self.fields: dict[str, Any] = {}
        self._carried: dict[str, tuple[str, ...]] = {}
        self._losses: list[Loss] = []

    def carry(self, setting: str, /, **fields: Any) -> None:
        """Note that `setting` became these fields; none at all: it agrees with what is unstated."""
        self._carried[setting] = tuple(dict.fromkeys((*self._carried.get(setting, ()), *fields)))
        self.fields.update(fields)

    def lose(self, setting: str, value: object, reason: str, detail: str, remedy: str) -> None:
        """Note that `setting` did not cross as it stands."""
        self._losses.append(Loss(field=setting, value=value, reason=reason, detail=detail, remedy=remedy))

    def close(self, semantics: str) -> Imported:
        """Return the import; PayloadError should a field have been given a value it cannot hold."""
        try:
            config = MixedPrecisionConfig.from_dict(self.fields, source=self.system)
        except PrecisionTypeError as error:
            raise PayloadError(f"{self.system}: {error} Correct the value there.") from None
        same = semantics in (semantics_of(config), "fsdp_policy")  # a policy's FP32 shards are FP32 masters
        return Imported(
            config=config,
            semantics=semantics,
            losses=tuple(self._losses),
            carried=dict(self._carried),
            recipe=recipe_named(config) if same else None,
        )


class Departure:
    """The book of an export: stated fields on their way into foreign settings.

    Raises:
        PrecisionTypeError: Not a config.
        PrecisionConfigError: A config that can never be right; nothing of it would mean anything elsewhere either.
    """

    def __init__(self, config: object, system: str) -> None:
        if not isinstance(config, MixedPrecisionConfig):
            raise PrecisionTypeError(
                f"mixed_precision: must be a MixedPrecisionConfig, got {config!r:.80}. "
                "get_mixed_precision_config makes one of a recipe's name."
            )
        config.finalize()
        self.config = config
        self.system = system
        self.values = config.to_dict(full=True)
        self.arrives_as = config.mode
        """The mode that the payload will be read as on the other side."""
        self._carried: dict[str, tuple[str, ...]] = {}
        self._losses: dict[str, list[Loss]] = {}

    def carry(self, field: str, *settings: str) -> None:
        """Note that `field`, should it be stated, became these settings; none: it holds there without one."""
        if field in self.config.stated:
            self._carried[field] = settings

    def lose(self, field: str, reason: str, detail: str, remedy: str) -> None:
        """Note that `field` does not cross as it stands, stated or not."""
        loss = Loss(field=field, value=self.values[field], reason=reason, detail=detail, remedy=remedy)
        self._losses.setdefault(field, []).append(loss)

    def lose_if_stated(self, field: str, reason: str, detail: str, remedy: str) -> None:
        """Note a loss of `field` where somebody stated it."""
        if field in self.config.stated:
            self.lose(field, reason, detail, remedy)

    def close(self, payload: Any) -> Exported:
        """Return the export. Stated fields that nobody mentioned are met, without effect, or lost."""
        for field in self.config.field_names():
            if field not in self.config.stated or field in self._carried or field in self._losses:
                continue
            why = inert(self.config, field)
            if field == self.arrives_as and not self.values[field]:
                detail = f"what {self.system} does instead is {field} to Megatron"
                self.lose(field, "semantics", detail, "See what is said of the mode that was stated.")
            elif _is_off(field, self.values[field]):
                self.carry(field)
            elif why is None:
                detail, remedy = ABSENT.get(field, ("has no such setting", "Do without it there."))
                self.lose(field, "unsupported", f"{self.system} {detail}", remedy)
            elif self.values[field] == getattr(type(self.config), field):
                self.carry(field)
            else:
                self.lose(field, "dead knob", why, "Drop it: it changes nothing in this recipe either.")
        losses = tuple(loss for name in self.config.field_names() for loss in self._losses.get(name, ()))
        carried = {name: settings for name, settings in self._carried.items() if name not in self._losses}
        return Exported(payload=payload, losses=losses, carried=carried)


def inert(config: MixedPrecisionConfig, field: str) -> str | None:
    """Return why `field` has no effect in this config, as a clause; None where it has one."""
    return unread_fields(config).get(field)


def _is_off(field: str, value: object) -> bool:
    if field in OFF_SWITCHES:
        return value is False
    return (field in ("fp8", "fp4", "loss_scale") and value is None) or (field == "fp8_wgrad" and value is True)
