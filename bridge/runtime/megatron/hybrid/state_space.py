"""The state-space layer of Mamba-2 in plain torch, for a machine without the GPU kernels of `mamba_ssm`.

A head keeps a state h of P x N numbers. Token by token, with its step d, its input x and the vectors B and C:

    h = exp(d A) h + d x B^T,    y = h C + D x

`chunk_scan` computes that in chunks of K tokens: inside a chunk as a masked product, between chunks by the states at
their ends.

Axes: B batch, L tokens, H heads, P channels of a head, G groups of heads, N state, C chunks, K tokens of a chunk, W
taps of the convolution.

Source: mamba_ssm 2.3 ops/triton/ssd_combined.py, modules/ssd_minimal.py and ops/triton/layernorm_gated.py. *Differs*:
the kernels multiply chunks in the dtype of x with FP32 sums; here they are multiplied in FP32.
"""

# ruff: noqa: N803, N806, PLR0917 tensors carry their shape in capitals; the arguments are those of mamba_ssm

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 torch's own abbreviation


def chunk_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    *,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    **others: Any,
) -> torch.Tensor:
    """Return y (B, L, H, P) in the dtype of x, as `mamba_chunk_scan_combined` of mamba_ssm does.

    Inputs are x (B, L, H, P), the steps dt (B, L, H), decays A (H), which are negative, and the vectors B and C
    (B, L, G, N); a sequence shorter than `chunk_size` is one chunk. D (H), or (H, P), are skip weights and z
    (B, L, H, P) is a gate. `dt_bias` (H) is added to the steps, before the softplus where `dt_softplus` asks for it.
    The others are settings of inference and of packed sequences; one that is set raises NotImplementedError.
    """
    _require_plain(others)
    tokens, size, heads = x.shape[1], min(chunk_size, x.shape[1]), x.shape[2] // B.shape[2]
    given_BLH = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    dt_BLH = F.softplus(given_BLH) if dt_softplus else given_BLH
    parts = (x.float() * dt_BLH[..., None], B.float(), C.float(), (dt_BLH * A.float())[..., None])
    x_BCKHP, B_BCKGN, C_BCKGN, decay_BCKH1 = (_in_chunks(part, size) for part in parts)
    B_BCKHN, C_BCKHN = (part.repeat_interleave(heads, 3) for part in (B_BCKGN, C_BCKGN))
    decay_BHCK = decay_BCKH1[..., 0].permute(0, 3, 1, 2).cumsum(-1)
    y = _inside_chunks(x_BCKHP, B_BCKHN, C_BCKHN, decay_BHCK) + _between_chunks(
        x_BCKHP, B_BCKHN, C_BCKHN, decay_BHCK
    )
    y_BLHP = y.flatten(1, 2)[:, :tokens]
    if D is not None:
        y_BLHP = y_BLHP + x.float() * (D.float()[:, None] if D.dim() == 1 else D.float())
    return (y_BLHP if z is None else y_BLHP * F.silu(z.float())).to(x.dtype)


def _inside_chunks(
    x: torch.Tensor, B: torch.Tensor, C: torch.Tensor, decay_BHCK: torch.Tensor
) -> torch.Tensor:
    """Return what the tokens of a chunk add to the later ones, (B, C, K, H, P); decays are summed from its start."""
    since_BHCKK = decay_BHCK[..., :, None] - decay_BHCK[..., None, :]
    past = torch.ones(since_BHCKK.shape[-2:], dtype=torch.bool, device=x.device).tril()
    weights_BHCKK = since_BHCKK.masked_fill(~past, -torch.inf).exp()
    return torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", C, B, weights_BHCKK, x)


def _between_chunks(
    x: torch.Tensor, B: torch.Tensor, C: torch.Tensor, decay_BHCK: torch.Tensor
) -> torch.Tensor:
    """Return what the chunks before add to each token, (B, C, K, H, P)."""
    left_BHCK = (decay_BHCK[..., -1:] - decay_BHCK).exp()
    added_BCHPN = torch.einsum("bclhn,bhcl,bclhp->bchpn", B, left_BHCK, x)
    states_BCHPN = _states_before(added_BCHPN, decay_BHCK[..., -1].exp())
    return torch.einsum("bclhn,bchpn,bhcl->bclhp", C, states_BCHPN, decay_BHCK.exp())


