"""Callables of other packages that are replaced: which replacement fits, and what becomes of one that does not."""

import logging
import pkgutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import fp8_utils
from megatron.core.transformer.moe.router_replay import RouterReplay

from bridge.runtime.megatron import cuda_shim
from bridge.runtime.megatron.emulation.stored_weight import quantize_shards
from bridge.runtime.megatron.one_batch import _RouterReplay
from bridge.runtime.megatron.patching import (
    apply_patches,
    find_incompatibility,
    keep_compatible,
    log_skipped_patch,
    resolve_patches,
)
from bridge.runtime.megatron.without_te import CHANGES_FOR_LAYERS
from bridge.runtime.pytorch.record import te_gemms


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch):
    """A module of some library, under a name that can be resolved."""
    made = ModuleType("library_of_others")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    log_skipped_patch.cache_clear()
    return made


def named(first: Any, *, is_deep: bool = False) -> None: ...
def by_place(first: Any, second: Any = None, third: Any = None) -> None: ...


@pytest.mark.parametrize(
    ("original", "replacement", "reason"),
    [
        (named, lambda *args, **kwargs: None, None),
        (named, lambda first, *, is_deep=False: None, None),
        (named, lambda first, **others: None, None),
        (by_place, lambda *args, third=None, **others: None, None),
        (partial(by_place, 1), lambda *args, **kwargs: None, None),
        (torch.zeros, lambda size: None, None),  # of a compiled extension, which names no parameter
        (dict, lambda one: None, None),
        (None, lambda one: None, None),
        (True, False, None),
        (named, lambda first: None, "its replacement has got an unexpected keyword argument 'is_deep'"),
        (named, lambda other, **others: None, "it has no parameter 'other'"),
        (by_place, lambda first, second=None: None, "its replacement has too many positional arguments"),
        (by_place, lambda *args, needed, **others: None, "it has no parameter 'needed'"),
    ],
)
def test_a_replacement_fits_where_it_takes_every_argument_and_names_none_of_its_own(
    original: object, replacement: object, reason: str | None
):
    assert find_incompatibility(original, replacement) == reason


def test_a_callable_with_another_signature_stays_and_the_log_says_so_once(
    library: ModuleType, caplog: pytest.LogCaptureFixture
):
    library.__dict__["send"] = original = lambda everything: everything
    rows = {"library_of_others.send": lambda _original: lambda *, tensor, **others: None}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with apply_patches(resolve_patches(rows)):
                assert library.send is original
    assert [record.getMessage() for record in caplog.records] == [
        "library_of_others.send is left as it is: it has no parameter 'tensor'. Its replacement was written for "
        "another release."
    ]


def test_a_callable_that_is_gone_is_left_out(library: ModuleType, caplog: pytest.LogCaptureFixture):
    rows = dict.fromkeys(("library_of_others.gone", "library_of_others.inner.gone"), lambda _original: print)
    with caplog.at_level(logging.WARNING), apply_patches(resolve_patches(rows)):
        assert not hasattr(library, "gone")
    assert len(caplog.records) == 2


def test_a_change_that_does_not_fit_is_left_out(library: ModuleType):
    library.__dict__.update(send=by_place, flag=True)
    new: list[tuple[Any, str, Any]] = [(library, "send", lambda first: None), (library, "flag", False)]
    assert [name for _, name, _ in keep_compatible(new)] == ["flag"]


def test_an_attribute_that_a_block_creates_is_gone_after_it(library: ModuleType):
    with apply_patches([(library, "made", 1)]):
        assert library.made == 1
    assert not hasattr(library, "made")


def test_every_replacement_fits_the_installed_release():
    rows = [(path, pkgutil.resolve_name(path), replace) for path, replace in cuda_shim.CUDA_PATCHES.items()]
    assert [path for path, original, replace in rows if find_incompatibility(original, replace(original))] == []
    of_router = RouterReplay.get_replay_topk
    assert find_incompatibility(of_router, _RouterReplay.get_replay_topk) is None
    assert find_incompatibility(fp8_utils.quantize_param_shard, quantize_shards) is None
    assert [
        name for owner, name, value in CHANGES_FOR_LAYERS if find_incompatibility(getattr(owner, name, None), value)
    ] == []


