"""The C kernel: chosen by one variable, compiled in the background, cached, and never in the way."""

from __future__ import annotations

import ctypes
import logging
import os
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from bridge.errors import BackendUnavailableError, RunConfigError
from bridge.runtime.numerics import kernel, kernel_build, native
from bridge.runtime.numerics.kernel_build import KernelBuild
from tests import warm

REQUIRES = pytest.mark.skipif(kernel_build._find_compiler() is None, reason="needs a C compiler")


QUICK = tuple("-O0" if flag.startswith("-O") else flag for flag in kernel_build.COMPILER_FLAGS)
"""For tests of what becomes of a library: compiled in a tenth of the time, and never called."""


@pytest.fixture
def quick_flags(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile with `QUICK` in this process."""
    monkeypatch.setattr(kernel_build, "COMPILER_FLAGS", QUICK)
    kernel_build._hash_build_inputs.cache_clear()
    yield
    kernel_build._hash_build_inputs.cache_clear()


def slow_compiler(folder: Path, first: str) -> Path:
    """Return a compiler that runs a shell command before it compiles, with the optimisation of `QUICK`."""
    path = folder / "cc"
    path.write_text(f'#!/bin/sh\n[ "$1" = -dM ] || {first}\nexec {kernel_build._find_compiler()} "$@" -O0\n')
    path.chmod(0o755)
    return path


@REQUIRES
@pytest.mark.usefixtures("quick_flags")
def test_compilation_is_announced_runs_behind_and_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caplog.set_level(logging.INFO)
    first = KernelBuild()
    assert first.get_library(wait=False) is None
    assert first.get_library(wait=True) is not None
    folder = tmp_path / "precision-bridge" / "kernels"
    assert [record.getMessage().split(";")[0][:36] for record in caplog.records] == [
        "Compiling the quantisation kernel wi",
        "The quantisation kernel is ready in ",
    ]
    (library,) = folder.iterdir()
    assert library.suffix == ".so"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    caplog.clear()
    assert KernelBuild().get_library(wait=False) is not None
    assert not caplog.records


def test_without_a_compiler_plain_torch_runs_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_build, "_find_compiler", lambda: None)
    found = KernelBuild()
    assert found.get_library(wait=True) is None
    assert found.get_library(wait=False) is None
    assert [record.getMessage() for record in caplog.records] == [
        "There is no C compiler (cc, gcc or clang) on the PATH. "
        "Quantisation runs in plain torch, several times slower, with the same values."
    ]


@REQUIRES
def test_a_compiler_that_fails_is_reported_with_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "broken.c"
    source.write_text("int broken(void) { return }\n")
    monkeypatch.setattr(kernel_build, "KERNEL_SOURCE", source)
    kernel_build._hash_build_inputs.cache_clear()
    found = KernelBuild()
    assert found.get_library(wait=True) is None
    kernel_build._hash_build_inputs.cache_clear()
    assert "failed:" in (found.problem or "")
    assert not list((tmp_path / "precision-bridge" / "kernels").iterdir())


@pytest.mark.parametrize("limit", ["MACROS_TIMEOUT_SECONDS", "COMPILE_TIMEOUT_SECONDS"])
def test_a_compiler_that_hangs_is_not_waited_for(limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    macros = 'if [ "$1" = -dM ]; then echo "#define A 1"; exit; fi' if limit == "COMPILE_TIMEOUT_SECONDS" else ""
    (tmp_path / "cc").write_text(f"#!/bin/sh\n{macros}\nexec sleep 1000\n")
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_build, "_find_compiler", lambda: str(tmp_path / "cc"))
    monkeypatch.setattr(kernel_build, limit, 0.2)
    found = KernelBuild()
    assert found.get_library(wait=True) is None
    assert "0.2 s" in (found.problem or "")


def test_a_compiler_that_does_not_name_its_processor_makes_no_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cc").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_build, "_find_compiler", lambda: str(tmp_path / "cc"))
    found = KernelBuild()
    assert found.get_library(wait=True) is None
    assert "does not say which processor it compiles for" in (found.problem or "")


@REQUIRES
@pytest.mark.usefixtures("quick_flags")
def test_without_a_cache_the_kernel_is_compiled_into_a_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked, temporary = tmp_path / "file", tmp_path / "temporary"
    blocked.write_text("")
    temporary.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    assert kernel_build.get_cache_folder() is None
    assert KernelBuild().get_library(wait=True) is not None
    assert not list(temporary.iterdir())


@REQUIRES
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o755])
def test_a_cache_that_is_open_to_others_is_not_used(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "precision-bridge" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    assert kernel_build.get_cache_folder() is None
    assert "must be a folder of this user with mode 0700, got owner" in caplog.text


@REQUIRES
def test_a_cache_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernel_build.get_cache_folder() is not None
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert kernel_build.get_cache_folder() is None


def test_a_cache_that_is_a_link_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "precision-bridge").mkdir()
    (tmp_path / "precision-bridge" / "kernels").symlink_to(tmp_path / "elsewhere")
    assert kernel_build.get_cache_folder() is None


def truncated(library: Path) -> None:
    library.write_bytes(library.read_bytes()[:4096])


def foreign(library: Path) -> None:
    source = library.with_name("foreign.c")
    source.write_text("#include <stdlib.h>\n__attribute__((constructor)) void run(void) { abort(); }\n")
    subprocess.run(
        [str(kernel_build._find_compiler()), "-shared", "-fPIC", str(source), "-o", str(library)], check=True
    )
    source.unlink()


def flipped(library: Path) -> None:
    data = bytearray(library.read_bytes())
    data[len(data) // 2] ^= 1
    library.write_bytes(data)


def linked(library: Path) -> None:
    other = library.with_suffix(".other")
    library.rename(other)
    library.symlink_to(other)


@REQUIRES
@pytest.mark.usefixtures("quick_flags")
@pytest.mark.parametrize("damage", [truncated, foreign, flipped, linked])
def test_a_library_that_is_not_the_compiled_one_is_compiled_again(
    damage: Callable[[Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled = "from bridge.runtime.numerics import kernel_build as build"
    compiled += f"; build.COMPILER_FLAGS = {QUICK}; assert build.KernelBuild().get_library(wait=True)"
    assert warm.run(["python", "-c", compiled]).returncode == 0
    (library,) = (tmp_path / "precision-bridge" / "kernels").glob("*.so")
    sound = library.read_bytes()
    damage(library)
    found = KernelBuild()
    assert found.get_library(wait=False) is None
    assert found.get_library(wait=True) is not None
    assert "is not the file that was compiled. It is removed and compiled again." in caplog.text
    assert [path.read_bytes() for path in library.parent.glob("*.so")] == [sound]


@pytest.mark.usefixtures("selection_restored")
def test_an_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDGE_NUMERICS", "natve")
    native._selection = None
    with pytest.raises(RunConfigError, match="must be auto, native or torch, got 'natve'") as caught:
        native.get_kernel_choice()
    assert caught.value.matches == ("native",)


@pytest.mark.usefixtures("selection_restored")
def test_a_call_with_an_unknown_choice_is_refused_and_changes_nothing() -> None:
    native.use("torch")
    with pytest.raises(RunConfigError) as caught:
        native.use("natve")
    assert str(caught.value) == "use: must be auto, native or torch, got 'natve' (call of use). Use one of these."
    assert caught.value.matches == ("native",)
    assert native.get_kernel_choice() == "torch"


@pytest.mark.usefixtures("selection_restored")
def test_the_variable_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("torch", "auto"):
        native._selection = None
        monkeypatch.setenv("BRIDGE_NUMERICS", value)
        assert native.get_kernel_choice() == value
        assert value == "auto" or native.get_kernel(torch.zeros(1, 1)) is None
    monkeypatch.delenv("BRIDGE_NUMERICS")
    native._selection = None
    assert native.get_kernel_choice() == "auto"


@pytest.mark.usefixtures("selection_restored")
def test_a_missing_kernel_names_the_call_that_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_build, "_find_compiler", lambda: None)
    monkeypatch.setattr(native, "_build", KernelBuild())
    monkeypatch.setattr(native, "_kernel", None)
    assert native.use("native") == "There is no C compiler (cc, gcc or clang) on the PATH."
    with pytest.raises(BackendUnavailableError) as caught:
        native.get_kernel(torch.zeros(1, 1))
    assert str(caught.value) == (
        "use: the C kernel must be compilable, got 'native' (call of use). "
        "There is no C compiler (cc, gcc or clang) on the PATH. "
        'Install a C compiler, or call use("auto").'
    )


@REQUIRES
def test_a_structure_of_another_size_than_in_c_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    library = KernelBuild().get_library(wait=True)
    assert library is not None
    kernel.Kernel(library)

    class Longer(kernel._StoredArguments):
        """The structure with a field that kernel.c does not have."""

        _fields_ = (("further", ctypes.c_int64),)

    monkeypatch.setattr(kernel, "_StoredArguments", Longer)
    with pytest.raises(AssertionError, match="the structure stored of kernel.c and Longer differ in size"):
        kernel.Kernel(library)


@REQUIRES
def test_a_run_shorter_than_the_compiler_does_not_wait_for_it(tmp_path: Path) -> None:
    compiler = slow_compiler(tmp_path, "while [ ! -e go ]; do sleep 0.05; done")
    code = f"""
        from pathlib import Path
        import torch
        from bridge.runtime.numerics import GemmPrecision, kernel_build, native, quantise
        kernel_build._find_compiler = lambda: {str(compiler)!r}
        quantise(torch.randn(64, 64), GemmPrecision(scheme="tensorwise").spec("input"))
        assert native._kernel is None, "it waited"
        Path("go").touch()
        native.load_kernel(wait=True)
        assert native._kernel is not None
        print("ready")
    """
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = warm.run(["python", "-c", textwrap.dedent(code)], cwd=tmp_path, env=environment)
    assert (done.returncode, done.stdout) == (0, "ready\n"), done.stderr


@REQUIRES
def test_a_process_may_end_while_the_compiler_runs(tmp_path: Path) -> None:
    compiler = slow_compiler(tmp_path, "exec sleep 20")
    code = f"""
        import torch
        from bridge.runtime.numerics import GemmPrecision, kernel_build, quantise
        kernel_build._find_compiler = lambda: {str(compiler)!r}
        quantise(torch.randn(64, 64), GemmPrecision(scheme="tensorwise").spec("input"))
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)}
    words = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


@REQUIRES
def test_native_without_a_kernel_is_an_error_that_says_what_to_do() -> None:
    code = """
        import torch
        from bridge.errors import BackendUnavailableError
        from bridge.runtime.numerics import GemmPrecision, kernel_build, quantise
        kernel_build._find_compiler = lambda: None
        try:
            quantise(torch.zeros(2, 2), GemmPrecision(scheme="tensorwise").spec("input"))
        except BackendUnavailableError as error:
            print(error)
    """
    environment = {**os.environ, "BRIDGE_NUMERICS": "native"}
    done = warm.run(["python", "-c", textwrap.dedent(code)], env=environment)
    assert done.stdout == (
        "BRIDGE_NUMERICS: the C kernel must be compilable, got 'native' (environment). "
        "There is no C compiler (cc, gcc or clang) on the PATH. "
        "Install a C compiler, or use BRIDGE_NUMERICS=auto.\n"
    )


@REQUIRES
def test_one_openmp_runtime_serves_torch_and_the_kernel() -> None:
    native.load_kernel(wait=True)
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    runtimes = {line.split()[-1] for line in maps.read_text().splitlines() if "gomp" in line or "libomp" in line}
    assert len(runtimes) <= 1
