"""The GPT of `conf/model` in plain PyTorch: a training step without Megatron.

Same parameters and the same arithmetic as `bridge.runtime.megatron.model.gpt` builds on one device (RMSNorm, rotary
positions, no biases, GELU, softmax in FP32, untied output head), trained in BF16 "O2": BF16 weights, FP32 master
weights and Adam, gradients clipped by their norm, no weight decay for norms. A benchmark times it against Megatron.
"""

# ruff: noqa: N803, N806 tensors carry their shape in capitals

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 torch's own abbreviation
from torch import nn

# Shapes: B batch, S sequence, H hidden, N heads, D head width, V vocabulary.


@dataclass(frozen=True, kw_only=True)
class PlainConfig:
    """Sizes of the model, under Megatron's names."""

    num_layers: int = 6
    hidden_size: int = 256
    num_attention_heads: int = 8
    ffn_hidden_size: int = 1024
    vocab_size: int = 256
    seq_length: int = 256
    rotary_base: float = 10000.0
    attention: str = "sdpa"
    """sdpa: `F.scaled_dot_product_attention`; explicit: scores, mask, FP32 softmax and values one after the other."""
    sdpa_dtype: torch.dtype = torch.bfloat16
    """Dtype of `sdpa`; float32 is many times faster on a CPU without BF16 instructions."""


def rotary_angles(config: PlainConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of the rotary angles, each [S, D]."""
    width = config.hidden_size // config.num_attention_heads
    inverse = config.rotary_base ** -(torch.arange(0, width, 2) / width)
    angles_SD = torch.outer(torch.arange(config.seq_length), inverse).repeat(1, 2)
    return angles_SD.cos(), angles_SD.sin()


def rotated(x_BNSD: torch.Tensor, cos_SD: torch.Tensor, sin_SD: torch.Tensor) -> torch.Tensor:
    """Rotate queries or keys by their positions."""
    first, second = x_BNSD.chunk(2, dim=-1)
    return x_BNSD * cos_SD + torch.cat((-second, first), dim=-1) * sin_SD


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.kind, self.sdpa_dtype = config.attention, config.sdpa_dtype
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        future_SS = torch.ones(config.seq_length, config.seq_length).triu(1).bool()
        self.register_buffer("future_SS", future_SS, persistent=False)

    def forward(self, x_BSH: torch.Tensor, cos_SD: torch.Tensor, sin_SD: torch.Tensor) -> torch.Tensor:
        """Attend to this and earlier positions."""
        batch, length, hidden = x_BSH.shape
        qkv = self.qkv(x_BSH).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q_BNSD = rotated(qkv[0], cos_SD, sin_SD)
        k_BNSD = rotated(qkv[1], cos_SD, sin_SD)
        v_BNSD = qkv[2]
        if self.kind == "sdpa":
            wide = [part.to(self.sdpa_dtype) for part in (q_BNSD, k_BNSD, v_BNSD)]
            out_BNSD = F.scaled_dot_product_attention(*wide, is_causal=True).to(x_BSH.dtype)
        else:
            scores_BNSS = (q_BNSD @ k_BNSD.mT) * q_BNSD.shape[-1] ** -0.5
            scores_BNSS = scores_BNSS.float().masked_fill(self.future_SS, -10000.0)
            out_BNSD = torch.softmax(scores_BNSS, dim=-1).to(x_BSH.dtype) @ v_BNSD
        return self.proj(out_BNSD.transpose(1, 2).reshape(batch, length, hidden))


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.hidden_size, eps=1e-5)
        self.attention = Attention(config)
        self.norm2 = nn.RMSNorm(config.hidden_size, eps=1e-5)
        self.fc1 = nn.Linear(config.hidden_size, config.ffn_hidden_size, bias=False)
        self.fc2 = nn.Linear(config.ffn_hidden_size, config.hidden_size, bias=False)

    def forward(self, x_BSH: torch.Tensor, cos_SD: torch.Tensor, sin_SD: torch.Tensor) -> torch.Tensor:
        """Attention and feed-forward, each added to its input."""
        x_BSH = x_BSH + self.attention(self.norm1(x_BSH), cos_SD, sin_SD)
        return x_BSH + self.fc2(F.gelu(self.fc1(self.norm2(x_BSH))))


class PlainGPT(nn.Module):
    """The language model; called with tokens and labels it returns the mean loss in nats per token."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=1e-5)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.angles = rotary_angles(config)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens_BS: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy."""
        x_BSH = self.embedding(tokens_BS)
        cos_SD, sin_SD = self.angles
        cos_SD, sin_SD = cos_SD.to(x_BSH.dtype), sin_SD.to(x_BSH.dtype)
        for block in self.blocks:
            x_BSH = block(x_BSH, cos_SD, sin_SD)
        logits_BSV = self.head(self.norm(x_BSH)).float()
        return F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten())


class PlainStep:
    """A training step with FP32 master weights: `step()` takes one and returns the loss."""

    def __init__(
        self,
        config: PlainConfig,
        *,
        dtype: torch.dtype = torch.bfloat16,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.1,
        seed: int = 1234,
    ) -> None:
        torch.manual_seed(seed)
        self.model = PlainGPT(config).to(dtype)
        self.weights = list(self.model.parameters())
        self.masters = [weight.detach().float().clone() for weight in self.weights]
        decayed = [master for master in self.masters if master.dim() > 1]
        exempt = [master for master in self.masters if master.dim() == 1]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": exempt, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)

    def reset_masters(self) -> None:
        """Copy the present weights into the masters."""
        torch._foreach_copy_(self.masters, [weight.detach() for weight in self.weights])

    def step(self, tokens_BS: torch.Tensor, labels_BS: torch.Tensor) -> float:
        """Forward, backward, clip, update the masters, round them into the weights."""
        loss = self.model(tokens_BS, labels_BS)
        loss.backward()
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.masters)
        return loss.item()
