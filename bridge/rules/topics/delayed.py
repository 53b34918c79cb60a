"""Delayed scaling: the amax history and the ranks that share it."""

from __future__ import annotations

from bridge.rules.rule import Rule, owners_rule, precision_rule

RULES = (
    Rule(
        heading="PB221: amax reduction over pipeline or expert ranks",
        predicate=lambda s: s.pp > 1 or s.ep > 1,
        warning="fp8_recipe: amax histories are reduced over groups of ranks, and every FP8 module has to run on all "
        "of them in the first step (PP {s.pp}, EP {s.ep}); hangs were reported",
        remedies=(
            "use fp8_recipe='tensorwise', which keeps no history",
            "make sure that no expert or stage stays idle",
        ),
        reported="NVIDIA/Megatron-LM issues 442 (2023-08-01) and 912 (2024-07-09); NVIDIA/TransformerEngine issue 2343",
        gate="is_delayed",
    ),
    precision_rule(
        heading="PB222: largest of one amax",
        predicate=lambda s: s.model.fp8_amax_history_len == 1 and s.model.fp8_amax_compute_algo == "max",
        info="fp8_amax_history_len: the largest of a history of one step is the most recent",
        remedies=("use 1024, the length that the delayed recipes state", "say fp8_amax_compute_algo='most_recent'"),
        verified="Transformer Engine 2.20 common/recipe/delayed_scaling.cu",
        gate="is_delayed",
    ),
    owners_rule(
        heading="PB223: first step without a scale",
        predicate=lambda s: s.model.fp8_param,
        info="model.fp8_param: delayed scaling begins with scale 1, and weights stored in FP8 are first cast with it",
        remedies=("warm up the learning rate", "use fp8_recipe='tensorwise'"),
        verified="Transformer Engine 2.20 pytorch/quantization.py quantized_model_init",
        gate="is_delayed",
    ),
)
