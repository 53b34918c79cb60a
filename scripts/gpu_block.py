"""A GPT block of Transformer Engine against the emulated one: same weights, same data, loss and gradients compared.

The two run other kernels around the same quantised GEMMs: norms and attention round to BF16 in another order, and under
delayed scaling Transformer Engine quantises a norm's output before it is rounded to BF16. A difference below 1 % in
front of a quantiser moves enough values over a rounding boundary, each by a whole step of the grid, that gradients move
nearly as far as quantisation itself moves them: 0.7 to 0.9 of it where the emulation ran twice with two attention
kernels, on a CPU. So the tolerance is relative to the distance of the same block in BF16: a right emulation is about as
far from Transformer Engine as no quantisation is, and a coarser format is farther. `gpu_linear.py` has the sharp
comparison, one GEMM at a time.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from gpu_report import Record, runnable

if TYPE_CHECKING:
    from collections.abc import Iterable

LOSS_TOLERANCE = 2e-3
"""Largest relative distance of the loss."""
BF16_TOLERANCE = 0.03
"""Largest relative distance (L2) of a gradient between the two blocks in BF16."""
FACTOR = 1.25
"""Largest distance of a gradient in low precision, in distances of the BF16 block."""

SCHEMES = {
    "bf16": {},
    "delayed": {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 16, "fp8_amax_compute_algo": "max"},
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
    "nvfp4": {"fp4": "e2m1", "fp4_recipe": "nvfp4"},
}
"""Name -> the fields of `TransformerConfig`."""

WARM_UP = 4
"""Passes before the one that is compared: delayed scaling starts from scale 1."""

SMALL = {
    "num_layers": 2,
    "hidden_size": 1024,
    "ffn_hidden_size": 4096,
    "num_attention_heads": 16,
    "num_query_groups": 4,
    "seq_length": 512,
}


def block_config(scheme: str, shape: dict[str, int]) -> Any:
    """Return Megatron's config of a Llama-like block: RMSNorm, SwiGLU, grouped queries, rotary positions, no biases."""
    from bridge.runtime.megatron.model.gpt import GPTConfig, adapt_config

    config = GPTConfig(
        **shape,
        **SCHEMES[scheme],
        bf16=True,
        params_dtype=torch.bfloat16,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func="silu",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        rotary_base=500000,
        init_method_std=shape["hidden_size"] ** -0.5,  # large enough for the block to change what passes through it
        layernorm_epsilon=1e-5,
        bias_activation_fusion=True,
        apply_rope_fusion=find_spec("transformer_engine") is not None,
        gradient_accumulation_fusion=False,
    )
    return adapt_config(config, vocab_size=128)[0]


def build_block(config: Any, backend: str, device: torch.device) -> Any:
    """Return Megatron's `TransformerBlock` in BF16, its linears from Transformer Engine, the emulation or Megatron."""
    from megatron.core.transformer.transformer_block import TransformerBlock

    from bridge.runtime.megatron.emulation.emulated_model import emulate_low_layers, store_low_weights
    from bridge.runtime.megatron.emulation.fp8_regions import attach_delayed_updates
    from bridge.runtime.megatron.model.layer_spec import build_block_spec

    block = TransformerBlock(config, build_block_spec(config, backend=backend), post_layer_norm=True)
    block = block.to(device=device, dtype=torch.bfloat16)
    if backend == "emulated":
        emulate_low_layers(block, config)
        store_low_weights(block, config, None)
        attach_delayed_updates(block, config)
    return block


