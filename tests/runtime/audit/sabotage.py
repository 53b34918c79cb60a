"""Runs that do not do what they are asked.

    python -m tests.runtime.audit.sabotage PLAN.json        makes the runs of a plan, {"backend": ..., "names": [...]}

Each sabotage changes the configs after the synchroniser wrote the recipe into them, or the built model, or a function
of Megatron's or Transformer Engine's, and trains two steps (or a few more) of four layers, the first and the last in
BF16. A process writes the error of each run next to the plan.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bridge.preflight.gpu_for_te_cpu import declare

BOTH = ("emulated", "te_cpu")


@dataclass(frozen=True, kw_only=True)
class Sabotage:
    """One fault."""

    message: str
    """A sentence of the error, or the beginning of one."""
    backends: tuple[str, ...] = BOTH
    configs: Callable[[Any], None] = lambda _config: None
    """Changes the synchronised container."""
    built: Callable[[Any], None] = lambda _run: None
    """Changes the built run."""
    patched: Callable[[], Any] = nullcontext
    """A context around building and training."""
    arguments: dict[str, Any] | None = None
    """Further arguments of `tiny`."""
    precision: dict[str, Any] | None = None
    """Further fields of the precision."""
    processes: int = 1
    steps: int = 2


def layers_of(run: Any) -> list[Any]:
    """Return the transformer layers of a run's model."""
    return list(run.trainer.model[0].module.module.decoder.layers)


def inside_autocast(module: Any, recipe: Any) -> None:
    """Run a module inside an autocast of another recipe, or outside of the one that is around it."""
    import transformer_engine.pytorch as te

    forward = module.forward

    def inside(*args: Any, **kwargs: Any) -> Any:
        with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            return forward(*args, **kwargs)

    module.forward = inside


def in_bf16(run: Any, layer: int, *names: str) -> None:
    """Let the linear layers of a layer multiply in BF16."""
    for name, module in layers_of(run)[layer - 1].named_modules():
        if names and name not in names:
            continue
        if hasattr(module, "set_precision"):
            module.set_precision(None)
        elif hasattr(module, "fp8_meta") and name.rpartition(".")[2].startswith("linear"):
            inside_autocast(module, None)