def _require_plain(others: dict[str, Any]) -> None:
    """Refuse what no training run of Megatron has: settings of inference or of packing, a norm before the gate."""
    asked = [name for name, value in others.items() if value is not None and value is not False]
    if asked:
        raise NotImplementedError(
            f"the state-space layer in plain torch has no {', '.join(sorted(asked))}"
        )


def _in_chunks(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Return (B, L, ., .) as (B, C, K, ., .), padded at the end with zeros, which change no state."""
    return torch.unflatten(F.pad(tensor, (0, 0, 0, 0, 0, -tensor.shape[1] % size)), 1, (-1, size))


def _states_before(added_BCHPN: torch.Tensor, kept_BHC: torch.Tensor) -> torch.Tensor:
    """Return the state at the beginning of each chunk: what a chunk adds, and the part of the state that it keeps."""
    state_BHPN, before = torch.zeros_like(added_BCHPN[:, 0]), []
    for chunk in range(added_BCHPN.shape[1]):
        before.append(state_BHPN)
        state_BHPN = state_BHPN * kept_BHC[:, :, chunk, None, None] + added_BCHPN[:, chunk]
    return torch.stack(before, 1)


def convolved_scan(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    chunk_size: int,
    *,
    headdim: int | None = None,
    ngroups: int = 1,
    activation: str = "silu",
    **others: Any,
) -> torch.Tensor:
    """Return the gated output (B, L, H P) of a whole mixer, as `mamba_split_conv1d_scan_combined` of mamba_ssm does.

    `zxbcdt` (B, L, 2 H P + 2 G N + H) is the result of the input projection: gate, inputs, B, C and steps. The causal
    convolution of inputs, B and C has weights (H P + 2 G N, W). `headdim` is P, where D is (H), and `ngroups` is G. The
    others are those of `chunk_scan`, and one of a norm in the kernel, which Megatron does not ask for.
    """
    _require_plain({**others, "another activation": activation not in ("silu", "swish")})
    heads, width = dt_bias.shape[0], conv1d_weight.shape[1]
    inner = heads * (D.shape[1] if headdim is None else headdim)
    z, xBC, dt = torch.split(zxbcdt, [inner, conv1d_weight.shape[0], heads], -1)
    padded = F.pad(xBC.transpose(1, 2), (width - 1, 0))
    convolved = F.conv1d(padded, conv1d_weight[:, None], conv1d_bias, groups=conv1d_weight.shape[0])
    state = (conv1d_weight.shape[0] - inner) // 2
    x, B, C = torch.split(F.silu(convolved).transpose(1, 2), [inner, state, state], -1)
    x_BLHP, z_BLHP = (torch.unflatten(part, -1, (heads, -1)) for part in (x, z))
    B_BLGN, C_BLGN = (torch.unflatten(part, -1, (ngroups, -1)) for part in (B, C))
    y = chunk_scan(
        x_BLHP, dt, A, B_BLGN, C_BLGN, chunk_size, D=D, z=z_BLHP, dt_bias=dt_bias, dt_softplus=True
    )
    return y.flatten(2)


class GatedRMSNorm(torch.nn.Module):
    """RMS norm of groups of channels with the gate before it, as `RMSNorm` of mamba_ssm without `norm_before_gate`."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _require_plain({"norm before the gate": norm_before_gate})
        self.eps, self.group_size = eps, group_size or hidden_size
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """Return x multiplied with silu(z) and normed, in the dtype of x; computed in FP32."""
        gated = x.float() if z is None else x.float() * F.silu(z.float())
        groups = torch.unflatten(gated, -1, (-1, self.group_size))
        normed = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)).flatten(
            -2
        )
        return (normed * self.weight.float()).to(x.dtype)
