"""`ModuleTracker` and `label_modules`: the module that is running, and the names in the plan.

Megatron's layers are recognised by the names of their classes, so that a model of plain torch needs
no Megatron. The label of any other module has an empty layer, and the whole path as the name.

In a forward pass, hooks keep a stack of the modules that run. At the end of a module's forward
pass, the nodes of autograd that it made are marked with the module. In a backward pass autograd
names the node that it runs, and the mark of the node is the module. No function of Megatron or
Transformer Engine is replaced. Activation recomputation runs forward passes inside the backward
pass, for which the hooks keep the stack too.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch.utils._pytree import tree_leaves

ModuleLabel = tuple[str, str]
"""Label of the layer, name of the module."""
MTP_LAYER_CLASS = "MultiTokenPredictionLayer"
LAYER_CLASS_NAMES = frozenset({"TransformerLayer", "MambaLayer", MTP_LAYER_CLASS})
"""Megatron's classes of layers with a `layer_number` in the whole model."""
ATTENTION_CORE = "core_attention"
TOKEN_MIXERS = ("mixer", "self_attention", "indexer")
"""Modules between linear layers.

They belong to a Mamba layer, to attention or a gated delta net, or to sparse attention.
"""
_CONTAINER_PREFIX = re.compile(
    r"^(mtp_model_layer\.|transformer_layer\.)?"
    r"(self_attention\.(core_attention\.(?=indexer))?|mlp\.|mixer\.)?"
    r"(experts\.local_experts\.\d+\.)?"
)


def has_class_name(module: torch.nn.Module, names: Iterable[str]) -> bool:
    """Return whether a module's class has one of these names, or is derived from such a class."""
    wanted = set(names)
    return any(kind.__name__ in wanted for kind in type(module).__mro__)


def label_modules(model: Iterable[torch.nn.Module]) -> dict[torch.nn.Module, ModuleLabel]:
    """Return the label of every module in the chunks of a model."""
    labels: dict[torch.nn.Module, ModuleLabel] = {}
    for chunk in model:
        for module in chunk.modules():
            if module in labels or not has_class_name(module, LAYER_CLASS_NAMES):
                continue
            layer = str(module.layer_number)
            if has_class_name(module, (MTP_LAYER_CLASS,)):
                layer = f"mtp {layer}"
            # The parts of a layer inside a prediction layer get their label here, as parts of the
            # prediction layer, and are skipped above.
            for name, part in module.named_modules():
                labels.setdefault(part, (layer, _shorten_name(name)))
        for path, module in chunk.named_modules():
            is_output = path.rpartition(".")[2] == "output_layer"
            if is_output and labels:  # of a Megatron model, which has layers
                labels.setdefault(module, ("output", "output_layer"))
            else:
                labels.setdefault(module, ("", path))
    return labels


def mixes_tokens(name: str) -> bool:
    """Return whether a module's products mix tokens, unlike the products of a linear layer."""
    return name in TOKEN_MIXERS or ATTENTION_CORE in name.split(".")


def _shorten_name(name: str) -> str:
    """Return the plan's name of a module in its layer. All experts of a layer share a name."""
    rest = _CONTAINER_PREFIX.sub("", name)
    if "experts.local_experts." in name.removesuffix(rest):
        return f"experts.{rest}"
    # A product of the module of shared experts is their gate; its linear layers are modules.
    if rest == "shared_experts":
        return "shared_experts.gate"
    return rest


MODULE_METADATA_KEY = "bridge.module"
"""Entry of a node's metadata.

It is a weak reference, since Python does not collect a cycle through torch's C++ nodes.
"""


class ModuleTracker:
    """The module that runs, in forward and backward passes."""

    def __init__(
        self, entered: Callable[[torch.nn.Module, tuple[Any, ...]], None] | None = None
    ) -> None:
        """Make the object without setting hooks.

        Args:
            entered: Called with a module and its positional arguments before each forward pass.
        """
        self._entered = entered
        self._stack: list[torch.nn.Module] = []

    @property
    def module(self) -> torch.nn.Module | None:
        """The innermost module that runs. None: no module runs."""
        if self._stack:
            return self._stack[-1]
        node = self._node
        if node is None:
            return None
        marked: ReferenceType[torch.nn.Module] | None = node.metadata.get(MODULE_METADATA_KEY)
        if marked is None:
            return None
        return marked()

    @property
    def is_backward(self) -> bool:
        """Whether a backward pass runs, and no forward pass inside it."""
        return not self._stack and self._node is not None

    @property
    def _node(self) -> Any:
        return torch._C._current_autograd_node()  # noqa: SLF001  no public name has it

    @contextmanager
    def follow(self, modules: Iterable[torch.nn.Module]) -> Iterator[None]:
        """Follow modules in a ``with`` block. Pure containers of other modules are left out."""
        with ExitStack() as hooks:
            hooks.callback(self._stack.clear)
            for module in filter(is_more_than_container, modules):
                enter_hook = module.register_forward_pre_hook(self._enter)
                hooks.callback(enter_hook.remove)
                leave_hook = module.register_forward_hook(
                    self._leave, with_kwargs=True, always_call=True
                )
                hooks.callback(leave_hook.remove)
            yield

    def _enter(self, module: torch.nn.Module, arguments: Any) -> None:
        """Note that a module's forward pass begins."""
        self._stack.append(module)
        if self._entered is not None:
            self._entered(module, arguments)

    def _leave(self, module: torch.nn.Module, arguments: Any, named: Any, output: Any) -> None:
        """Note that a module's forward pass ends, and mark the autograd nodes that it made."""
        if not self._stack:
            return  # the module's forward pass began before the hooks were registered
        self._stack.pop()
        _mark_autograd_nodes(
            module, _list_autograd_nodes((arguments, named)), _list_autograd_nodes(output)
        )


def is_more_than_container(module: torch.nn.Module) -> bool:
    """Return whether a module is more than a container of others."""
    return not list(module.children()) or bool(list(module.parameters(recurse=False)))


def get_dtype_name(tensor: torch.Tensor) -> str:
    """Return torch's name of a tensor's dtype, without ``torch.``."""
    return str(tensor.dtype).removeprefix("torch.")


def list_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value of containers."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _list_autograd_nodes(value: Any) -> list[Any]:
    """Return the nodes of autograd that made the tensors in a value."""
    return [tensor.grad_fn for tensor in list_tensors(value) if tensor.grad_fn is not None]


def _mark_autograd_nodes(module: torch.nn.Module, inputs: list[Any], outputs: list[Any]) -> None:
    """Mark the nodes between inputs and outputs with a module.

    The nodes of an inner module have the mark of that module already, and keep it.
    """
    seen = set(inputs)
    unvisited = list(outputs)
    while unvisited:
        node = unvisited.pop()
        if node in seen:
            continue
        seen.add(node)
        node.metadata.setdefault(MODULE_METADATA_KEY, ref(module))
        for next_node, _ in node.next_functions:
            if next_node is not None:
                unvisited.append(next_node)
