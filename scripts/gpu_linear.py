"""One linear layer of Transformer Engine against `bridge.runtime.numerics.scaled_linear`: output and both gradients.

Both get the same input, weight and gradient, so both quantise the same values to the same codes, and what differs is
the order in which products are added up and, in Hopper's forward GEMM, the width they are added in. Stochastic rounding
is off on both sides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from gpu_block import relative_distance
from gpu_codes import recipe_of
from gpu_report import Record, runnable

from bridge.runtime.numerics import DelayedScaling, GemmPrecision, LinearCall, scaled_linear

if TYPE_CHECKING:
    from collections.abc import Iterable

FORMATS = {"delayed": "hybrid", "tensorwise": "hybrid", "blockwise": "e4m3", "mxfp8": "e4m3", "nvfp4": "e2m1"}
TOLERANCE = 5e-3
"""Largest relative distance (L2). Rounding a result to BF16 is 1.7e-3 by itself, no quantisation at all 3.7e-2 away."""

STEPS = 3
"""Passes on the same data: delayed scaling starts from scale 1."""

Results = dict[str, torch.Tensor]


def records_of(
    schemes: Iterable[str] = FORMATS, *, tokens: int = 1024, inputs: int = 2048, outputs: int = 1536
) -> list[Record]:
    """Compare a linear layer under each scheme this machine runs."""
    records: list[Record] = []
    for scheme in runnable("linear", [name for name in schemes if name in FORMATS], records):
        generator = torch.Generator().manual_seed(3)
        x = _random((tokens, inputs), 1.0, generator)
        w = _random((outputs, inputs), inputs**-0.5, generator)
        dy = _random((tokens, outputs), 1e-3, generator)
        plain = {"y": x @ w.T, "dx": dy @ w, "dw": dy.T @ x}
        records += compare_results(scheme, emulated(scheme, x, w, dy), transformer_engine(scheme, x, w, dy), plain)
    return records


def _random(shape: tuple[int, int], deviation: float, generator: torch.Generator) -> torch.Tensor:
    """Return normal numbers in BF16 on the GPU."""
    return torch.randn(shape, generator=generator).mul(deviation).bfloat16().cuda()


def compare_results(scheme: str, mine: Results, theirs: Results, plain: Results) -> list[Record]:
    """Return one record per result: its distance, and that of BF16."""
    records = []
    for name, result in theirs.items():
        distance = relative_distance(mine[name], result)
        about = {"part": "linear", "scheme": scheme, "quantity": name, "distance": distance, "tolerance": TOLERANCE}
        bf16_distance = relative_distance(plain[name], result)
        records.append({**about, "bf16_distance": bf16_distance, "ok": distance <= TOLERANCE})
    return records


def emulated(scheme: str, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> Results:
    """Return output, input gradient and weight gradient of the emulation's last pass."""
    precision = GemmPrecision(
        scheme=scheme,
        format=FORMATS[scheme],
        amax_history_len=16,
        disable_stochastic_rounding=scheme == "nvfp4",
    )
    state = None
    if scheme == "delayed":
        state = DelayedScaling(precision, device=x.device)
    for _ in range(STEPS):
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = scaled_linear(x, w, call=LinearCall(precision=precision, state=state))
        if state is not None:
            state.update("forward")
        y.backward(dy)
        if state is not None:
            state.update("backward")
    return {"y": y.detach(), "dx": x.grad, "dw": w.grad}


def transformer_engine(scheme: str, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> Results:
    """Return output, input gradient and weight gradient of `te.Linear`'s last pass."""
    import transformer_engine.pytorch as te

    recipe = recipe_of(scheme, FORMATS[scheme], amax_history_len=16)
    layer = te.Linear(w.shape[1], w.shape[0], bias=False, params_dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(w)
    for _ in range(STEPS):
        layer.weight.grad = None
        x = x.detach().requires_grad_()
        with autocast(recipe):
            y = layer(x)
        y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad}


def autocast(recipe: Any) -> Any:
    """Return Transformer Engine's context for a recipe, under the name that the installed version has for it."""
    import transformer_engine.pytorch as te

    if hasattr(te, "autocast"):
        return te.autocast(enabled=recipe is not None, recipe=recipe)
    return te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe)
