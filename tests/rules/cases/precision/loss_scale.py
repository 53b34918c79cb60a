"""Runs that break and that keep the rules of `bridge.rules.topics.precision.loss_scale`."""

from tests.rules.cases.runs import DENSE, MOE, OVERLAP, recipe, run

FP16_MODEL = dict(DENSE, fp16=True, params_dtype="fp16")

CASES = {
    "PB141": (run(recipe("fp16_mixed", loss_scale=0.0)), run(recipe("fp16_mixed", loss_scale=128.0))),
    "PB142": (
        run(recipe("fp16_mixed", initial_loss_scale=1.0, min_loss_scale=2.0)),
        run(recipe("fp16_mixed", initial_loss_scale=2.0, min_loss_scale=2.0)),
    ),
    "PB143": (run(recipe("fp16_mixed", loss_scale_window=2.5)), run(recipe("fp16_mixed", loss_scale_window=2.0))),
    "PB144": (run(recipe("bf16_mixed", hysteresis=4)), run(recipe("fp16_mixed", hysteresis=4))),
    "PB145": (
        run("fp32", model=DENSE, optimizer={"loss_scale": 128.0}),
        run("fp32", model=DENSE, optimizer={"loss_scale": 128.0, "use_distributed_optimizer": True}),
    ),
    "PB146": (
        run(model=FP16_MODEL, optimizer=dict(OVERLAP, fp16=True), ddp=dict(OVERLAP, check_for_nan_in_grad=True)),
        run(
            "fp16_mixed",
            model=FP16_MODEL,
            optimizer=dict(OVERLAP, fp16=True),
            ddp=dict(OVERLAP, check_for_nan_in_grad=True),
        ),
    ),
    "PB147": (
        run("fp16_mixed", model=DENSE, optimizer={"optimizer": "muon"}),
        run("bf16_mixed", model=DENSE, optimizer={"optimizer": "muon"}),
    ),
    "PB148": (
        run("bf16_mixed", model=DENSE, optimizer={"optimizer": "muon", "loss_scale": 8.0}),
        run("bf16_mixed", model=DENSE, optimizer={"optimizer": "adam", "loss_scale": 8.0}),
    ),
    "PB149": (
        run("fp16_mixed", model=dict(MOE, expert_model_parallel_size=2), optimizer=OVERLAP),
        run("fp16_mixed", model=MOE, optimizer=OVERLAP),
    ),
}
