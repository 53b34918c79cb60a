"""Faults of checkpoints and of a run's folders: a damaged one is named and skipped, nothing foreign is touched."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing.strategies import common

from bridge.errors import CheckpointError, RunConfigError
from bridge.runtime.checkpoint.folder import LATEST_FILE
from bridge.runtime.checkpoint.lock import LOCK_FILE, lock_folder
from bridge.runtime.checkpoint.manifest import Manifest, compute_checksums, find_damage, list_file_sizes
from bridge.runtime.checkpoint.pickles import find_pickle_fault, read_listing
from bridge.runtime.megatron.checkpoint.loading import COMMON_STATE_FILE
from bridge.training.loop import pretrain
from tests import warm
from tests.training.fault_table import KNOWN, WORDS
from tests.training.loop_tiny import CACHE, ROOT, losses, tiny

SCHEDULE = {"train_iters": 6, "lr_decay_iters": 6, "eval_iters": 0}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of checkpoints of steps 2, 4 and 6, and of the run that wrote them."""
    folder = tmp_path_factory.mktemp("saved")
    pretrain(tiny(train=SCHEDULE, save=str(folder / "checkpoints"), save_interval=2), run_dir=folder / "run")
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoints that a test may damage."""
    return Path(shutil.copytree(saved / "checkpoints", tmp_path / "checkpoints"))


def tensors(checkpoint: Path) -> Path:
    return max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)


def flipped(checkpoint: Path) -> str:
    data = bytearray(tensors(checkpoint).read_bytes())
    data[len(data) // 2] ^= 1
    tensors(checkpoint).write_bytes(data)
    return f"{tensors(checkpoint).name} has other content than when it was written"


def truncated(checkpoint: Path) -> str:
    path = tensors(checkpoint)
    size = path.stat().st_size
    os.truncate(path, size // 2)
    return f"{path.name} has {size // 2} bytes, and had {size} when it was written"


def emptied(checkpoint: Path) -> str:
    size = (checkpoint / ".metadata").stat().st_size
    (checkpoint / ".metadata").write_bytes(b"")
    return f".metadata has 0 bytes, and had {size} when it was written"


def deleted(checkpoint: Path) -> str:
    (checkpoint / "metadata.json").unlink()
    return "metadata.json is missing"


def torn_manifest(checkpoint: Path) -> str:
    os.truncate(checkpoint / "manifest.json", 100)
    return "manifest.json is damaged"


def unfinished(checkpoint: Path) -> str:
    (checkpoint / "manifest.json").unlink()
    return "manifest.json, which is written last, is missing"


def foreign_code(checkpoint: Path) -> str:
    size = (checkpoint / ".metadata").stat().st_size
    code = f"cposix\nsystem\n(S'touch {checkpoint.parent}/ran'\ntR.".encode()
    (checkpoint / ".metadata").write_bytes(code.ljust(size, b"\0"))
    return ".metadata has other content than when it was written"


def forge(checkpoint: Path) -> None:
    """Write a manifest over the files as they are now, as whoever can write to the folder can."""
    sizes = list_file_sizes(checkpoint)
    Manifest(sizes=sizes, checksums=compute_checksums(checkpoint, sizes), run=Manifest.read(checkpoint).run).write(
        checkpoint
    )


class Evil:
    """A pickle of this runs a command."""

    def __init__(self, checkpoint: Path) -> None:
        self.command = f"touch {checkpoint.parent}/ran"

    def __reduce__(self):
        return os.system, (self.command,)


def forged_metadata(checkpoint: Path) -> str:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Evil(checkpoint)))
    forge(checkpoint)
    return ".metadata names posix.system, which no checkpoint needs; nothing of it was run"


def forged_object(checkpoint: Path) -> str:
    stored = next(stored for stored in read_listing(checkpoint).objects if stored.key.startswith("rng_state"))
    data = bytearray((checkpoint / stored.file).read_bytes())
    saved = io.BytesIO()
    torch.save(Evil(checkpoint), saved, _use_new_zipfile_serialization=False)
    data[stored.offset : stored.offset + stored.length] = saved.getvalue().ljust(stored.length, b"\0")
    (checkpoint / stored.file).write_bytes(data)
    forge(checkpoint)
    return f"{stored.key} is damaged, or is no plain data"


def forged_module_state(checkpoint: Path) -> str:
    stored = next(stored for stored in read_listing(checkpoint).objects if "_extra_state" in stored.key)
    data = bytearray((checkpoint / stored.file).read_bytes())
    saved, state = io.BytesIO(), bytearray(pickle.dumps({"scale_fwd": torch.ones(1), "recipe": Evil(checkpoint)}))
    torch.save([torch.frombuffer(state, dtype=torch.uint8)], saved, _use_new_zipfile_serialization=False)
    data[stored.offset : stored.offset + stored.length] = saved.getvalue().ljust(stored.length, b"\0")
    (checkpoint / stored.file).write_bytes(data)
    forge(checkpoint)
    return f"{stored.key} names posix.system, which no checkpoint needs; nothing of it was run"


def numbered_beyond_its_size(checkpoint: Path) -> str:
    data = (checkpoint / ".metadata").read_bytes()
    frame = int.from_bytes(data[3:11], "little") + 5
    number = pickle.LONG_BINPUT + (10**6).to_bytes(4, "little")
    (checkpoint / ".metadata").write_bytes(data[:3] + frame.to_bytes(8, "little") + data[11:-1] + number + pickle.STOP)
    forge(checkpoint)
    return ".metadata is damaged"


def empty_manifest(checkpoint: Path) -> str:
    (checkpoint / "manifest.json").write_text('{"files": {}}')
    return "manifest.json is damaged"


def smuggled(checkpoint: Path) -> str:
    (checkpoint / "__9_9.distcp").write_bytes(b"")
    return "__9_9.distcp is not in manifest.json"


DAMAGES = (flipped, truncated, emptied, deleted, torn_manifest, unfinished, foreign_code)
FORGERIES = (forged_metadata, forged_object, forged_module_state, numbered_beyond_its_size, empty_manifest, smuggled)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_skipped(
    damage: Callable[[Path], str],
    saved: Path,
    copy: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrong = damage(copy / "iter_0000006")
    summary = pretrain(tiny(train=SCHEDULE, load=str(copy), save=str(copy)), run_dir=tmp_path / "run")
    assert f"checkpoint.load: {copy / 'iter_0000006'} is skipped: {wrong}." in caplog.messages
    assert (summary.steps, summary.iteration) == (2, 6)
    assert losses(tmp_path / "run") == losses(saved / "run")[4:]
    assert not (copy / "ran").exists()
    word = "unfinished" if damage is unfinished else "skipped"
    assert sorted(path.name for path in copy.glob("iter_0000006*")) == ["iter_0000006", f"iter_0000006.{word}"]


def without_checksums(checkpoint: Path) -> str:
    Manifest(sizes=list_file_sizes(checkpoint), checksums={}).write(checkpoint)
    return "manifest.json holds no checksums; checkpoint.checksum=false compares sizes alone"


def swapped(checkpoint: Path) -> str:
    shutil.rmtree(checkpoint)
    shutil.copytree(checkpoint.with_name("iter_0000002"), checkpoint)
    return "it holds step 2"


def of_a_later_release(checkpoint: Path) -> str:
    (checkpoint / COMMON_STATE_FILE).unlink()
    sizes = list_file_sizes(checkpoint)
    Manifest(sizes=sizes, checksums=compute_checksums(checkpoint, sizes)).write(checkpoint)
    return "a later Megatron Core wrote it, without the common.pt that this one reads"


READS_COMMON = hasattr(common, "TorchCommonLoadStrategy")
"""Whether this Megatron Core cannot do without the file, as those before 0.19."""


def later(checkpoint: Path) -> str:
    (checkpoint.parent / LATEST_FILE).write_text("4\n")
    return f"it is later than the one that {LATEST_FILE} names"


def settings_as_a_list(checkpoint: Path) -> str:
    sizes = list_file_sizes(checkpoint)
    Manifest(sizes=sizes, checksums=compute_checksums(checkpoint, sizes), run={"settings": ["a"]}).write(checkpoint)
    return "manifest.json is damaged"


def manifest_as_a_pipe(checkpoint: Path) -> str:
    (checkpoint / "manifest.json").unlink()
    os.mkfifo(checkpoint / "manifest.json")
    return "manifest.json is no regular file"


@pytest.mark.parametrize(
    "make",
    [
        *(forged_object, without_checksums, swapped, later, settings_as_a_list, manifest_as_a_pipe),
        *([of_a_later_release] if READS_COMMON else []),
    ],
)
def test_a_checkpoint_that_does_not_count_stops_no_run_from_saving_into_its_folder(
    make: Callable[[Path], str], copy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = make(copy / "iter_0000006")
    summary = pretrain(tiny(train=SCHEDULE, load=str(copy), save=str(copy)), run_dir=tmp_path / "run")
    assert f"checkpoint.load: {copy / 'iter_0000006'} is skipped: {wrong}." in caplog.messages
    assert (summary.steps, summary.iteration) == (2, 6)
    with pytest.raises(CheckpointError, match="holds a checkpoint of step 6, and this run begins at step 0"):
        pretrain(tiny(train=SCHEDULE, save=str(copy)), run_dir=tmp_path / "run")


def test_a_folder_whose_checkpoints_do_not_count_is_saved_to_by_a_fresh_run(copy: Path, tmp_path: Path) -> None:
    for number in (2, 4, 6):
        deleted(copy / f"iter_000000{number}")
    assert pretrain(tiny(train=SCHEDULE, save=str(copy)), run_dir=tmp_path / "run").steps == 6
    assert len(list(copy.glob("*.skipped"))) == 3


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_pointer_that_is_no_file_is_refused_before_anything_is_built(make, tmp_path: Path) -> None:
    make(tmp_path / LATEST_FILE)
    for key in ("save", "load"):
        with pytest.raises(RunConfigError) as raised:
            pretrain(tiny(**{key: str(tmp_path)}), run_dir=tmp_path / "run")
        assert str(raised.value) == (
            f"checkpoint.{key}: {LATEST_FILE} must be a file, got '{tmp_path / LATEST_FILE}'. Move it away."
        )


def test_a_forged_manifest_lets_no_code_run(copy: Path, saved: Path) -> None:
    for forgery in FORGERIES:
        checkpoint = copy / "iter_0000006"
        wrong = forgery(checkpoint)
        assert (find_damage(checkpoint) or find_pickle_fault(checkpoint)) == wrong, forgery.__name__
        assert not (copy / "ran").exists(), forgery.__name__
        shutil.rmtree(checkpoint)
        shutil.copytree(saved / "checkpoints" / "iter_0000006", checkpoint)
    assert (find_damage(checkpoint) or find_pickle_fault(checkpoint)) is None


def test_a_checkpoint_without_a_manifest_needs_trust_and_without_checksums_their_switch(
    copy: Path, saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newest = copy / "iter_0000006"
    sizes = list_file_sizes(newest)
    Manifest(sizes=sizes, checksums={}).write(newest)
    switched_off = pretrain(tiny(train=SCHEDULE, load=str(copy), checksum=False), run_dir=tmp_path / "sizes")
    assert switched_off.steps == 0
    assert pretrain(tiny(train=SCHEDULE, load=str(copy)), run_dir=tmp_path / "checked").steps == 2
    assert (
        f"checkpoint.load: {newest} is skipped: manifest.json holds no checksums; checkpoint.checksum=false compares "
        "sizes alone."
    ) in caplog.messages
    unfinished(newest)
    assert pretrain(tiny(train=SCHEDULE, load=str(copy), trust=True), run_dir=tmp_path / "trusted").steps == 0
    forged_metadata_only = newest / ".metadata"
    forged_metadata_only.write_bytes(pickle.dumps(Evil(newest)))
    assert pretrain(tiny(train=SCHEDULE, load=str(copy), trust=True), run_dir=tmp_path / "evil").steps == 2
    assert not (copy / "ran").exists()


def test_without_a_sound_checkpoint_every_reason_is_named(copy: Path, tmp_path: Path) -> None:
    reasons = [f"step {number}: {deleted(copy / f'iter_000000{number}')}" for number in (6, 4, 2)]
    with pytest.raises(CheckpointError) as raised:
        pretrain(tiny(load=str(copy)), run_dir=tmp_path / "run")
    assert str(raised.value) == (
        f"checkpoint.load: must hold a whole checkpoint, got '{copy}' ({'; '.join(reasons)}). Give another folder, or "
        "leave it at None to start fresh."
    )


@pytest.mark.parametrize("pointer", [None, "", "6\0\0", "garbage"])
def test_a_lost_or_torn_pointer_hides_no_checkpoint(pointer: str | None, copy: Path, tmp_path: Path) -> None:
    path = copy / "latest_checkpointed_iteration.txt"
    path.unlink() if pointer is None else path.write_text(pointer)
    assert pretrain(tiny(train=SCHEDULE, load=str(copy)), run_dir=tmp_path / "run").steps == 0
    with pytest.raises(CheckpointError, match="the folder holds a checkpoint of step 6, and this run begins at step 0"):
        pretrain(tiny(train=SCHEDULE, save=str(copy)), run_dir=tmp_path / "run")


def test_a_folder_that_another_run_writes_into_is_refused(tmp_path: Path) -> None:
    code = f"""
        import sys
        from pathlib import Path
        from bridge.runtime.checkpoint.lock import folder_lock
        with folder_lock(Path({str(tmp_path)!r})):
            print("held", flush=True)
            sys.stdin.read()
    """
    words = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError) as raised:
            pretrain(tiny(save=str(tmp_path)), run_dir=tmp_path / "run")
        assert str(raised.value) == (
            f"checkpoint.save: one run may write into a folder, got '{tmp_path}', which process {other.pid} on "
            f"{socket.gethostname()} writes into. Choose another folder, or wait for the end of that run."
        )
        assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK_FILE]
        other.send_signal(signal.SIGKILL)
        other.wait()
        with lock_folder(tmp_path) as taken_over:
            assert taken_over == (
                f"{tmp_path}: the lock of process {other.pid} on {socket.gethostname()}, which no longer runs, was "
                "taken over."
            )
    assert not list(tmp_path.iterdir())


def test_two_runs_in_one_run_folder_are_refused(tmp_path: Path) -> None:
    with lock_folder(tmp_path / "run"):
        with pytest.raises(CheckpointError) as raised:
            pretrain(tiny(), run_dir=tmp_path / "run")
        assert str(raised.value) == (
            f"logging.run_dir: one run may write into a folder, got '{tmp_path / 'run'}', which process {os.getpid()} "
            f"on {socket.gethostname()} writes into. Choose another folder, or wait for the end of that run."
        )
        assert [path.name for path in (tmp_path / "run").iterdir()] == [LOCK_FILE]
    pretrain(tiny(train={"train_iters": 1, "eval_iters": 0}, save=str(tmp_path / "run")), run_dir=tmp_path / "run")
    assert not (tmp_path / "run" / LOCK_FILE).exists()


def test_a_folder_that_cannot_be_written_to_is_refused_before_the_model_is_built(tmp_path: Path, monkeypatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr("bridge.training.loop.build_run", lambda *_, **__: pytest.fail("a model was built"))
    with pytest.raises(CheckpointError) as raised:
        pretrain(tiny(save=str(blocked / "checkpoints")), run_dir=tmp_path / "run")
    assert str(raised.value) == (
        f"checkpoint.save: must be a folder that can be written to, got '{blocked / 'checkpoints'}' (Not a directory). "
        "Choose another."
    )


def test_a_full_disk_is_one_sentence_and_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    number = next(number for number, one in enumerate(KNOWN) if one.name == "disk full" and "begin" in one.moment)
    words = ["-m", "tests.training.fault_table", "--run", str(tmp_path), str(number), *WORDS]
    done = warm.run(["python", *words, f"data.cache_dir={CACHE}"], cwd=ROOT)
    assert done.returncode == 1
    assert (done.stdout + done.stderr).splitlines()[-1] == (
        "checkpoint.save: the checkpoint must fit into its folder, got 'saved/iter_0000004' (a write failed). The "
        "newest one stays that of step 2. Make room, or save elsewhere."
    )
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "2\n"


def test_an_interval_without_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunConfigError) as raised:
        pretrain(tiny(save_interval=2), run_dir=tmp_path)
    assert str(raised.value) == (
        "checkpoint.save_interval: has no effect without checkpoint.save, got 2. Give the folder with checkpoint.save, "
        "or leave this out."
    )


@pytest.mark.parametrize("torn", ['{"kind": "train", "st', "", "null", "\0\0\0", '{"kind": "train"}'])
def test_a_torn_last_line_of_the_metrics_is_left_out(torn: str, saved: Path, tmp_path: Path, caplog) -> None:
    shutil.copytree(saved / "run", tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text(whole + torn)
    pretrain(tiny(train=SCHEDULE, load=str(saved / "checkpoints")), run_dir=tmp_path / "run")
    assert metrics.read_text() == whole
    warned = f"{metrics}:7: is no record and is left out. A crash can leave a line torn."
    assert (warned in caplog.messages) is bool(torn)


def test_a_save_starts_no_process_that_could_outlive_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[object] = []
    start = BaseProcess.start
    monkeypatch.setattr(BaseProcess, "start", lambda self: (started.append(self), start(self)))
    pretrain(tiny(train={**SCHEDULE, "train_iters": 1}, save=str(tmp_path / "saved")), run_dir=tmp_path)
    assert (tmp_path / "saved" / "iter_0000001" / "manifest.json").is_file()
    assert not started
