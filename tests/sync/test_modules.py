"""`modules` in the sync: the recipe that Megatron's own config holds."""

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hydra.utils import get_method, instantiate
from megatron.core import parallel_state
from megatron.core.quantization.quant_config import RecipeConfig
from megatron.core.quantization.utils import get_quant_config_or_none
from torch.testing._internal.distributed.fake_pg import FakeStore

from bridge import get_mixed_precision_config, synchronize
from bridge.errors import RunConfigError, SyncCheckError, SyncConflictError
from bridge.precision.mode import format_label
from bridge.precision.module_row import parse_module_rows
from bridge.precision.module_schemes import make_chunk_recipes

PIPELINE = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.bfloat16}
ROWS = [
    {"select": "*.linear_qkv", "precision": "bf16"},
    {"select": {"layers": [0, -1], "module": "linear_fc2"}, "precision": "mxfp8"},
]


def recipe(rows: Any = ROWS) -> Any:
    config = get_mixed_precision_config("bf16_with_fp8_current_scaling_mixed")
    config.fp8_param_gather = False
    config.modules = rows
    return config


def test_the_model_gets_megatrons_recipe_and_a_second_sync_changes_nothing(megatron_owners) -> None:
    owners = megatron_owners(num_layers=4)
    synchronize(recipe(), **owners)
    held = owners["model"].quant_recipe
    assert isinstance(held, RecipeConfig)
    assert get_quant_config_or_none("decoder.layers.3.mlp.linear_fc2", held).config_key == "mxfp8"
    assert get_quant_config_or_none("decoder.layers.2.mlp.linear_fc2", held) is None
    again = synchronize(recipe(), **owners)
    assert again.changes == ()
    assert owners["model"].quant_recipe is held


def test_the_recipe_can_be_copied_and_sent(megatron_owners) -> None:
    owners = megatron_owners(num_layers=4)
    synchronize(recipe(), **owners)
    held = owners["model"].quant_recipe
    assert pickle.loads(pickle.dumps(held)) == copy.deepcopy(held) == held  # noqa: S301 our own
    assert repr(held) in str(synchronize(recipe(), **megatron_owners(num_layers=4)).row("model.quant_recipe"))


def test_megatron_bridges_container_writes_a_recipe_that_can_be_made_again(megatron_owners) -> None:
    owners = megatron_owners(num_layers=4)
    synchronize(recipe(), **owners)
    held = owners["model"].quant_recipe
    again = instantiate(held.to_cfg_dict(), _convert_="all")
    assert type(again) is RecipeConfig
    assert (repr(again.matchers), again.configs) == (repr(held.matchers), held.configs)
    owners = megatron_owners(num_layers=4, **PIPELINE)
    synchronize(recipe(), **owners)
    held = owners["model"].quant_recipe
    written = held.to_cfg_dict()
    assert get_method(written["_target_"])(RecipeConfig, written["files"], written["stages"]) == held


def test_a_stage_needs_to_be_known_where_stages_differ(megatron_owners) -> None:
    owners = megatron_owners(num_layers=4, **PIPELINE)
    synchronize(recipe(), **owners)
    with pytest.raises(RunConfigError) as caught:
        get_quant_config_or_none("decoder.layers.1.mlp.linear_fc2", owners["model"].quant_recipe)
    assert str(caught.value) == (
        "mixed_precision.modules: the rows name layers, so each pipeline stage has a recipe of its own, and the stage "
        "is not known yet. Build the model after Megatron's initialize_model_parallel."
    )


def test_each_chunk_of_a_stage_has_its_own_recipe_for_a_trainer_that_asks(megatron_owners) -> None:
    sizes = {"num_layers": 8, "virtual_pipeline_model_parallel_size": 2, **PIPELINE}
    owners = megatron_owners(**sizes)
    report = synchronize(recipe(), **owners)
    assert [one.id for one in report.findings] == ["PB285"]
    held = owners["model"].quant_recipe
    files = make_chunk_recipes(parse_module_rows(recipe().modules), [(0, 1), (2, 3), (4, 5), (6, 7)], run="hybrid")
    assert [held.of_chunk(chunk).files for chunk in (0, 1)] == [tuple(files[:2]), tuple(files[2:])]
    assert isinstance(held.of_chunk(1), RecipeConfig)
    assert synchronize(recipe(ROWS[:1]), **megatron_owners(**sizes)).findings == ()
    with initialised(pipeline=2):
        with pytest.raises(RunConfigError, match=r"Build chunk N with model\.quant_recipe\.of_chunk\(N\)"):
            get_quant_config_or_none("decoder.layers.0.mlp.linear_fc2", held)
        first, second = (
            get_quant_config_or_none("decoder.layers.0.mlp.linear_fc2", held.of_chunk(chunk)) for chunk in (0, 1)
        )
    assert (first.config_key, second) == ("mxfp8", None)


