"""`LossScaler`: Megatron's rule for FP16's loss scale, in torch's `GradScaler`.

- Overflow: the count `hysteresis` is lowered by one. When it is used up, each overflow sets
  scale = max(scale * backoff, min_scale).
- Good step: after `growth_interval` good steps in a row scale = scale * growth, and `hysteresis` is
  restored.

torch's scaler halves the scale at the first overflow. It has no smallest scale and no constant
scale.

Source: Megatron-LM core/optimizer/grad_scaler.py 0.16.1, PyTorch 2.13 torch/amp/grad_scaler.py.
"""

from typing import Any

import torch


class LossScaler(torch.amp.GradScaler):
    """A `GradScaler` with Megatron's hysteresis and smallest scale. It is used like torch's.

    Args:
        device: "cuda" or "cpu".
        init_scale: The first scale.
        growth_interval: Steps without overflow in a row after which the scale doubles.
        hysteresis: Overflows until the scale halves.
        min_scale: Smallest scale.
        constant: Whether the scale never changes. Steps with an overflow are skipped in any case.
    """

    def __init__(
        self,
        device: str,
        *,
        init_scale: float,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        min_scale: float = 1.0,
        constant: bool = False,
    ) -> None:
        super().__init__(device, init_scale=init_scale, growth_interval=growth_interval)
        self.hysteresis = hysteresis
        self.min_scale = min_scale
        self.constant = constant
        self._hysteresis_left = hysteresis
        self._good_steps = 0

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Change the scale after `step` by the rule, or set it to `new_scale`."""
        if new_scale is not None:
            super().update(new_scale)
            return
        scale = self.get_scale()
        has_overflow = self._has_overflow()
        super().update(scale)  # sets the present scale, and clears the overflows of this step
        if not self.constant:
            next_scale = self._compute_next_scale(scale, has_overflow)
            if next_scale != scale:
                super().update(next_scale)

    def _has_overflow(self) -> bool:
        """Return whether a gradient of this step has NaN or infinity."""
        for state in self._per_optimizer_states.values():
            if any(float(count) > 0 for count in state["found_inf_per_device"].values()):
                return True
        return False

    def _compute_next_scale(self, scale: float, has_overflow: bool) -> float:
        """Return the scale of the next step, and update the counts of overflows and good steps."""
        if has_overflow:
            self._good_steps = 0
            self._hysteresis_left -= 1
            if self._hysteresis_left > 0:
                return scale
            return max(scale * self.get_backoff_factor(), self.min_scale)
        self._good_steps += 1
        if self._good_steps < self.get_growth_interval():
            return scale
        self._good_steps = 0
        self._hysteresis_left = self.hysteresis
        return scale * self.get_growth_factor()

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and both counts."""
        return {
            **super().state_dict(),
            "hysteresis_left": self._hysteresis_left,
            "good_steps": self._good_steps,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the scale and both counts. A state of torch's scaler has no counts."""
        torch_state = dict(state_dict)
        torch_state.pop("hysteresis_left", None)
        torch_state.pop("good_steps", None)
        super().load_state_dict(torch_state)
        self._hysteresis_left = state_dict.get("hysteresis_left", self.hysteresis)
        self._good_steps = state_dict.get("good_steps", 0)
