"""What may be an owner of a precision, and what may not."""

import copy
import dataclasses
import pickle
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from bridge import MixedPrecisionConfig, get_mixed_precision_config, synchronize
from bridge.errors import PrecisionTypeError, SyncCheckError

pytestmark = pytest.mark.filterwarnings("ignore::bridge.errors.BridgeWarning")


def test_a_sync_without_an_owner_is_an_error() -> None:
    for start in (lambda: synchronize("bf16_mixed"), lambda: get_mixed_precision_config("bf16_mixed").setup(None)):
        with pytest.raises(PrecisionTypeError, match="a sync writes into at least one of model, optimizer, ddp"):
            start()


def test_a_model_provider_with_other_defaults_counts_as_somebody_who_set_them() -> None:
    from megatron.core.transformer import TransformerConfig

    @dataclasses.dataclass
    class Nemotron(TransformerConfig):
        first_last_layers_bf16: bool = True

    model = Nemotron(num_layers=4, hidden_size=64, num_attention_heads=4)
    report = synchronize("bf16_with_mxfp8_mixed", model=model)
    assert report.row("model.first_last_layers_bf16").verdict == "keep"
    assert (model.num_layers_at_start_in_bf16, model.num_layers_at_end_in_bf16) == (1, 1)


def test_a_teams_properties_are_rolled_back_too() -> None:
    class Nested:
        def __init__(self) -> None:
            self.inner = {"bf16": False}

        @property
        def bf16(self) -> bool:
            return self.inner["bf16"]

        @bf16.setter
        def bf16(self, value: bool) -> None:
            self.inner["bf16"] = value

        @property
        def params_dtype(self) -> None:
            return None

    nested = Nested()
    with pytest.raises(SyncCheckError) as caught:
        synchronize("bf16_mixed", model=nested)
    assert nested.bf16 is False
    assert "model.params_dtype: cannot be set (AttributeError: " in str(caught.value)


@pytest.mark.parametrize(
    ("owners", "message"),
    [
        ({"model": {"bf16": False}}, "model: must be the config object of this owner, got {'bf16': False}. "),
        (
            {"model": SimpleNamespace},
            "model: must be the config object of this owner, got <class 'types.SimpleNamespace'>",
        ),
    ],
)
def test_what_cannot_be_an_owner_is_refused(owners, message: str) -> None:
    with pytest.raises(PrecisionTypeError) as caught:
        synchronize("bf16_mixed", **owners)
    assert str(caught.value).startswith(message)


def test_swapped_and_shared_owners_are_refused(megatron_owners) -> None:
    owners = megatron_owners()
    with pytest.raises(PrecisionTypeError, match="Give it as optimizer"):
        synchronize("bf16_mixed", model=owners["optimizer"])
    shared = SimpleNamespace(bf16=False)
    with pytest.raises(PrecisionTypeError, match="is the same object as model"):
        synchronize("bf16_mixed", model=shared, optimizer=shared)


def test_objects_of_no_known_class_get_same_named_fields() -> None:
    model = SimpleNamespace(bf16=False, fp16=True, params_dtype=torch.float32, fp8="x", num_layers_at_end_in_bf16=5)
    optimizer = SimpleNamespace(bf16=False, fp8_recipe="tensorwise", loss_scale=2.0)
    synchronize("bf16_mixed", model=model, optimizer=optimizer, ddp=SimpleNamespace(grad_reduce_in_fp32=False))
    assert (model.bf16, model.fp16, model.params_dtype, model.fp8) == (True, False, torch.bfloat16, None)
    assert (optimizer.bf16, optimizer.fp8_recipe) == (True, None)


def test_slots_and_mocks_can_be_owners() -> None:
    class Slotted:
        __slots__ = ("bf16", "grad_reduce_in_fp32")

    slotted = Slotted()
    slotted.bf16 = slotted.grad_reduce_in_fp32 = False
    synchronize("bf16_mixed", model=slotted, ddp=MagicMock())
    assert slotted.bf16 is True


def test_an_owner_without_any_field_of_a_precision_is_refused(megatron_owners) -> None:
    with pytest.raises(PrecisionTypeError, match=r"^model: has no field of a precision, got <object object at .*>\. "):
        synchronize("bf16_mixed", **(megatron_owners() | {"model": object()}))
    with pytest.raises(PrecisionTypeError, match=r"^ddp: has no field of a precision, got namespace\(other=1\)\. "):
        synchronize("bf16_mixed", ddp=SimpleNamespace(other=1))


def test_a_dtype_stated_as_none_stays_none_in_an_owner_of_no_class_of_megatrons(megatron_owners) -> None:
    config = MixedPrecisionConfig(bf16=True, params_dtype=None)
    plain = SimpleNamespace(bf16=False, params_dtype=torch.float32, pipeline_dtype=torch.float32)
    for one in (config, copy.deepcopy(config), dataclasses.replace(config), pickle.loads(pickle.dumps(config))):  # noqa: S301
        owner = copy.copy(plain)
        synchronize(one, model=owner)
        assert (owner.params_dtype, owner.pipeline_dtype) == (None, torch.bfloat16)
    held = SimpleNamespace(bf16=False, fp8_param=True, exp_avg_dtype=torch.bfloat16)
    synchronize(MixedPrecisionConfig(bf16=True, exp_avg_dtype=None), model=held)
    assert held.exp_avg_dtype is torch.bfloat16, "None of a field that no None stands for states nothing"
    config.params_dtype = "bf16"
    del config.params_dtype
    synchronize(config, model=plain)
    assert plain.params_dtype is torch.bfloat16, "no longer stated"
    model = megatron_owners()["model"]
    synchronize(MixedPrecisionConfig(bf16=True, params_dtype=None), model=model)
    assert model.params_dtype is torch.bfloat16, "Megatron's own class needs one"


def test_a_value_that_cannot_be_restored_is_named() -> None:
    class OneWay:
        """Accepts one new value of bf16, and refuses params_dtype."""

        def __init__(self) -> None:
            self.inner = {"bf16": False}

        @property
        def bf16(self) -> bool:
            return self.inner["bf16"]

        @bf16.setter
        def bf16(self, value: bool) -> None:
            if self.inner["bf16"]:
                raise ValueError("bf16 stays on")
            self.inner = {"bf16": value}

        @property
        def params_dtype(self) -> None:
            return None

    with pytest.raises(SyncCheckError) as caught:
        synchronize("bf16_mixed", model=OneWay())
    assert str(caught.value).splitlines()[0] == (
        "The recipe cannot be written, and these configs are not as they were:"
    )
    paths = [finding.path for finding in caught.value.findings]
    assert paths == ["model.params_dtype", "model.bf16"]
    assert caught.value.findings[1].rule == ("was changed and cannot be restored (ValueError: bf16 stays on)")
    assert caught.value.findings[1].remedy == "Set it to False, or make the object again."