def swap_fc2(run: Any) -> None:
    """Put an `nn.Linear` in the place of a layer's second MLP projection."""
    import torch

    class Swapped(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> Any:  # noqa: A002  torch's name
            return super().forward(input), None

    layers_of(run)[1].mlp.linear_fc2 = Swapped(128, 64, bias=False, dtype=torch.bfloat16)


def off_after(steps: int) -> Callable[[Any], None]:
    """Return a sabotage of the run that leaves FP8 after some steps."""

    def switch(run: Any) -> None:
        step, taken = run.trainer.step, []

        def stepped(*args: Any, **kwargs: Any) -> Any:
            taken.append(1)
            if len(taken) > steps:
                for layer in (2, 3):
                    in_bf16(run, layer)
            return step(*args, **kwargs)

        run.trainer.step = stepped

    return switch


def second_autocast(run: Any) -> None:
    """Put an autocast of another recipe around the whole model."""
    from transformer_engine.common.recipe import Float8BlockScaling

    inside_autocast(run.trainer.model[0].module.module.decoder, Float8BlockScaling())


def blockwise_fc2(run: Any) -> None:
    """Let a layer's second MLP projection multiply under another scheme."""
    from bridge.runtime.numerics.spec import GemmPrecision

    module = layers_of(run)[2].mlp.linear_fc2
    if hasattr(module, "set_precision"):
        module.set_precision(GemmPrecision(scheme="blockwise", format="e4m3"))
    else:
        from transformer_engine.common.recipe import Float8BlockScaling

        inside_autocast(module, Float8BlockScaling())


@contextmanager
def patched(path: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an attribute of a module or class by what `make` returns for it."""
    module, _, name = path.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, attribute = name.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    with patch.object(owner, attribute, make(getattr(owner, attribute))):
        yield


def local_spec() -> Any:
    """Build every layer from Megatron's local spec."""
    stack = ExitStack()
    original: Any = None

    def plain(block_spec: Any) -> Any:
        nonlocal original
        original = block_spec
        return lambda config, *, backend, **named: original(config, backend="local", **named)

    stack.enter_context(patched("bridge.runtime.megatron.model.gpt:build_block_spec", plain))
    stack.enter_context(
        patched("bridge.runtime.megatron.model.gpt:emulate_low_layers", lambda _original: lambda *_: None)
    )
    return stack


def transposed() -> Any:
    """Quantise the transpose of every square weight."""

    def turned(tensor: Any) -> Any:
        is_square = tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1] == 64
        return tensor.T.contiguous() if is_square else tensor

    def emulated(make: Any) -> Any:
        return lambda x, spec, role, **named: make(turned(x) if role == "weight" else x, spec, role, **named)

    def extension(quantize: Any) -> Any:
        return lambda tensor, *args, **named: quantize(turned(tensor), *args, **named)

    stack = ExitStack()
    stack.enter_context(patched("bridge.runtime.numerics.linear:make_operand", emulated))
    if "transformer_engine_torch" in sys.modules:
        stack.enter_context(patched("transformer_engine_torch:quantize", extension))
    return stack


def stay_in_bf16() -> Any:
    """Store the first weight in BF16 where all are to be stored in FP8."""
    calls: list[int] = []

    def skip(store: Any) -> Any:
        def stored(*args: Any, **kwargs: Any) -> None:
            calls.append(1)
            if len(calls) > 1:
                store(*args, **kwargs)

        return stored

    def plain(reset: Any) -> Any:
        def own(module: Any, *args: Any, **kwargs: Any) -> None:
            calls.extend([1] * module.primary_weights_in_fp8)
            if len(calls) == 1:
                module.primary_weights_in_fp8 = False
            reset(module, *args, **kwargs)

        return own

    if "transformer_engine_torch" in sys.modules:
        return patched("transformer_engine.pytorch.module.base:TransformerEngineBaseModule.reset_parameters", plain)
    return patched("bridge.runtime.megatron.emulation.emulated_model:store_weight", skip)


def no_context() -> Any:
    """Let Megatron enter no autocast."""
    path = "megatron.core.transformer.transformer_block:get_fp8_context"
    return patched(path, lambda _original: lambda *_args, **_named: nullcontext())


def no_first_microbatch() -> Any:
    """Never announce the first micro-batch of a step."""
    path = "megatron.core.transformer.module:MegatronModule.set_is_first_microbatch"
    return patched(path, lambda _original: lambda _self: None)


def coalesced() -> Any:
    """Gather the parameters of all dtypes in one collective, which gloo answers with other values."""
    import torch

    stack = ExitStack()
    stack.enter_context(
        patched("bridge.runtime.megatron.backend:gather_buckets_separately", lambda _original: nullcontext)
    )
    original = torch.distributed.distributed_c10d._coalescing_manager
    path = "megatron.core.distributed.param_and_grad_buffer:_coalescing_manager"
    stack.enter_context(patched(path, lambda _original: original))
    return stack


def misses_fc2(role: Any) -> Any:
    """Return the quantizer of a team's factory, whose list of names has linear_fc3 instead of linear_fc2."""
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.custom_recipes.quantizer_factories import (
        current_scaling_factory,
    )

    known = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc3")
    is_known = role is None or role.name.endswith(known)
    return current_scaling_factory(role) if is_known else te.IdentityQuantizer()


def gives_fc2_blocks(role: Any) -> Any:
    """Return the quantizer of a team's factory that gives linear_fc2 another scheme than the recipe's."""
    from transformer_engine.pytorch.custom_recipes import quantizer_factories as shipped

    is_fc2 = role is not None and role.name.endswith("linear_fc2")
    return (shipped.float8_block_scaling_factory if is_fc2 else shipped.current_scaling_factory)(role)


def with_names(run: Any) -> None:
    """Give Transformer Engine's modules their names, which a factory asks for."""
    from bridge.runtime.megatron.te.layers import name_te_modules

    name_te_modules(run.trainer.model[0].module.module)


def set_model(**fields: Any) -> Callable[[Any], None]:
    """Return a change of the model's config."""

    def change(config: Any) -> None:
        vars(config.model).update(fields)

    return change


def no_masters(config: Any) -> None:
    """Let the optimizer step on the BF16 weights, whose gradients must be in BF16 then."""
    config.optimizer.bf16 = False
    config.optimizer.clip_grad = 0.0
    config.ddp.grad_reduce_in_fp32 = False


def reduce_in_bf16(config: Any) -> None:
    """Reduce gradients in BF16."""
    config.ddp.grad_reduce_in_fp32 = False


RAN_BF16 = "planned e4m3 x e4m3 (tensorwise), ran bf16: "
ALL = "linear_qkv, linear_proj, linear_fc1, linear_fc2, fprop"
SABOTAGES = {
    "local spec": Sabotage(
        message=f"{RAN_BF16}layers 2-3, linear_qkv, linear_fc1, fprop; the module is a megatron ColumnParallelLinear",
        patched=local_spec,
    ),
    "autocast not entered": Sabotage(
        message=f"{RAN_BF16}layers 2-3, {ALL}; the autocast was not entered.", backends=("te_cpu",), patched=no_context
    ),
    "autocast disabled inside": Sabotage(
        message=f"{RAN_BF16}layer 3, linear_proj, fprop",
        built=lambda run: in_bf16(run, 3, "self_attention.linear_proj"),
    ),
    "fp8=None": Sabotage(message=f"{RAN_BF16}layers 2-3, linear_qkv", configs=set_model(fp8=None)),
    "first off by one": Sabotage(
        message=f"{RAN_BF16}layer 2, linear_qkv", configs=set_model(num_layers_at_start_in_bf16=2)
    ),
    "last off by one": Sabotage(
        message="planned bf16, ran e4m3 x e4m3 (tensorwise): layer 4, ",
        configs=set_model(num_layers_at_end_in_bf16=0),
    ),
    "one of two layers": Sabotage(message=f"{RAN_BF16}layer 3, linear_qkv", built=lambda run: in_bf16(run, 3)),
    "weights of one module in BF16": Sabotage(
        message="planned e4m3 as the stored format of the weight, got bf16: layer 2, linear_proj",
        patched=stay_in_bf16,
        arguments={"stored": True, "sharded": True},
    ),
    "nn.Linear": Sabotage(
        message=f"{RAN_BF16}layer 2, linear_fc2, fprop; the module is a ",
        built=swap_fc2,
    ),
    "off after some steps": Sabotage(message=f"{RAN_BF16}layers 2-3, linear_qkv", built=off_after(2), steps=4),
    "stale weights": Sabotage(
        message="planned the quantisation of the current weight, multiplied an older one: layers 2-3, linear_fc1",
        patched=no_first_microbatch,
    ),
    "no masters": Sabotage(
        message="planned fp32, got bf16: master weights.",
        configs=no_masters,
    ),
    "gradients in BF16": Sabotage(message="planned fp32, got bf16: gradient reduction.", configs=reduce_in_bf16),
    "a second autocast": Sabotage(
        message="planned bf16, ran e4m3 x e4m3 (blockwise): layers 1, 4, ",
        backends=("te_cpu",),
        built=second_autocast,
    ),
    "a transposed weight": Sabotage(message="planned a relative error of at most 0.125, got 1.", patched=transposed),
    "a factory that misses a name": Sabotage(
        message="planned custom x custom (custom), ran bf16: layers 2-3, linear_fc2; the autocast (custom) was on and ",
        backends=("te_cpu",),
        built=with_names,
        precision={"fp8_recipe": "custom", "fp8_quantizer_factory": "tests.runtime.audit.sabotage.misses_fc2"},
    ),
    "a factory that gives a module another scheme": Sabotage(
        message="planned e4m3 x e4m3 (tensorwise), ran e4m3 x e4m3 (blockwise): layers 2-3, linear_fc2, fprop",
        backends=("te_cpu",),
        built=with_names,
        configs=set_model(fp8_recipe="custom", fp8_quantizer_factory="tests.runtime.audit.sabotage.gives_fc2_blocks"),
    ),
    "another scheme for one module": Sabotage(
        message="planned e4m3 x e4m3 (tensorwise), ran e4m3 x e4m3 (blockwise): layer 3, linear_fc2, fprop",
        built=blockwise_fc2,
    ),
    "gathers that return garbage": Sabotage(
        message="planned the masters of the optimizer on every data-parallel rank, gathered other weights: layer",
        patched=coalesced,
        arguments={"stored": True, "sharded": True},
        processes=2,
    ),
}


def end_of(name: str, backend: str) -> str:
    """Return the error of a sabotaged run; empty where it trained to its end."""
    from bridge import MixedPrecisionConfig
    from bridge.errors import AuditError
    from bridge.training import loop
    from bridge.training.config import runtime_config_update
    from tests.training.loop_tiny import tiny

    sabotage = SABOTAGES[name]
    arguments = sabotage.arguments or {}
    train = {"train_iters": sabotage.steps, "eval_iters": 0, "global_batch_size": 4}
    config = tiny(model={"num_layers": 4}, train=train, **arguments)
    stored = bool(arguments.get("stored"))
    precision = {
        "bf16": True,
        "fp8": "hybrid",
        "fp8_recipe": "tensorwise",
        "fp8_param_gather": stored,
        "first_last_layers_bf16": True,
        "num_layers_at_start_in_bf16": 1,
        "num_layers_at_end_in_bf16": 1,
        "grad_reduce_in_fp32": True,
    }
    config.mixed_precision = MixedPrecisionConfig(**{**precision, **(sabotage.precision or {})})
    config.precision_backend = backend
    config.logging.quantisation_interval = 0
    runtime_config_update(config)
    sabotage.configs(config)
    build = loop.build_run

    def built(*args: Any, **kwargs: Any) -> Any:
        run = build(*args, **kwargs)
        sabotage.built(run)
        return run

    with tempfile.TemporaryDirectory() as folder, sabotage.patched(), patch.object(loop, "build_run", built):
        try:
            loop.pretrain(config, run_dir=Path(folder))
        except AuditError as error:
            return str(error)
    return ""


def make_runs(path: Path) -> None:
    """Make the runs of a plan and write their errors next to it."""
    plan = json.loads(path.read_text())
    if plan["backend"] == "te_cpu":
        declare("h100")
    ends = {name: end_of(name, plan["backend"]) for name in plan["names"]}
    (path.parent / f"ends-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    importlib.import_module("tests.runtime.audit.sabotage").make_runs(
        Path(sys.argv[1])
    )  # classes are those of the package
