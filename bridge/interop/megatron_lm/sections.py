"""Megatron-LM's arguments by the names that its own code has for them, and the sections of a run that they become.

An argument becomes the field of the same name in every config that has one, as `core_transformer_config_from_args`,
`get_megatron_optimizer_config` and `get_megatron_ddp_config` do it. `FIELD_OF` and `SETS` hold the others.

Source: Megatron-LM of 2026-08-22, training/arguments.py, argument_utils.py and training.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bridge.errors import WrongValueError
from bridge.interop.launch.word import Word, joined
from bridge.interop.megatron_lm.flags import BY_NAME, dest
from bridge.interop.megatron_lm.options import OWNERS, SETS, SPELLED, Option, fields_of, is_switch, switched_off
from bridge.precision.fields import NO, YES, coerce, number_of_text
from bridge.rules.fields import FIELDS

if TYPE_CHECKING:
    from collections.abc import Iterable

LISTS = {
    "recompute_modules": "name",
    "offload_modules": "name",
    "cuda_graph_modules": "name",
    "cp_comm_type": "name",
    "moe_router_load_balancing_type": "name",
    "moe_aux_loss_coeff": "float",
    "mrope_section": "int",
    "hierarchical_context_parallel_sizes": "int",
}
"""Argument that takes several values -> what each of them is."""
ONE_FOR_ALL = ("cp_comm_type", "moe_router_load_balancing_type", "moe_aux_loss_coeff")
"""Those of them whose only value counts for all layers, and stands without a list."""
MEMBERS = {"attention_backend": ("flash", "fused", "unfused", "local", "auto")}
"""Argument whose enum a checkpoint saves as a number, from 1 -> the names of its members."""
VARIABLE = re.compile(r"\$\{?\w")
ENUM = re.compile(r"\A[A-Z]\w*\.(\w+)\Z|<\w+\.(\w+): [^>]*>")
"""A member of an enum as it is printed, by itself or in a list."""


@dataclass(kw_only=True, slots=True)
class Values:
    """The arguments of one run by their names."""

    values: dict[str, Any] = field(default_factory=dict)
    """Argument -> its value; True for a switch."""
    unread: dict[str, str] = field(default_factory=dict)
    """Argument whose value only the run decides -> its value as it is written."""

    def take(self, option: str, value: Any) -> None:
        """Take an option as it is written; a switch with a value that says no is as if it were absent."""
        flag = BY_NAME.get(option)
        if flag is not None and flag.kind != "value":
            if _says_yes(value):
                self.set(flag.field, flag.sets if flag.sets is not None else flag.kind == "on")
            return
        switch = switched_off(option)
        if switch is not None:
            if _says_yes(value):
                self.set(switch, value=False)
            return
        self.set(flag.field if flag is not None else SPELLED.get(option, option), value)

    def set(self, name: str, value: Any) -> None:
        """Set an argument by the name that Megatron-LM's code has for it."""
        self.unread.pop(name, None)
        if isinstance(value, str) and ((isinstance(value, Word) and value.is_unknown) or VARIABLE.search(value)):
            self.values.pop(name, None)
            self.unread[name] = str(value)
        else:
            self.values[name] = str(value) if isinstance(value, Word) else value

    def on(self, name: str) -> bool:
        """Return whether a switch is on."""
        return name in self.values and _says_yes(self.values[name])


def values_of(options: Iterable[Option]) -> Values:
    """Return options by the names of their arguments: True without a value, the first of several but for `LISTS`."""
    made = Values()
    for option in filter(lambda one: one.name, options):
        name, value, following = dest(option.name), option.value, option.following
        if not option.name.startswith("--"):
            made.set(_name_in_code(name), _plain(name, value))
        elif value is not None or option.is_key:
            made.take(name, value)
        elif not following or is_switch(option.name):
            made.take(name, value=True)
        else:
            made.take(name, joined(following) if name in LISTS else following[0])
    return made


def _plain(name: str, value: Any) -> Any:
    """Return a printed value with the name of a member in the place of an enum."""
    members = MEMBERS.get(name, ())
    if isinstance(value, int) and 0 < value <= len(members):
        return members[value - 1]
    return ENUM.sub(lambda found: found[1] or found[2], value) if isinstance(value, str) else value


def sections_of(arguments: Values) -> dict[str, dict[str, Any]]:
    """Return the sections that arguments become; a value that cannot be read is left to `arguments.unread`."""
    made: dict[str, dict[str, Any]] = {role: {} for role in (*OWNERS, "train")}
    for name, value in arguments.values.items():
        if name in SETS and _says_yes(value):
            made["model"] |= SETS[name]
    for name, value in arguments.values.items():
        for path in fields_of(name):
            role, _, attribute = path.partition(".")
            try:
                made[role][attribute] = _value(attribute, FIELDS[role][attribute].kind, value)
            except WrongValueError:
                arguments.unread[name] = str(value)
    if not (arguments.on("group_query_attention") and "num_query_groups" in made["model"]):
        made["model"].pop("num_query_groups", None)
    if "hybrid_layer_pattern" in made["model"]:
        made["model"]["is_hybrid_model"] = True
    return made


def _name_in_code(name: str) -> str:
    """Return the name that this project has for an argument of Megatron-LM's code."""
    flag = BY_NAME.get(name)
    return flag.field if flag is not None and flag.kind != "off" else SPELLED.get(name, name)


def _value(name: str, kind: str, value: Any) -> Any:
    """Return the value of a field; WrongValueError for one that is none."""
    if name in LISTS:
        given = value if isinstance(value, list) else re.sub(r"[\[\],'\"]", " ", str(value)).split()
        several = [coerce(one, LISTS[name]) for one in given]
        return several[0] if name in ONE_FOR_ALL and len(several) == 1 else several
    if kind in ("any", "dtype"):
        return number_of_text(value) if isinstance(value, str) else value
    return coerce(value, kind)


def _says_yes(value: Any) -> bool:
    """Return whether a value behind a switch leaves it on; a word that says neither is a word of its own."""
    text = str(value).lower()
    return text in YES or text not in NO
