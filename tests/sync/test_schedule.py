"""`PrecisionSchedule`: its rows, what a switch may change, and what it writes."""

import pytest

from bridge import MixedPrecisionConfig, get_mixed_precision_config, synchronize
from bridge.errors import PrecisionTypeError, RunConfigError, SyncCheckError, UnknownRecipeError
from bridge.registry.schedule import PrecisionSchedule
from bridge.runtime.megatron.model.gpt import GPTConfig
from bridge.training.config import DistributedDataParallelConfig, OptimizerConfig

NVFP4 = get_mixed_precision_config("nvfp4").override(fp4_param_gather=False)


def owners(**model):
    return {
        "model": GPTConfig(num_layers=4, hidden_size=64, num_attention_heads=4, **model),
        "optimizer": OptimizerConfig(lr=1e-3, use_distributed_optimizer=True),
        "ddp": DistributedDataParallelConfig(use_distributed_optimizer=True),
    }


def schedule_of(*rows, precision=NVFP4, steps=100, **model):
    configs = owners(**model)
    synchronize(precision, **configs)
    return PrecisionSchedule(list(rows), precision, train_iters=steps, **configs), configs["model"]


def test_each_step_finds_the_fields_of_its_phase_in_the_model():
    rows = ({"until": 0.5}, {"until": 80, "recipe": "fp8_delayed", "fp8_param_gather": False, "fp8_margin": 1})
    schedule, model = schedule_of(*rows, {"recipe": "bf16_mixed"})
    assert [(phase.first, phase.last) for phase in schedule.phases] == [(1, 50), (51, 80), (81, 100)]
    seen = []
    for step in range(1, 101):
        entered = schedule.apply(step)
        if entered is not None:
            seen.append((step, entered.number, model.fp4, model.fp8, model.fp8_recipe, model.fp8_margin))
    assert seen == [
        (1, 1, "e2m1", None, "delayed", 0),
        (51, 2, None, "hybrid", "delayed", 1),
        (81, 3, None, None, "delayed", 0),
    ]


def test_a_phase_writes_what_a_sync_of_its_recipe_writes():
    schedule, model = schedule_of({"until": 10}, {"recipe": "fp8_current", "fp8_param_gather": False})
    fresh = owners()
    synchronize(get_mixed_precision_config("fp8_current").override(fp8_param_gather=False), **fresh)
    schedule.apply(11)
    settings = {name: value for name, value in vars(fresh["model"]).items() if name[0] != "_" and not callable(value)}
    assert settings == {name: getattr(model, name) for name in settings}
    assert model.first_last_layers_bf16 is True


def test_a_resumed_run_begins_in_the_phase_of_its_step():
    schedule, model = schedule_of({"until": 10}, {"recipe": "bf16_mixed"})
    assert schedule.apply(11).number == 2
    assert model.fp4 is None
    assert schedule.apply(12) is None


def test_the_order_of_sync_and_schedule_does_not_matter():
    before = owners()
    first = PrecisionSchedule([{"until": 10}, {"recipe": "bf16_mixed"}], NVFP4, train_iters=100, **before)
    after, _ = schedule_of({"until": 10}, {"recipe": "bf16_mixed"})
    assert [phase.values for phase in first.phases] == [phase.values for phase in after.phases]


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([], "precision_schedule: must be a list of at least two phases, got []."),
        ([{"until": 0.5}, 3], "precision_schedule, phase 2: must be a mapping, got 3."),
        ([{"untl": 0.5}, {"recipe": "bf16_mixed"}], "got 'untl'. Did you mean 'until'?"),
        ([{"until": 0.5, "fp8": "e4m3"}, {"recipe": "bf16_mixed"}], "state mixed_precision.fp8."),
        ([{"until": 0.5}, {"recipe": "bf16_mixed", "fp8_recip": "mxfp8"}], "Did you mean 'fp8_recipe'"),
        ([{"until": 1.5}, {"recipe": "bf16_mixed"}], "must be a share of the steps (0 to 1) or a step, got 1.5."),
        ([{"until": True}, {"recipe": "bf16_mixed"}], "must be a share of the steps (0 to 1) or a step, got True."),
        ([{"until": 100}, {"recipe": "bf16_mixed"}], "before step 100, the last one (train.train_iters), got 100."),
        ([{"until": 0.001}, {"recipe": "bf16_mixed"}], "got 0.001, which is step 0."),
        (
            [{"until": 20}, {"until": 10, "recipe": "mxfp8"}, {"recipe": "bf16_mixed"}],
            "precision_schedule, phase 2, until: must end after step 20",
        ),
        ([{}, {"recipe": "bf16_mixed"}], "phase 1, until: needs until, the end of the phase, got None."),
        ([{"until": 20}, {"until": 30, "recipe": "bf16_mixed"}], "the last phase lasts to the end of the run, got 30."),
        ([{"until": 20}, {"recipe": None}], "phase 2, recipe: a later phase needs a recipe, got None."),
        ([{"until": 20}, {"recipe": "auto"}], "a phase needs the name of a recipe, got 'auto'."),
        ([{"until": 20, "recipe": "mxfp8"}, {"recipe": "bf16_mixed"}], "the run's own mixed_precision"),
    ],
)
def test_rows_that_describe_no_schedule_are_refused(rows, text):
    with pytest.raises(RunConfigError) as raised:
        PrecisionSchedule(rows, NVFP4, train_iters=100, **owners())
    assert text in str(raised.value)