@contextmanager
def initialised(*, pipeline: int) -> Iterator[None]:
    """Be the first rank of a pipeline, in process groups that send nothing."""
    torch.distributed.init_process_group("fake", rank=0, world_size=pipeline, store=FakeStore())
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pipeline, create_gloo_process_groups=False)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def test_an_owners_own_recipe_conflicts_as_any_field_does(megatron_owners) -> None:
    own = RecipeConfig.from_config_dict({"configs": {"a": {}}, "matchers": {}})
    owners = megatron_owners(num_layers=4, quant_recipe=own)
    synchronize("bf16_mixed", **owners)
    assert owners["model"].quant_recipe is own
    with pytest.raises(SyncConflictError, match=r"model\.quant_recipe"):
        synchronize(recipe(), **owners, on_conflict="error")
    synchronize(recipe([]), **owners)
    assert owners["model"].quant_recipe is None
    synchronize("bf16_mixed", **owners)
    assert owners["model"].quant_recipe is own


def test_a_model_without_layers_yet_takes_rows_without_numbers_alone(megatron_owners) -> None:
    class Owner:
        """A model provider before its sizes are set."""

        bf16 = False
        quant_recipe = None

    synchronize(recipe(ROWS[:1]), model=Owner())
    with pytest.raises(RunConfigError) as caught:
        synchronize(recipe(), model=Owner())
    assert str(caught.value) == (
        "mixed_precision.modules: a row names layers by number, and the model's number of layers is not known, got 0. "
        "State model.num_layers before the recipe is written."
    )


@pytest.mark.parametrize("select", ["*.liner_qkv", {"module": "fc3"}, "decoder.layers.0.mpl.*", "mtp.layers.0.eh_prj"])
def test_a_row_that_takes_no_linear_layer_is_found_and_refused_where_the_run_begins_next(
    select: Any, megatron_owners: Any
) -> None:
    rows = [{"select": select, "precision": "bf16"}]
    assert [one.id for one in synchronize(recipe(rows), **megatron_owners(num_layers=4)).findings] == ["PB281"]
    owners = megatron_owners(num_layers=4)
    with pytest.raises(SyncCheckError, match="row 0 takes no linear layer of this model"):
        synchronize(recipe(rows), **owners, strict=True)
    assert owners["model"].quant_recipe is None


@pytest.mark.parametrize("select", ["vision_model.*.fc", "*mlp*", "*.local_experts.3.linear_fc1", "mtp.layers.2.*"])
def test_a_row_that_may_take_a_module_is_not_judged_by_its_name(select: str, megatron_owners: Any) -> None:
    report = synchronize(recipe([{"select": select, "precision": "bf16"}]), **megatron_owners(num_layers=4))
    assert "PB281" not in [one.id for one in report.findings]


def test_a_layer_that_the_model_does_not_have_is_refused(megatron_owners: Any) -> None:
    owners = megatron_owners(num_layers=4)
    rows = [{"select": {"layers": [0, 99, -5], "module": "linear_qkv"}, "precision": "bf16"}]
    with pytest.raises(SyncCheckError) as caught:
        synchronize(recipe(rows), **owners)
    assert str(caught.value).endswith(
        "row 0 takes nothing in layers 99, -5: the model's layers are 0 to 3, got 'layers 0, 99, -5: linear_qkv'. "
        "Correct these numbers."
    )
    assert owners["model"].quant_recipe is None


def test_the_label_of_many_rows_lists_the_first_ones() -> None:
    rows = [{"select": {"layers": [number], "module": "linear_qkv"}, "precision": "bf16"} for number in range(300)]
    assert format_label(recipe(rows)).endswith("layers 3: linear_qkv bf16, and 296 more]")
