"""`MixedPrecisionConfig`: every precision decision of a run, and which of them somebody stated.

    config = MixedPrecisionConfig(bf16=True, fp8="hybrid")
    config.fp8_recipe            # 'tensorwise': the default, as at Megatron Bridge
    config.stated                # frozenset({'bf16', 'fp8'}): what the synchroniser may insist on
    config.finalize()            # raises PrecisionConfigError with every fault at once

Fields, names and defaults are those of Megatron Bridge's `MixedPrecisionConfig` (31 of them, snapshot 2026-08-22), plus
`tf32`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Any

from bridge.errors import PrecisionConfigError, PrecisionTypeError, UnknownFieldError, close_matches, did_you_mean
from bridge.precision.fields import StatedField, stated
from bridge.precision.validity import faults

if TYPE_CHECKING:
    import torch

    from bridge.errors import Finding
    from bridge.sync.report import SyncReport

__all__ = ["MixedPrecisionConfig"]


class _Origin:
    """Read by `dataclasses.replace` on an object: the object itself. On the class: None, the InitVar's default."""

    def __get__(self, holder: MixedPrecisionConfig | None, owner: type) -> MixedPrecisionConfig | None:
        return holder


@dataclass(kw_only=True, repr=False, eq=False)
class MixedPrecisionConfig:  # noqa: PLW1641  mutable, hence without a hash, as any such dataclass
    """The precision of a training run, written for Megatron Core.

    A field counts as *stated* once it is given to the constructor, assigned, or overridden on a command line; `del`
    takes the statement back. Copies, pickles and `dataclasses.replace` keep what was stated.
    """

    # `dataclasses.replace` hands the constructor the caller's changes first and then every remaining field in order
    # of declaration. With this one declared first, what stands before it was named by the caller.
    _origin: InitVar[MixedPrecisionConfig | None] = _Origin()

    fp32: bool = stated(False, kind="bool")
    """Train in FP32: no half-precision weights. Megatron has no such switch; it means `fp16` and `bf16` off."""
    fp16: bool = stated(False, kind="bool")
    """Train in FP16 with FP32 master weights and a loss scale."""
    bf16: bool = stated(False, kind="bool")
    """Train in BF16 with FP32 master weights."""
    params_dtype: torch.dtype | None = stated(None, kind="dtype", unstates=True)
    """Dtype the weights are created in; None: that of the mode."""
    pipeline_dtype: torch.dtype | None = stated(None, kind="dtype", unstates=True)
    """Dtype of what pipeline stages send each other; None: that of the mode."""
    autocast_dtype: torch.dtype | None = stated(None, kind="dtype", unstates=True)
    """Dtype per-operator autocast casts to; None: `params_dtype`. Without effect unless `autocast_enabled`."""
    autocast_enabled: bool = stated(False, kind="bool")
    """Run the forward pass under torch.autocast; Megatron's own name is `enable_autocast`."""
    grad_reduce_in_fp32: bool = stated(True, kind="bool")
    """Accumulate and reduce gradients in FP32 instead of the weights' dtype."""
    fp8: str | None = stated(None, kind="name", optional=True)
    """FP8 format: "e4m3", or "hybrid" for E4M3 forward and E5M2 gradients; None: no FP8."""
    fp8_recipe: str = stated("tensorwise", kind="name", optional=True)
    """FP8 scaling scheme: tensorwise (current scaling), delayed, blockwise, mxfp8 or custom."""
    first_last_layers_bf16: bool = stated(False, kind="bool")
    """Keep the first and last layers in BF16 where the rest runs in FP8 or FP4."""
    fp8_margin: int = stated(0, kind="int")
    """Delayed scaling: scales are divided by 2 to this power."""
    fp8_amax_history_len: int = stated(1, kind="int")
    """Delayed scaling: steps of amax history kept per tensor."""
    fp8_amax_compute_algo: str = stated("most_recent", kind="name")
    """Delayed scaling: "max" or "most_recent" of the history."""
    fp8_wgrad: bool = stated(True, kind="bool")
    """Run the weight-gradient GEMM in FP8. Transformer Engine 2.0 and later cannot turn it off."""
    fp8_dot_product_attention: bool = stated(False, kind="bool")
    """Run the attention core in FP8; not with blockwise scaling."""
    fp8_multi_head_attention: bool = stated(False, kind="bool")
    """Delayed scaling: keep FP8 between the attention core and its projections."""
    fp8_param: bool = stated(False, kind="bool", unstates=True, twin="fp8_param_gather")
    """Store the weights in FP8. The same setting as `fp8_param_gather`, by the model's name for it."""
    fp8_param_gather: bool = stated(False, kind="bool", unstates=True, twin="fp8_param", leads=True)
    """Store the weights in FP8 and gather them as FP8, by the DDP config's name for it."""
    fp4: str | None = stated(None, kind="name", optional=True)
    """FP4 format: "e2m1"; None: no FP4."""
    fp4_recipe: str = stated("nvfp4", kind="name", optional=True)
    """FP4 scaling scheme: nvfp4 or custom."""
    fp4_param: bool = stated(False, kind="bool", unstates=True, twin="fp4_param_gather")
    """Store the weights in FP4. The same setting as `fp4_param_gather`, by the model's name for it."""
    fp4_param_gather: bool = stated(False, kind="bool", unstates=True, twin="fp4_param", leads=True)
    """Store the weights in FP4 and gather them as FP4, by the DDP config's name for it."""
    loss_scale: float | None = stated(None, kind="float", optional=True)
    """A constant loss scale; None: dynamic under FP16, none otherwise."""
    initial_loss_scale: float | None = stated(4294967296, kind="float", optional=True)
    """FP16, dynamic: the scale the run begins with."""
    min_loss_scale: float = stated(1.0, kind="float")
    """FP16, dynamic: the scale never falls below this."""
    loss_scale_window: float = stated(1000, kind="float")
    """FP16, dynamic: steps without overflow after which the scale doubles; a whole number."""
    hysteresis: int = stated(2, kind="int")
    """FP16, dynamic: overflows the scale endures before it halves."""
    num_layers_at_start_in_bf16: int = stated(0, kind="int")
    """Layers at the start kept in BF16 under `first_last_layers_bf16`; unstated: the model's own count (1)."""
    num_layers_at_end_in_bf16: int = stated(0, kind="int")
    """Layers at the end kept in BF16 under `first_last_layers_bf16`; unstated: the model's own count (1)."""
    reuse_grad_buf_for_mxfp8_param_ag: bool = stated(False, kind="bool")
    """MXFP8 weights: gather the updated weights through the gradient buffer, to save memory."""
    tf32: bool | None = stated(None, kind="bool", unstates=True)
    """Let FP32 matmuls use TF32 (True) or not (False) from the start of the run; None: leave the process as it is."""

    if not TYPE_CHECKING:

        def __init__(self, **given: object) -> None:
            """Take any fields by name.

            Raises:
                PrecisionTypeError: A value of the wrong type.
                TypeError: A name that is no field.
            """
            origin = given.get("_origin")
            named = list(given)
            changed = named if origin is None else named[: named.index("_origin")]
            own = vars(self)
            own["_values"] = dict(origin._values) if origin is not None else {}
            own["_sources"] = dict(origin._sources) if origin is not None else {}
            own["_recipe"] = origin._recipe if origin is not None else None
            changes = {name: given[name] for name in changed}
            known = self.__dataclass_fields__
            for name in changes:
                if name not in known or name == "_origin":
                    raise TypeError(_unknown_field(name, type(self)))
            for field in dataclasses.fields(self):
                if isinstance(_descriptor(type(self), field.name), StatedField):
                    continue
                if field.name in given:
                    setattr(self, field.name, given[field.name])
                elif field.default_factory is not dataclasses.MISSING:
                    setattr(self, field.name, field.default_factory())
                elif field.default is not dataclasses.MISSING:
                    setattr(self, field.name, field.default)
                else:
                    raise TypeError(f"{type(self).__name__}() is missing the field {field.name!r}")
            self._state({n: v for n, v in changes.items() if isinstance(_descriptor(type(self), n), StatedField)})
            if hasattr(self, "__post_init__"):
                self.__post_init__()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # @dataclass leaves a constructor that is already there alone, so that subclasses keep track of what was stated.
        super().__init_subclass__(**kwargs)
        for name, value in list(vars(cls).items()):
            inherited = next((vars(b)[name] for b in cls.__mro__[1:] if name in vars(b)), None)
            if isinstance(inherited, StatedField) and not isinstance(value, StatedField):
                field = inherited.with_default(value)  # another default; still a field that knows what was stated
                setattr(cls, name, field)
                field.__set_name__(cls, name)
        if "__init__" not in vars(cls):
            cls.__init__ = MixedPrecisionConfig.__init__  # type: ignore[method-assign]

    # -- what was stated ---------------------------------------------------------------------------------------------

    @property
    def stated(self) -> frozenset[str]:
        """Names of the fields that somebody set."""
        return frozenset(self._values)

    @property
    def recipe(self) -> str | None:
        """Name of the registered recipe this config was made from, or None."""
        name: str | None = vars(self)["_recipe"]
        return name

    @property
    def label(self) -> str:
        """The recipe's name and what was stated beside it: "bf16_mixed, grad_reduce_in_fp32=False"."""
        beside = [name for name in self.field_names() if not self._sources.get(name, "").startswith("recipe ")]
        said = [f"{name}={self._values[name]}" for name in beside if name in self._values]
        return ", ".join([self.recipe, *said] if self.recipe else said) or "fp32"

    def is_stated(self, name: str) -> bool:
        """Return whether `name`, or the other name of the same setting, was stated."""
        field = self._field(name)
        return name in self._values or (field.twin is not None and field.twin in self._values)

    def source_of(self, name: str) -> str:
        """Return who set `name`: "default" for an unstated field."""
        field = self._field(name)
        for known in (name, field.twin):
            if known is not None and known in self._values:
                return self._sources.get(known) or "stated"
        return "default"

    def state(self, source: str | None = None, /, **values: object) -> MixedPrecisionConfig:
        """Set fields and remember who did it; returns the config itself.

        Args:
            source: Who says so, for reports ("command line", "team.yaml").
            values: Fields by name.

        Raises:
            PrecisionTypeError: A value of the wrong type; nothing is changed then.
            UnknownFieldError: A name that is no field; nothing is changed then.
        """
        self._state(values, source=source)
        return self

    # -- contents ----------------------------------------------------------------------------------------------------

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Return the names of all precision fields, in order of declaration."""
        return tuple(f.name for f in dataclasses.fields(cls) if isinstance(_descriptor(cls, f.name), StatedField))

    def to_dict(self, *, full: bool = False) -> dict[str, Any]:
        """Return plain values (dtypes as "bf16", ...): the stated fields, or with `full` every field as it reads."""
        names = self.field_names()
        if full:
            return {name: self._read(self._field(name)) for name in names}
        return {name: self._values[name] for name in names if name in self._values}

    @classmethod
    def from_dict(cls, values: Mapping[str, object], *, source: str | None = None) -> MixedPrecisionConfig:
        """Return the config that `to_dict` describes; every key present counts as stated.

        Args:
            values: Fields by name. Numbers and switches may be strings, as YAML and command lines produce them.
            source: Who says so, for reports.

        Raises:
            PrecisionTypeError: A value that is not of its field's type, or `values` that are no mapping.
            UnknownFieldError: A key that is no field.
        """
        if not isinstance(values, Mapping):
            raise PrecisionTypeError(f"mixed_precision: must be a mapping of fields, got {values!r}.")
        config = cls()
        config._state({str(key): value for key, value in values.items()}, source=source, text=True)
        return config

    def to_json(self, *, full: bool = False, indent: int | None = 2) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(full=full), indent=indent)

    @classmethod
    def from_json(cls, text: str, *, source: str | None = None) -> MixedPrecisionConfig:
        """Return the config that `to_json` describes; raises as `from_dict`, also for what is not JSON."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise PrecisionTypeError(f"mixed_precision: must be JSON; {error}.") from None
        return cls.from_dict(values, source=source)

    def to_yaml(self, *, full: bool = False) -> str:
        """Return `to_dict` as YAML."""
        import yaml  # only here and in from_yaml: listing recipes needs no YAML

        text: str = yaml.safe_dump(self.to_dict(full=full), sort_keys=False)
        return text

    @classmethod
    def from_yaml(cls, text: str, *, source: str | None = None) -> MixedPrecisionConfig:
        """Return the config that `to_yaml` describes; raises as `from_dict`, also for what is not YAML."""
        import yaml

        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            what = " ".join(str(error).split())
            raise PrecisionTypeError(f"mixed_precision: must be YAML; {what}.") from None
        return cls.from_dict(values if values is not None else {}, source=source)

    @property
    def mode(self) -> str:
        """fp32, fp16 or bf16: what the weights train in. No switch at all means fp32, as it does to Megatron."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"

    @property
    def scheme(self) -> str | None:
        """Name of the low-precision scaling scheme that is on, or None."""
        if self.fp8:
            return self.fp8_recipe
        return self.fp4_recipe if self.fp4 else None

    # -- what it is for ----------------------------------------------------------------------------------------------

    def faults(self) -> list[Finding]:
        """Return everything that can never be right about this config."""
        return faults(self)

    def finalize(self) -> None:
        """Check the config against itself.

        Raises:
            PrecisionConfigError: It can never be right; all findings, each with the way out.
        """
        found = self.faults()
        if found:
            name = f" {self.recipe!r}" if self.recipe else ""
            raise PrecisionConfigError(f"The mixed-precision config{name} can never be right:", found)

    def setup(self, model_config: Any, optimizer_config: Any = None, ddp_config: Any = None) -> SyncReport:
        """Write this config into the owners, as Megatron Bridge's method of this name does.

        Args:
            model_config: A TransformerConfig or any object with same-named attributes.
            optimizer_config: An OptimizerConfig or any such object; None: there is none.
            ddp_config: A DistributedDataParallelConfig or any such object; None: there is none.

        Returns:
            What was changed and why.

        Raises:
            PrecisionConfigError: The config can never be right.
            SyncError: The result would not pass Megatron's validation. The owners are as they were.
        """
        from bridge.sync import synchronize  # the one upward import: the peer's interface puts the method here

        return synchronize(self, model=model_config, optimizer=optimizer_config, ddp=ddp_config)

    # -- machinery ---------------------------------------------------------------------------------------------------

    @property
    def _values(self) -> dict[str, Any]:
        values: dict[str, Any] = vars(self)["_values"]
        return values

    @property
    def _sources(self) -> dict[str, str]:
        sources: dict[str, str] = vars(self)["_sources"]
        return sources

    def _field(self, name: str) -> StatedField:
        field = _descriptor(type(self), name)
        if not isinstance(field, StatedField):
            raise UnknownFieldError(_unknown_field(name, type(self)), close_matches(name, self.field_names()))
        return field

    def _read(self, field: StatedField) -> Any:
        names = [field.name] if field.twin is None else [field.twin, field.name]
        if field.leads:
            names.reverse()
        for name in names:
            if name in self._values:
                return self._values[name]
        return field.default

    def _assign(self, name: str, value: object) -> None:
        self._state({name: value})

    def _state(self, given: Mapping[str, object], *, source: str | None = None, text: bool = False) -> None:
        checked = {name: self._field(name).check(value, text=text) for name, value in given.items()}
        for name, value in checked.items():
            field = self._field(name)
            if value is None and field.unstates:
                if name in self._values:
                    self._unstate(name)
                continue
            self._put(name, value, source)
            if field.twin in self._values and field.twin not in checked:
                self._put(field.twin, value, source)

    def _put(self, name: str, value: object, source: str | None) -> None:
        self._values[name] = value
        self._sources.pop(name, None)
        if source is not None:
            self._sources[name] = source

    def _unstate(self, name: str) -> None:
        for known in (name, self._field(name).twin):
            if known is not None:
                self._values.pop(known, None)
                self._sources.pop(known, None)

    def _made_by(self, recipe: str) -> None:
        """Remember the recipe this config came from; what it has stated so far is the recipe's."""
        vars(self)["_recipe"] = recipe
        for name in self._values:
            self._sources.setdefault(name, f"recipe {recipe}")

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("_") or hasattr(type(self), name) or name in type(self).__dataclass_fields__:
            object.__setattr__(self, name, value)
            return
        raise UnknownFieldError(_unknown_field(name, type(self)), close_matches(name, self.field_names()))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_values": dict(self._values), "_sources": dict(self._sources)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __eq__(self, other: object) -> bool:
        """Compare as Megatron Bridge's dataclass does: by what every field reads as, stated or not."""
        if type(other) is not type(self):
            return NotImplemented
        return dataclasses.asdict(self) == dataclasses.asdict(other)

    def __repr__(self) -> str:
        shown = []
        for name in self.field_names():
            if name in self._values:  # a dtype as torch shows it, the rest as it was stated
                value = getattr(self, name) if self._field(name).kind == "dtype" else self._values[name]
                shown.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


def _descriptor(owner: type, name: str) -> object:
    """Return the class attribute itself, past any descriptor protocol."""
    return next((vars(base)[name] for base in owner.__mro__ if name in vars(base)), None)


def _unknown_field(name: str, owner: type[MixedPrecisionConfig]) -> str:
    matches = close_matches(name, owner.field_names())
    remedy = did_you_mean(matches) or "`precision-bridge explain` lists the fields."
    return f"mixed_precision.{name}: no such field. {remedy}"