def test_an_unknown_recipe_of_a_phase_is_refused():
    with pytest.raises(UnknownRecipeError, match="bf16_mixed"):
        schedule_of({"until": 20}, {"recipe": "bf16_mixd"})


@pytest.mark.parametrize(
    ("precision", "row", "parts"),
    [
        ("mxfp8", {"recipe": "bf16_mixed"}, ("mixed_precision.fp8_param_gather", "stores the weights in FP8")),
        (
            NVFP4,
            {"recipe": "bf16_mixed", "grad_reduce_in_fp32": False},
            ("precision_schedule, phase 2", "ddp.grad_reduce_in_fp32=False (True in phase 1)"),
        ),
        (NVFP4, {"recipe": "fp16_mixed"}, ("precision_schedule, phase 2", "model.fp16=True (False in phase 1)")),
        ("bf16_mixed", {"recipe": "fp8_delayed"}, ("precision_schedule, phase 2", "model.fp8_param=True")),
        (
            NVFP4,
            {"recipe": "fp8_current", "fp8_param_gather": False, "fp8_dot_product_attention": True},
            ("precision_schedule, phase 2", "model.fp8_dot_product_attention=True"),
        ),
    ],
)
def test_a_switch_of_what_is_fixed_names_it_and_the_checkpoint_that_can(precision, row, parts):
    configs = owners()
    synchronize(precision, **configs)
    before = dict(vars(configs["model"]))
    with pytest.raises(SyncCheckError) as raised:
        PrecisionSchedule([{"until": 20}, row], precision, train_iters=100, **configs)
    (finding,) = raised.value.findings
    assert finding.path == parts[0]
    assert parts[1] in finding.rule
    assert "train.train_iters=20 checkpoint.save=FOLDER" in finding.remedy
    assert vars(configs["model"]) == before


def test_a_config_of_python_is_a_recipe_too():
    schedule, model = schedule_of({"until": 10}, {"recipe": MixedPrecisionConfig(bf16=True, fp8="e4m3")})
    schedule.apply(50)
    assert (model.fp8, model.fp8_recipe) == ("e4m3", "tensorwise")


ROW = [{"select": "*.linear_qkv", "precision": "bf16"}]


def test_rows_of_modules_that_act_under_fp8_alone_stay_in_a_phase_without_it():
    precision = get_mixed_precision_config("fp8_current").override(fp8_param_gather=False, modules=ROW)
    schedule, model = schedule_of({"until": 10}, {"recipe": "bf16_mixed"}, precision=precision)
    held = model.quant_recipe
    schedule.apply(11)
    assert (model.fp8, model.quant_recipe) == (None, held)


def test_other_modules_in_a_later_phase_are_refused_in_one_sentence():
    with pytest.raises(SyncCheckError, match="needs other modules than phase 1, fixed once the model is built"):
        schedule_of({"until": 10}, {"recipe": "fp8_current", "fp8_param_gather": False, "modules": ROW})


@pytest.mark.parametrize("stated", [{"grad_reduce_in_fp32": False}, {"exp_avg_dtype": "bf16"}, {"tf32": True}])
def test_a_field_that_no_given_config_has_is_not_taken_in_silence(stated):
    model = owners()["model"]
    with pytest.raises(RunConfigError, match="which no config given here has"):
        PrecisionSchedule([{"until": 10}, {"recipe": "bf16_mixed", **stated}], NVFP4, train_iters=100, model=model)


@pytest.mark.parametrize("step", ["3", None, 0, -1, True, 1.5])
def test_a_step_is_a_whole_number_from_one_on(step):
    schedule, _ = schedule_of({"until": 10}, {"recipe": "bf16_mixed"})
    with pytest.raises(PrecisionTypeError, match="step: must be the number of a step"):
        schedule.apply(step)
