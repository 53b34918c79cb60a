"""The state-space layer of Mamba-2 in plain torch, without the GPU kernels of `mamba_ssm`.

A head has a state h of P x N numbers. A token with step d, input x and vectors B and C changes it:

    h = exp(d A) h + d x B^T,    y = h C + D x

`scan_chunks` computes this in chunks of K tokens: inside a chunk as a masked product, and between
chunks through the states at their ends.

Axes: B batch, L tokens, H heads, P channels of a head, G groups of heads, N state, C chunks, K
tokens of a chunk, W taps of the convolution.

Source: mamba_ssm 2.3 ops/triton/ssd_combined.py, modules/ssd_minimal.py and
ops/triton/layernorm_gated.py. *Differs*: the kernels multiply chunks in the dtype of x with FP32
sums; here they are multiplied in FP32.
"""

# ruff: noqa: N803, N806, PLR0917 tensors carry their shape in capitals; the arguments are those of mamba_ssm

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 torch's own abbreviation


def scan_chunks(
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

    Args:
        x: (B, L, H, P).
        dt: (B, L, H) steps.
        A: (H) decays, which are negative.
        B: (B, L, G, N).
        C: (B, L, G, N).
        chunk_size: Tokens of a chunk; a shorter sequence is a single chunk.
        D: (H) or (H, P) skip weights.
        z: (B, L, H, P) gate.
        dt_bias: (H), added to the steps.
        dt_softplus: Whether the steps are the softplus of `dt + dt_bias`.
        **others: Settings of inference and of packed sequences.

    Raises:
        NotImplementedError: One of `others` is set.
    """
    _refuse_options(others)
    tokens = x.shape[1]
    size = min(chunk_size, tokens)
    heads_per_group = x.shape[2] // B.shape[2]
    dt_BLH = _compute_time_steps(dt, dt_bias, softplus=dt_softplus)
    x_BCKHP = _split_into_chunks(x.float() * dt_BLH[..., None], size)
    B_BCKHN = _split_into_chunks(B.float(), size).repeat_interleave(heads_per_group, 3)
    C_BCKHN = _split_into_chunks(C.float(), size).repeat_interleave(heads_per_group, 3)
    decay_BCKH1 = _split_into_chunks((dt_BLH * A.float())[..., None], size)
    decay_BHCK = decay_BCKH1[..., 0].permute(0, 3, 1, 2).cumsum(-1)
    inside_BCKHP = _scan_inside_chunks(x_BCKHP, B_BCKHN, C_BCKHN, decay_BHCK)
    between_BCKHP = _scan_between_chunks(x_BCKHP, B_BCKHN, C_BCKHN, decay_BHCK)
    y_BLHP = (inside_BCKHP + between_BCKHP).flatten(1, 2)[:, :tokens]
    if D is not None:
        skip = D.float()
        if D.dim() == 1:
            skip = skip[:, None]
        y_BLHP = y_BLHP + x.float() * skip
    if z is not None:
        y_BLHP = y_BLHP * F.silu(z.float())
    return y_BLHP.to(x.dtype)


def _compute_time_steps(
    dt: torch.Tensor, bias: torch.Tensor | None, *, softplus: bool
) -> torch.Tensor:
    """Return the steps in FP32, (B, L, H)."""
    dt_BLH = dt.float()
    if bias is not None:
        dt_BLH = dt_BLH + bias.float()
    if softplus:
        dt_BLH = F.softplus(dt_BLH)
    return dt_BLH


def _scan_inside_chunks(
    x: torch.Tensor, B: torch.Tensor, C: torch.Tensor, decay_BHCK: torch.Tensor
) -> torch.Tensor:
    """Return the contribution of a chunk's tokens to its later tokens, (B, C, K, H, P).

    Args:
        x: (B, C, K, H, P), inputs times steps.
        B: (B, C, K, H, N).
        C: (B, C, K, H, N).
        decay_BHCK: Logarithm of the decay, summed from the start of the chunk.
    """
    decay_between_BHCKK = decay_BHCK[..., :, None] - decay_BHCK[..., None, :]
    is_past = torch.ones(decay_between_BHCKK.shape[-2:], dtype=torch.bool, device=x.device).tril()
    weights_BHCKK = decay_between_BHCKK.masked_fill(~is_past, -torch.inf).exp()
    return torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", C, B, weights_BHCKK, x)


def _scan_between_chunks(
    x: torch.Tensor, B: torch.Tensor, C: torch.Tensor, decay_BHCK: torch.Tensor
) -> torch.Tensor:
    """Return the contribution of earlier chunks to each token, (B, C, K, H, P).

    The arguments are the same as for `_scan_inside_chunks`.
    """
    decay_to_end_BHCK = (decay_BHCK[..., -1:] - decay_BHCK).exp()
    added_BCHPN = torch.einsum("bclhn,bhcl,bclhp->bchpn", B, decay_to_end_BHCK, x)
    states_BCHPN = _compute_chunk_states(added_BCHPN, decay_BHCK[..., -1].exp())
    return torch.einsum("bclhn,bchpn,bhcl->bclhp", C, states_BCHPN, decay_BHCK.exp())


def _refuse_options(others: dict[str, Any]) -> None:
    """Refuse settings of inference and of packed sequences, and a norm before the gate.

    Raises:
        NotImplementedError: A setting is neither None nor False.
    """
    active = []
    for name, value in others.items():
        if value is not None and value is not False:
            active.append(name)
    if active:
        names = ", ".join(sorted(active))
        raise NotImplementedError(f"the state-space layer in plain torch has no {names}")


def _split_into_chunks(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Return (B, L, ., .) as (B, C, K, ., .), padded at the end with zeros.

    The zeros change no state.
    """
    padded = F.pad(tensor, (0, 0, 0, 0, 0, -tensor.shape[1] % size))
    return torch.unflatten(padded, 1, (-1, size))


def _compute_chunk_states(added_BCHPN: torch.Tensor, kept_BHC: torch.Tensor) -> torch.Tensor:
    """Return the state at the beginning of each chunk, (B, C, H, P, N).

    Args:
        added_BCHPN: The addition of each chunk to the state.
        kept_BHC: The factor of each chunk on the state before it.
    """
    before = []
    state_BHPN = torch.zeros_like(added_BCHPN[:, 0])
    for chunk in range(added_BCHPN.shape[1]):
        before.append(state_BHPN)
        state_BHPN = state_BHPN * kept_BHC[:, :, chunk, None, None] + added_BCHPN[:, chunk]
    return torch.stack(before, 1)


def convolve_and_scan(
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
    """Return the gated output (B, L, H P) of a mixer, as `mamba_split_conv1d_scan_combined` does.

    Args:
        zxbcdt: (B, L, 2 H P + 2 G N + H), the result of the input projection: gate, inputs, B, C
            and steps.
        conv1d_weight: (H P + 2 G N, W), taps of the causal convolution of inputs, B and C.
        conv1d_bias: (H P + 2 G N). None: no bias.
        dt_bias: (H), added to the steps.
        A: (H) decays.
        D: (H) or (H, P) skip weights.
        chunk_size: Tokens of a chunk.
        headdim: P; needed where D is (H).
        ngroups: G.
        activation: silu or swish, two names of the same function.
        **others: As for `scan_chunks`, and settings of a norm in the kernel.

    Raises:
        NotImplementedError: One of `others` is set, or the activation is not silu or swish.
    """
    _refuse_options({**others, "another activation": activation not in ("silu", "swish")})
    heads, width = dt_bias.shape[0], conv1d_weight.shape[1]
    if headdim is None:
        headdim = D.shape[1]
    inner = heads * headdim
    z, xBC, dt = torch.split(zxbcdt, [inner, conv1d_weight.shape[0], heads], -1)
    padded = F.pad(xBC.transpose(1, 2), (width - 1, 0))
    convolved = F.conv1d(padded, conv1d_weight[:, None], conv1d_bias, groups=conv1d_weight.shape[0])
    state = (conv1d_weight.shape[0] - inner) // 2
    x, B, C = torch.split(F.silu(convolved).transpose(1, 2), [inner, state, state], -1)
    x_BLHP = torch.unflatten(x, -1, (heads, -1))
    z_BLHP = torch.unflatten(z, -1, (heads, -1))
    B_BLGN = torch.unflatten(B, -1, (ngroups, -1))
    C_BLGN = torch.unflatten(C, -1, (ngroups, -1))
    y = scan_chunks(
        x_BLHP, dt, A, B_BLGN, C_BLGN, chunk_size, D=D, z=z_BLHP, dt_bias=dt_bias, dt_softplus=True
    )
    return y.flatten(2)


class GatedRMSNorm(torch.nn.Module):
    """RMS norm of groups of channels after a gate: `RMSNorm` of mamba_ssm without `norm_before_gate`."""

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
        _refuse_options({"norm before the gate": norm_before_gate})
        self.eps = eps
        self.group_size = group_size or hidden_size
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """Return the norm of x * silu(z), computed in FP32, in the dtype of x."""
        gated = x.float()
        if z is not None:
            gated = gated * F.silu(z.float())
        groups = torch.unflatten(gated, -1, (-1, self.group_size))
        deviation = torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        normed = (groups * deviation).flatten(-2)
        return (normed * self.weight.float()).to(x.dtype)
