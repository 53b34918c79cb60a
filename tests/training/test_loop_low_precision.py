"""Training with emulated FP8 and FP4 matmuls inside Megatron: what runs in what, storage, checkpoints."""

from __future__ import annotations

import pytest

from bridge.errors import BackendUnavailableError, RunConfigError
from bridge.training.loop import pretrain
from tests.training.grid import slow
from tests.training.loop_tiny import SIX, losses, records, tiny, trace

SCHEMES = ("tensorwise", "delayed", "blockwise", "mxfp8", "nvfp4")
FORMATS = {"nvfp4": ("e2m1", "e2m1")}
MODULES = ("linear_fc1", "linear_fc2", "linear_proj", "linear_qkv")


def gemms_of(summary):
    return {(r.layer, r.module, r.gemm): (r.left, r.right, r.scheme) for r in summary.gemms if r.layer != "output"}


@pytest.fixture(scope="module")
def in_bf16(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bf16")
    pretrain(tiny(train={"train_iters": 12}), run_dir=folder)
    return losses(folder)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_linear_of_every_layer_runs_its_three_gemms_in_the_scheme(scheme, tmp_path, in_bf16):
    summary = pretrain(tiny(low=scheme, train={"train_iters": 12}), run_dir=tmp_path)
    forward, backward = FORMATS.get(scheme, ("e4m3", "e5m2"))
    expected = {}
    for layer in ("1", "2"):
        for module in MODULES:
            expected[layer, module, "fprop"] = (forward, forward, scheme)
            expected[layer, module, "dgrad"] = (backward, forward, scheme)
            expected[layer, module, "wgrad"] = (backward, forward, scheme)
    assert gemms_of(summary) == expected
    trained = losses(tmp_path)
    assert trained != in_bf16
    assert trained[-1] == pytest.approx(in_bf16[-1], rel=0.02)


def test_bf16_run_says_that_no_gemm_was_low(tmp_path):
    summary = pretrain(tiny(train={"train_iters": 1}), run_dir=tmp_path)
    assert {record.scheme for record in summary.gemms} == {"none"}
    assert {(record.left, record.right) for record in summary.gemms} == {("bf16", "bf16")}


def test_first_and_last_layer_stay_in_bf16(tmp_path):
    summary = pretrain(tiny(low="tensorwise", model=SIX, train={"train_iters": 1}), run_dir=tmp_path)
    low = {record.layer for record in summary.gemms if record.scheme == "tensorwise"}
    high = {record.layer for record in summary.gemms if record.scheme == "none"}
    assert low == {"2", "3", "4", "5"}
    assert high == {"1", "6", "output"}


@pytest.mark.parametrize(
    ("scheme", "mode"),
    [
        ("delayed", "fp16"),  # the most to restore: histories of maxima, a loss scale
        slow("delayed", "bf16"),
        *(slow(scheme, mode) for scheme in SCHEMES if scheme != "delayed" for mode in ("bf16", "fp16")),
    ],
)
def test_resumed_run_with_stored_weights_is_exact(scheme, mode, tmp_path):
    schedule = {"train_iters": 6, "lr_decay_iters": 6, "eval_iters": 0}
    arguments = {"mode": mode, "sharded": True, "low": scheme, "stored": True}
    arguments["optimizer"] = {"initial_loss_scale": 256.0} if mode == "fp16" else {}
    saved = str(tmp_path / "checkpoints")
    pretrain(tiny(**arguments, train=schedule), run_dir=tmp_path / "whole")
    pretrain(tiny(**arguments, train={**schedule, "train_iters": 3}, save=saved), run_dir=tmp_path / "parts")
    pretrain(tiny(**arguments, train={**schedule, "seed": 99}, load=saved), run_dir=tmp_path / "parts")
    assert trace(tmp_path / "parts") == trace(tmp_path / "whole")


@pytest.mark.parametrize("sharded", [True, slow(False)])
def test_a_run_saved_at_a_skipped_step_is_resumed_exactly(sharded, tmp_path):
    """The step renews the delayed scales of its forward pass, and leaves the codes of the step before."""
    scaler = {"initial_loss_scale": 2.0**17, "hysteresis": 1, "loss_scale_window": 2}
    saved = tmp_path / "checkpoints"
    arguments = {"mode": "fp16", "sharded": sharded, "low": "delayed", "stored": True, "optimizer": scaler}
    arguments["train"] = {"train_iters": 10, "eval_iters": 0}
    pretrain(tiny(**arguments, save=str(saved), save_interval=1), run_dir=tmp_path / "whole")
    steps = records(tmp_path / "whole")
    last = max(step["step"] for step in steps[:-2] if step["skipped"] and step["step"] > 3)
    (saved / "latest_checkpointed_iteration.txt").write_text(f"{last}\n")
    pretrain(tiny(**arguments, load=str(saved)), run_dir=tmp_path / "resumed")
    assert trace(tmp_path / "resumed") == trace(tmp_path / "whole")[last:]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_stored_weights_hold_codes_and_scales_and_no_bf16_copy(scheme, tmp_path):
    summary = pretrain(tiny(sharded=True, low=scheme, stored=True, train={"train_iters": 2}), run_dir=tmp_path)
    sizes = {row.dtype: row.bytes for row in summary.census if row.kind == "parameters"}
    linear = 2 * (64 * 192 + 64 * 64 + 2 * 64 * 128)
    assert sizes["bfloat16"] == 2 * (summary.parameters - linear)
    scales_and_amaxes = {
        "tensorwise": 8 * (4 + 4),
        "delayed": 8 * (4 + 4),
        "blockwise": 2 * 4 * (2 + 1 + 1 + 1) + 8 * 4,  # (192, 64), (64, 64), (128, 64), (64, 128) in 128 x 128
        "mxfp8": 2 * linear // 32 + 8 * (4 + 4),
        "nvfp4": linear // 16 + 8 * 4,
    }
    codes = {"mxfp8": 2 * linear, "nvfp4": linear // 2}.get(scheme, linear)
    stored = next(size for name, size in sizes.items() if name.endswith(scheme))
    assert stored == codes + scales_and_amaxes[scheme]
    assert sum(row.bytes for row in summary.census if row.kind == "master weights") == 4 * summary.parameters


@pytest.mark.parametrize("scheme", ["tensorwise", "delayed", slow("mxfp8")])
def test_weights_stored_or_quantised_on_the_way_train_almost_alike(scheme, tmp_path):
    unclipped = {"clip_grad": 0.0}  # stored weights have buffers of their own, over which a norm is summed otherwise
    for stored in (False, True):
        run = tiny(sharded=True, low=scheme, stored=stored, optimizer=unclipped)
        pretrain(run, run_dir=tmp_path / str(stored))
    expected = losses(tmp_path / "False")
    assert losses(tmp_path / "True") == pytest.approx(expected, rel=2e-3 if scheme == "delayed" else 0)


@pytest.mark.parametrize("scheme", ["delayed", "nvfp4", slow("tensorwise"), slow("blockwise"), slow("mxfp8")])
def test_recomputation_changes_nothing(scheme, tmp_path):
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    part = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    schedule = {"train_iters": 4, "eval_iters": 0}
    for name, model in (("none", {}), ("full", full), ("mlp", part)):
        pretrain(tiny(low=scheme, model=model, train=schedule), run_dir=tmp_path / name)
    assert trace(tmp_path / "full") == trace(tmp_path / "none")
    assert trace(tmp_path / "mlp") == trace(tmp_path / "none")


@pytest.mark.parametrize("scheme", ["tensorwise", slow("mxfp8")])
def test_accumulated_gradients_are_those_of_the_whole_batch(scheme, tmp_path):
    """Weights quantised once a step; activations differ in where a tile ends, so the runs agree only nearly."""
    for micro in (1, 4):
        pretrain(tiny(low=scheme, train={"micro_batch_size": micro}), run_dir=tmp_path / str(micro))
    assert losses(tmp_path / "1") == pytest.approx(losses(tmp_path / "4"), rel=2e-3)


def test_run_that_keeps_every_layer_in_bf16_is_refused(tmp_path):
    with pytest.raises(RunConfigError) as raised:
        pretrain(tiny(low="tensorwise", model={"first_last_layers_bf16": True}), run_dir=tmp_path)
    assert str(raised.value) == (
        "PB266 model.first_last_layers_bf16: all 2 layers are kept in BF16, so nothing of this run is in tensorwise, "
        "got True. Lower the counts; or use a deeper model; or choose a recipe without FP8 and FP4."
    )


def test_transformer_engine_that_cannot_run_is_an_error_that_says_what_is_missing(tmp_path):
    config = tiny(low="tensorwise")
    config.precision_backend = "te"
    with pytest.raises(
        BackendUnavailableError, match=r"^precision_backend: Transformer Engine cannot run here, got 'te'"
    ):
        pretrain(config, run_dir=tmp_path)


def test_unknown_backend_gets_the_nearest(tmp_path):
    config = tiny(low="tensorwise")
    config.precision_backend = "emulate"
    with pytest.raises(RunConfigError) as raised:
        pretrain(config, run_dir=tmp_path)
    assert str(raised.value) == (
        "precision_backend: must be one of auto, te, emulated, te_cpu, got 'emulate'. Did you mean 'emulated'?"
    )


def test_what_cannot_be_emulated_is_named_all_at_once(tmp_path):
    recomputed = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    config = tiny(low="tensorwise", model={"fp8_dot_product_attention": True, **recomputed})
    with pytest.raises(RunConfigError) as raised:
        pretrain(config, run_dir=tmp_path)
    rule, remedy = "the emulated backend does not run it", "Turn it off; or run this where Transformer Engine works."
    assert str(raised.value).splitlines() == [
        f"PB615 model.fp8_dot_product_attention: {rule}, got True. {remedy}",
        f"PB615 model.recompute_modules: {rule}, got ['layernorm']. {remedy}",
    ]


@pytest.mark.parametrize("scheme", ["tensorwise", "mxfp8"])
def test_weights_gathered_during_the_forward_pass_are_those_gathered_before_it(scheme, tmp_path):
    # Validations and checkpoints gather them too; MXFP8 weights go through the gradients' buffer.
    traces = []
    for overlap in (False, True):
        both = {"optimizer": {"overlap_param_gather": overlap}, "ddp": {"overlap_grad_reduce": overlap}}
        both["ddp"]["overlap_param_gather"] = overlap
        folder = tmp_path / str(overlap)
        train = {"train_iters": 6, "eval_interval": 2, "eval_iters": 1}
        saved = {"save": str(folder / "saved"), "save_interval": 3}
        summary = pretrain(
            tiny(low=scheme, stored=True, sharded=True, train=train, **both, **saved), run_dir=folder / "run"
        )
        traces.append((trace(folder / "run"), summary.validation_loss))
    assert traces[0] == traces[1]
    assert traces[0][0][-1][1] < traces[0][0][0][1]


def test_parameters_whose_sizes_leave_gaps_in_the_buffers_are_gathered_from_their_places(tmp_path):
    latent = {"multi_latent_attention": True, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_layernorm": True}
    heads = {"qk_head_dim": 16, "qk_pos_emb_head_dim": 16, "v_head_dim": 16}
    config = tiny(sharded=True, low="mxfp8", stored=True, model={**latent, **heads}, train={"train_iters": 2})
    pretrain(config, run_dir=tmp_path)  # the audit compares every parameter with its master in step 2
