"""Training steps of a Llama-3-8B-shaped block: through the bridge, from Megatron's own config, and written by hand.

All run Transformer Engine's layers in the same order under the same recipe, with the same loss and the same optimizer;
the hand-written loop has nothing else. They take turns within one run, and medians count. The bridge costs the first's
time over the second's, Megatron the second's over the third's. Peak memory is that of one of them, above what was there
before it was built.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import TYPE_CHECKING, Any

import torch
from gpu_block import block_config, build_block, rotary_of
from gpu_linear import autocast
from gpu_report import Record, runnable, step_record

from bridge.runtime.megatron.backend import get_te_recipe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SCHEMES = ("bf16", "delayed", "tensorwise", "blockwise")

LLAMA_3_8B = {
    "num_layers": 1,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "seq_length": 8192,
}

WARM_UP = 5

# Shapes: S sequence, B batch, H hidden.


class HandWrittenLayer(torch.nn.Module):
    """The layer that Megatron's Transformer Engine spec builds, written down with Transformer Engine's modules."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.heads, self.groups, self.width = config.num_attention_heads, config.num_query_groups, config.kv_channels
        options = {"bias": False, "params_dtype": torch.bfloat16}
        normed = {**options, "eps": config.layernorm_epsilon, "normalization": "RMSNorm"}
        hidden, inner = config.hidden_size, config.ffn_hidden_size
        self.qkv = te.LayerNormLinear(hidden, (self.heads + 2 * self.groups) * self.width, **normed)
        self.attention = te.DotProductAttention(
            self.heads, self.width, num_gqa_groups=self.groups, qkv_format="sbhd", attn_mask_type="causal"
        )
        self.proj = te.Linear(self.heads * self.width, hidden, **options)
        self.fc1 = te.LayerNormLinear(hidden, 2 * inner, **normed)
        self.fc2 = te.Linear(inner, hidden, **options)

    def forward(self, x_SBH: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:  # noqa: N803 shape suffix
        """Attention and feed-forward, each added to its input."""
        from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
        from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

        length, batch, _ = x_SBH.shape
        first = {"is_first_microbatch": True}  # each step has new weights; their quantised copies stay in place
        grouped = self.qkv(x_SBH, **first).view(length, batch, self.groups, -1, self.width)
        query, key, value = grouped.split([self.heads // self.groups, 1, 1], dim=3)
        query = query.reshape(length, batch, self.heads, self.width)
        key = key.reshape(length, batch, self.groups, self.width)
        value = value.reshape(length, batch, self.groups, self.width)
        query = apply_rotary_pos_emb(query, rotary, tensor_format="sbhd", fused=True)
        key = apply_rotary_pos_emb(key, rotary, tensor_format="sbhd", fused=True)
        x_SBH = x_SBH + self.proj(self.attention(query, key, value), **first)  # noqa: N806 shape suffix
        return x_SBH + self.fc2(bias_swiglu_impl(self.fc1(x_SBH, **first), None), **first)


class HandWrittenBlock(torch.nn.Module):
    """Layers and a final norm."""

    def __init__(self, config: Any, recipe: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.layers = torch.nn.ModuleList(HandWrittenLayer(config) for _ in range(config.num_layers))
        self.norm = te.RMSNorm(config.hidden_size, eps=config.layernorm_epsilon).bfloat16()
        self.recipe = recipe

    def forward(self, x_SBH: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:  # noqa: N803 shape suffix
        """Run the layers under the recipe."""
        with autocast(self.recipe):
            for layer in self.layers:
                x_SBH = layer(x_SBH, rotary)  # noqa: N806 shape suffix
        return self.norm(x_SBH)


class TrainingStep:
    """Forward, backward and an AdamW step of a block on one batch; called, it takes one."""

    def __init__(self, forward: Callable[[torch.Tensor], torch.Tensor], weights: list[Any], x: torch.Tensor) -> None:
        self.forward, self.x = forward, x
        self.target = torch.randn_like(x)
        self.optimizer = torch.optim.AdamW(weights, lr=1e-5, fused=True)

    def __call__(self) -> None:
        """Take a step."""
        self.optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.mse_loss(self.forward(self.x), self.target).backward()
        self.optimizer.step()


def alternating_milliseconds(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Return each step's median time on the GPU, the steps taking turns."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps.items())
    for _ in range(rounds):
        order = [*order[1:], order[0]]  # each goes first as often: what ran before a step changes its time
        for name, step in order:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start.record()
            step()
            end.record()
            torch.cuda.synchronize()
            taken[name].append(start.elapsed_time(end))
    return {name: statistics.median(times) for name, times in taken.items()}


def built_with_peak(build: Callable[[], TrainingStep]) -> tuple[TrainingStep, float]:
    """Return a step that has been warmed up, and the most memory it held above what was there before it."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step = build()
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    return step, torch.cuda.max_memory_allocated() - before


def records_of(
    schemes: Iterable[str] = SCHEMES,
    *,
    shape: dict[str, int] | None = None,
    micro_batch_size: int = 1,
    rounds: int = 30,
) -> list[Record]:
    """Measure every scheme that this machine runs, BF16 first."""
    from bridge.runtime.megatron.process import training_process

    shape = shape or LLAMA_3_8B
    records: list[Record] = []
    bf16_milliseconds = None
    for scheme in runnable("steps", dict.fromkeys(("bf16", *schemes)), records):
        config = block_config(scheme, shape)
        with training_process(config, seed=5) as process:
            measured = _measured(config, process.device, micro_batch_size, rounds)
        records.append(step_record(scheme, measured, bf16_milliseconds))
        if scheme == "bf16":
            bf16_milliseconds = measured["bridge"]["milliseconds"]
            records[-1]["speed_up"] = 1.0
    return records


def megatrons_block(config: Any, device: torch.device) -> Any:
    """Return Megatron's `TransformerBlock` as its users build it: its own config class, its own spec."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlock

    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(TransformerConfig) if field.init}
    plain = TransformerConfig(**fields)
    spec = get_gpt_decoder_block_spec(plain, use_transformer_engine=True, normalization=plain.normalization)
    return TransformerBlock(plain, spec, post_layer_norm=True).to(device=device, dtype=torch.bfloat16)


def _measured(config: Any, device: torch.device, batch_size: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return milliseconds and peak memory of the bridge's block, of Megatron's own and of the hand-written one."""
    x = torch.randn(config.seq_length, batch_size, config.hidden_size, device=device, dtype=torch.bfloat16)
    rotary = rotary_of(config).to(device)
    recipe = get_te_recipe(config)

    def of_megatron(block: Any) -> TrainingStep:
        def forward(x_SBH: torch.Tensor) -> torch.Tensor:  # noqa: N803 shape suffix
            block.set_is_first_microbatch()  # as Megatron's schedules do
            return block(hidden_states=x_SBH, attention_mask=None, rotary_pos_emb=rotary)

        return TrainingStep(forward, list(block.parameters()), x)

    def by_hand() -> TrainingStep:
        block = HandWrittenBlock(config, recipe).to(device)
        return TrainingStep(lambda batch: block(batch, rotary), list(block.parameters()), x)

    builders = {
        "bridge": lambda: of_megatron(build_block(config, "te", device)),
        "megatron": lambda: of_megatron(megatrons_block(config, device)),
        "by_hand": by_hand,
    }
    built = {name: built_with_peak(build) for name, build in builders.items()}
    milliseconds = alternating_milliseconds({name: step for name, (step, _) in built.items()}, rounds)
    return {name: {"milliseconds": milliseconds[name], "peak_bytes": built[name][1]} for name in builders}