def started_with(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Callable[..., list[Any]]:
    """Return a function that starts a group through the shim, with the given further options of this torch."""
    made = type("Options", (), dict.fromkeys(("_devices", "_threads", "_timeout", *options)) | options)
    gloo = SimpleNamespace(_Options=made, create_default_device=lambda: "device")
    monkeypatch.setattr(torch.distributed, "ProcessGroupGloo", gloo)
    log_skipped_patch.cache_clear()
    calls: list[Any] = []
    start = cuda_shim.CUDA_PATCHES["torch.distributed.ProcessGroupGloo.__init__"](
        lambda *args, **named: calls.append((args, named))
    )

    def started(*args: Any, **named: Any) -> list[Any]:
        start(*args, **named)
        return calls

    return started


def test_groups_of_one_loop_get_an_option_that_torch_added(monkeypatch: pytest.MonkeyPatch):
    started = started_with(monkeypatch, enable_reconfigure=False)
    ((args, named),) = started("group", "store", 0, 1, timeout=timedelta(minutes=5), enable_reconfigure=True)
    assert args[:4] == ("group", "store", 0, 1)
    assert named == {}
    assert vars(args[4]) == {
        "_devices": ["device"],
        "_threads": 1,
        "_timeout": timedelta(minutes=5),
        "enable_reconfigure": True,
    }


def test_a_group_starts_as_torch_would_where_its_options_lack_what_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    started = started_with(monkeypatch)
    with caplog.at_level(logging.WARNING):
        ((args, named),) = started("group", "store", 0, 1, timeout=timedelta(minutes=5), colour="red")
    assert args == ("group", "store", 0, 1)
    assert named == {"timeout": timedelta(minutes=5), "colour": "red"}
    assert "ProcessGroupGloo.__init__ is left as it is: its options have no colour." in caplog.text


@pytest.mark.parametrize("options", [{}, {"options": "made by the caller"}])
def test_a_group_with_options_of_its_own_or_none_starts_as_torch_would(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, str]
):
    ((args, named),) = started_with(monkeypatch)("group", "store", 0, 1, **options)
    assert args == ("group", "store", 0, 1)
    assert named == options


def test_a_call_of_another_release_is_not_read_as_a_gemm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    extension, apex = ModuleType(te_gemms.TE_EXTENSION_MODULE), ModuleType(te_gemms.APEX_EXTENSION_MODULE)
    extension.__dict__["generic_gemm"] = generic_gemm
    apex.__dict__["wgrad_gemm_accum_fp32"] = generic_gemm
    monkeypatch.setitem(sys.modules, te_gemms.TE_EXTENSION_MODULE, extension)
    monkeypatch.setitem(sys.modules, te_gemms.APEX_EXTENSION_MODULE, apex)
    te_gemms._log_unrecorded.cache_clear()
    seen: list[Any] = []
    with caplog.at_level(logging.WARNING), te_gemms.report_gemms(seen.append, nullcontext):
        assert extension.generic_gemm(1, True, 2, False) == ("product",)
        assert extension.generic_gemm(1, True, 2, False) == ("product",)
        assert apex.wgrad_gemm_accum_fp32(1, 2) == ("product",)
    assert seen == []
    assert [record.getMessage() for record in caplog.records] == [
        "generic_gemm of Transformer Engine is called with 4 arguments, not 16: its GEMMs are not recorded. "
        "The record was written for Transformer Engine 2.9 to 2.20.",
        "wgrad_gemm_accum_fp32 of Apex is called with 2 arguments, not 3: its GEMMs are not recorded. "
        "The record was written for the calls of Megatron Core 0.16.",
    ]


def generic_gemm(*_args: object) -> tuple[str]:
    return ("product",)