def rotary_of(config: Any) -> torch.Tensor:
    """Return the rotary angles that a block of this config takes."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    rotary = RotaryEmbedding(
        config.kv_channels,
        rotary_percent=1.0,
        rotary_base=config.rotary_base,
        use_cpu_initialization=config.use_cpu_initialization,
    )
    return rotary(config.seq_length)


def copy_weights(source: Any, target: Any) -> None:
    """Give a block the weights of another one whose modules have other names.

    Transformer Engine keeps a norm's weight in the linear that follows it.

    Raises:
        KeyError: a weight has no counterpart.
    """
    weights = {plain_name(name): tensor for name, tensor in source.named_parameters()}
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            parameter.copy_(weights.pop(plain_name(name)))
    if weights:
        raise KeyError(f"without a counterpart: {', '.join(weights)}")


def plain_name(name: str) -> str:
    """Return a parameter's name in Megatron's local layers."""
    return name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.").replace(
        "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."
    )


def passes(block: Any, config: Any, device: torch.device, count: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Run forward and backward passes on the same data; return loss and gradients of the last one."""
    generator = torch.Generator().manual_seed(7)
    shape = (config.seq_length, 2, config.hidden_size)
    x = torch.randn(shape, generator=generator).to(device, torch.bfloat16)
    target = torch.randn(shape, generator=generator).to(device)
    rotary = rotary_of(config)
    for _ in range(count):
        block.zero_grad(set_to_none=True)
        block.set_is_first_microbatch()  # as Megatron's schedules do
        x = x.detach().requires_grad_()
        out = block(hidden_states=x, attention_mask=None, rotary_pos_emb=rotary)
        loss = torch.nn.functional.mse_loss(out.float(), target)
        loss.backward()
    gradients = {plain_name(name): weight.grad for name, weight in block.named_parameters()}
    return loss.item(), {"input": x.grad, **gradients}


def relative_distance(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return ``|mine - theirs| / |theirs|`` in L2, in FP64; 0 where both are zero, infinite where only theirs is."""
    difference = (mine.double() - theirs.double()).norm().item()
    size = theirs.double().norm().item()
    if size:
        return difference / size
    if difference:
        return float("inf")
    return 0.0


def compare_passes(
    scheme: str,
    mine: tuple[float, dict[str, torch.Tensor]],
    theirs: tuple[float, dict[str, torch.Tensor]],
    plain: tuple[float, dict[str, torch.Tensor]] | None = None,
) -> list[Record]:
    """Return one record for the loss and one for each gradient.

    Args:
        scheme: what ran.
        mine: loss and gradients of the emulation.
        theirs: loss and gradients of Transformer Engine.
        plain: those of Transformer Engine's BF16 block, for the tolerances; None where BF16 is what ran.
    """
    records = []

    def record(quantity: str, distance: float, tolerance: float, bf16_distance: float | None) -> None:
        about = {"part": "block", "scheme": scheme, "quantity": quantity, "distance": distance, "tolerance": tolerance}
        records.append({**about, "bf16_distance": bf16_distance, "ok": distance <= tolerance})

    def loss_distance(run: tuple[float, dict[str, torch.Tensor]]) -> float:
        return abs(run[0] - theirs[0]) / abs(theirs[0])

    bf16_distance = None
    if plain is not None:
        bf16_distance = loss_distance(plain)
    record("loss", loss_distance(mine), LOSS_TOLERANCE, bf16_distance)
    for name, gradient in theirs[1].items():
        bf16_distance, tolerance = None, BF16_TOLERANCE
        if plain is not None:
            bf16_distance = relative_distance(plain[1][name], gradient)
            tolerance = FACTOR * bf16_distance
        record(f"gradient of {name}", relative_distance(mine[1][name], gradient), tolerance, bf16_distance)
    return records


def records_of(schemes: Iterable[str] = SCHEMES, *, shape: dict[str, int] | None = None) -> list[Record]:
    """Compare Transformer Engine's block with the emulated one under each scheme this machine runs."""
    from bridge.runtime.megatron.process.training_process import training_process

    records: list[Record] = []
    plain = None
    for scheme in runnable("block", dict.fromkeys(("bf16", *schemes)), records):
        config = block_config(scheme, shape or SMALL)
        with training_process(config, seed=11) as process:
            backend = "emulated"
            if scheme == "bf16":
                backend = "local"
            te_block = build_block(config, "te", process.device)
            block = build_block(config, backend, process.device)
            copy_weights(te_block, block)
            theirs = passes(te_block, config, process.device, WARM_UP + 1)
            ours = passes(block, config, process.device, WARM_UP + 1)
            records += compare_passes(scheme, ours, theirs, plain)
            if scheme == "bf16":  # which runs first
                plain = theirs
    return records
