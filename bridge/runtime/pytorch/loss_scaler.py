"""`LossScaler`: Megatron's rule for FP16's loss scale, in torch's `GradScaler`.

    overflow:   one less of `hysteresis`; at none left, and from then on:
                scale = max(scale * backoff, min_scale)
    good step:  after `growth_interval` in a row, scale * growth, and hysteresis is whole again

torch's own scaler halves at the first overflow, knows no smallest scale and no constant one.
Source: Megatron-LM core/optimizer/grad_scaler.py 0.16.1, PyTorch 2.13 torch/amp/grad_scaler.py.
"""

from typing import Any

import torch


class LossScaler(torch.amp.GradScaler):
    """A `GradScaler` with Megatron's hysteresis and smallest scale; used exactly as torch's.

    Args:
        device: "cuda" or "cpu".
        init_scale: The scale to begin with.
        growth_interval: Good steps in a row after which the scale doubles.
        hysteresis: Overflows until the scale halves.
        min_scale: The scale never falls below this.
        constant: The scale never changes; steps with an overflow are still skipped.
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
        self.hysteresis, self.min_scale, self.constant = hysteresis, min_scale, constant
        self._left, self._good = hysteresis, 0

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Move the scale on after `step`; with `new_scale`, set it."""
        if new_scale is not None:
            super().update(new_scale)
            return
        before, overflowed = self.get_scale(), self._overflowed()
        super().update(before)  # clears what was found in this step
        if not self.constant:
            after = self._moved(before, overflowed)
            if after != before:
                super().update(after)

    def _overflowed(self) -> bool:
        for state in self._per_optimizer_states.values():
            if any(float(count) > 0 for count in state["found_inf_per_device"].values()):
                return True
        return False

    def _moved(self, scale: float, overflowed: bool) -> float:
        if overflowed:
            self._good, self._left = 0, self._left - 1
            if self._left > 0:
                return scale
            return max(scale * self.get_backoff_factor(), self.min_scale)
        self._good += 1
        if self._good < self.get_growth_interval():
            return scale
        self._good, self._left = 0, self.hysteresis
        return scale * self.get_growth_factor()

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and both counts."""
        return {**super().state_dict(), "hysteresis_left": self._left, "good_steps": self._good}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the scale and, where the state holds them, both counts."""
        of_torch = dict(state_dict)
        of_torch.pop("hysteresis_left", None)
        of_torch.pop("good_steps", None)
        super().load_state_dict(of_torch)
        self._left = state_dict.get("hysteresis_left", self.hysteresis)
        self._good = state_dict.get("good_steps", 0)
