"""Optimizers whose state, updates or weights are not in FP32, known by their names.

Source: transformers 5.23.0 training_args.py (`OptimizerNames`), Axolotl 0.19.0 core/builders/base.py, DeepSpeed 0.9.5
runtime/fp16/onebit, flashoptim 0.1.3.
"""

import re

OPTIMIZERS = (
    (r"one_?bit|1bit|zero_?one", "it sends the momentum between ranks with one bit per value"),
    (r"^flash_", "FlashOptim quantises the optimizer's state and keeps 24 bits of each weight"),
    (r"anyprecision", "the dtypes of its state, and whether it keeps rounding errors, are arguments of its own"),
    (r"^optimi_", "weights in half precision are stepped on with Kahan summation"),
    (r"(?<![1-9])(8|4)_?bit|fp8|float8|int8", "the optimizer's state is kept in 8 bits or fewer"),
)
"""Pattern of an optimizer's name -> what keeps, sends or rounds values there with fewer bits than FP32."""


def low_precision_optimizer(name: object) -> str | None:
    """Return what is not FP32 about the optimizer of that name, as a clause; None where nothing is known to be."""
    if not isinstance(name, str):
        return None
    return next((detail for pattern, detail in OPTIMIZERS if re.search(pattern, name.lower())), None)
