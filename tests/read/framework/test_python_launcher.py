"""Python launchers of slime and miles: the command that `execute_train` starts, by syntax alone."""

from collections.abc import Callable
from pathlib import Path

import pytest

from bridge.cli.main import main
from bridge.errors import UnreadFileError
from bridge.front.loader import load_run
from bridge.preflight.run import Run
from bridge.preflight.run_choice import RunChoice
from bridge.read.framework.launcher.program import LauncherProgram
from bridge.read.framework.python_launcher import maybe_read_launcher
from bridge.read.run_file import load_file_reading
from bridge.read.text.document import Document

SIZES = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --vocab-size 1000"
TRAINING = "--hf-checkpoint m --rollout-batch-size 8 --use-dynamic-batch-size --max-tokens-per-gpu 2048"
COMMAND_LINE = f"""\
from dataclasses import dataclass
from typing import Literal
import typer
import miles.utils.external_utils.command_utils as U


@dataclass
class ScriptArgs(U.ExecuteTrainConfig):
    hardware: Literal["H100", "B200"] = "H100"
    tp: int = 2
    train_fp8: bool = False
    extra_args: str = ""

    def __post_init__(self):
        assert self.tp in (1, 2, 4), "as many as a node has"


def execute(args: ScriptArgs):
    open("ran", "w")
    misc_args = f"--tensor-model-parallel-size {{args.tp}} --bf16 "
    if args.train_fp8:
        match args.hardware:
            case "B200":
                misc_args += "--fp8-format e4m3 --fp8-recipe mxfp8 "
            case "H100":
                misc_args += "--fp8-format e4m3 --fp8-recipe blockwise "
    U.execute_train(
        train_args="{SIZES} {TRAINING} " + misc_args + args.extra_args,
        num_gpus_per_node=8,
        megatron_model_type=None,
        extra_env_vars={{"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}} if args.train_fp8 else None,
    )


@U.dataclass_cli
def main(args: ScriptArgs):
    execute(args)


if __name__ == "__main__":
    typer.run(main)
"""


def write(folder: Path, body: str, package: str = "slime") -> Path:
    """Write a launcher whose function `execute` has this body, and return its path."""
    lines = [f"    {line}" for line in body.splitlines()]
    head = f"import os\nimport {package}.utils.external_utils.command_utils as U\n\n\ndef execute():\n"
    path = folder / "run.py"
    path.write_text(head + "\n".join(lines) + "\n\n\nif __name__ == '__main__':\n    execute()\n")
    return path


def get_script(path: Path, **variables: str) -> str:
    """Return the script that a launcher stands for."""
    script = maybe_read_launcher(Document.load(path), variables)
    assert script is not None
    return script.text


def test_an_option_of_the_command_line_makes_a_branch_and_nothing_runs(
    run_of: Callable[..., Run], tmp_path: Path
) -> None:
    run = run_of(COMMAND_LINE, "run.py")
    assert run.reading.framework == "miles"
    assert run.model["tensor_model_parallel_size"] == 2
    assert run.model.get("fp8") is None
    labels = run.reading.launches.labels
    line = COMMAND_LINE.splitlines().index("    U.execute_train(") + 1
    assert labels[0] == f'line {line}, train.py; line {line}, not [ "$MILES_SCRIPT_TRAIN_FP8" = True ]'
    assert labels[1] == f'line {line}, train.py; line {line}, if [ "$MILES_SCRIPT_TRAIN_FP8" = True ]'
    assert not (tmp_path / "ran").exists()


def test_a_stated_option_goes_over_its_default(tmp_path: Path) -> None:
    path = tmp_path / "run.py"
    path.write_text(COMMAND_LINE)
    variables = {
        "MILES_SCRIPT_TRAIN_FP8": "True",
        "MILES_SCRIPT_HARDWARE": "B200",
        "MILES_SCRIPT_TP": "4",
    }
    reading = load_file_reading(path, RunChoice(variables=variables))
    assert reading.sections["model"]["fp8_recipe"] == "mxfp8"
    assert reading.sections["model"]["tensor_model_parallel_size"] == 4
    assert reading.environment["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] == "1"


def test_a_launcher_that_ends_with_an_error_is_refused_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "run.py"
    path.write_text(COMMAND_LINE)
    with pytest.raises(UnreadFileError) as raised:
        load_file_reading(path, RunChoice(variables={"MILES_SCRIPT_TP": "3"}))
    line = COMMAND_LINE.splitlines().index('        assert self.tp in (1, 2, 4), "as many as a node has"') + 1
    assert str(raised.value) == (
        f"{path}: must start a run with nothing overridden, and the assertion `self.tp in (1, 2, 4)` fails on line "
        f'{line} of run.py. Add --context variables="NAME=VALUE" with an option of the launcher.'
    )


def test_the_refusal_of_a_launcher_names_an_option_of_its_failed_assertion(tmp_path: Path) -> None:
    path = tmp_path / "run.py"
    path.write_text(COMMAND_LINE.replace("assert self.tp in (1, 2, 4)", "assert self.tp > 3"))
    with pytest.raises(UnreadFileError, match='Add --context variables="MILES_SCRIPT_TP=VALUE" with an option'):
        load_file_reading(path)
    reading = load_file_reading(path, RunChoice(variables={"MILES_SCRIPT_TP": "4"}))
    assert reading.sections["model"]["tensor_model_parallel_size"] == 4


def test_a_text_that_only_the_run_knows_stays_open(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        f'U.execute_train(train_args="{SIZES} {TRAINING} " + compute_args(), megatron_model_type=None)',
    )
    assert get_script(path).rstrip().endswith("${compute_args}")
    run = load_run(config_file=path, strict=False)
    assert run.reading.uncertainty.mode_decider == "${compute_args}, which only the run knows,"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('a = "--lr 1 "\na += f"--tp {2 * 4}"', "--lr 1 --tp 8"),
        ("a = f\"--nodes {int(os.environ.get('NODES', '2'))}\"", "--nodes ${NODES:-2}"),
        ("a = f\"--load {os.environ['HOME']}/m\"", "--load ${HOME}/m"),
        ('a = " ".join(f"--x {i}" for i in range(2))', "--x 0 --x 1"),
        ('a = "--x 1 "\nfor i in unknown():\n    a += "--bf16 "', "${a}"),
        ('a = "--x 1 "\nwhile unknown():\n    a += "--bf16 "', "${a}"),
        ('d = {"x": "1"}\nunknown(d)\na = f"--x {d[\'x\']}"', "--x ${d_x}"),
        ("a = f\"--x {10 ** 9 * 'a'}\"", "--x ${10_9_a}"),
    ],
)
def test_the_text_of_train_args(tmp_path: Path, body: str, words: str) -> None:
    path = write(
        tmp_path,
        f"{body}\nU.execute_train(train_args=a, num_gpus_per_node=8, megatron_model_type=None)",
    )
    assert get_script(path).strip().partition("train.py ")[2] == words


def test_a_quoted_value_that_only_the_run_knows_holds_no_arguments(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "import shlex\nfolder = os.environ['FOLDER']\nargs = parse(folder)\n"
        f"words = f'--save {{shlex.quote(args.folder)}} {SIZES} {TRAINING}'\n"
        "U.execute_train(train_args=words, megatron_model_type=None)",
    )
    reading = load_file_reading(path)
    assert reading.uncertainty.mode_decider is None
    assert not [point for point in reading.uncertainty.open_points if "further arguments" in point]


def test_a_condition_that_only_the_run_knows_has_two_branches(tmp_path: Path) -> None:
    body = 'a = "--bf16 "\nif os.path.exists("x"):\n    a = "--fp16 "\n'
    body += "U.execute_train(train_args=a, megatron_model_type=None)"
    assert get_script(write(tmp_path, body)).strip() == (
        'if [ "$os_path_exists_x" ]; then ray job submit --runtime-env-json=\'{"env_vars": {}}\' -- python3 '
        "slime/train.py --fp16; else ray job submit --runtime-env-json='{\"env_vars\": {}}' -- python3 slime/train.py "
        "--bf16; fi"
    )


def test_the_model_type_names_a_file_of_the_clone(tmp_path: Path) -> None:
    models = tmp_path / "scripts" / "models"
    models.mkdir(parents=True)
    (models / "tiny.sh").write_text(f"MODEL_ARGS=({SIZES})\n")
    (models / "tiny.py").write_text(
        "import os\n\n\ndef model_args():\n"
        f"    return f\"{SIZES.replace('512', '''{os.environ.get('WIDTH') or 256}''')}\"\n"
    )
    for package, width in (("slime", 512), ("miles", 256)):
        (tmp_path / "tests").mkdir(exist_ok=True)
        body = f'U.execute_train(train_args="{TRAINING}", num_gpus_per_node=8, megatron_model_type="tiny")'
        run = load_run(config_file=write(tmp_path / "tests", body, package), strict=False)
        assert run.reading.framework == package
        assert run.model["hidden_size"] == width


def test_a_model_type_of_which_only_a_part_is_known_leaves_the_arguments_open(tmp_path: Path) -> None:
    body = (
        f"layers = count_layers()\nwords = '{TRAINING} --bf16'\n"
        "U.execute_train(train_args=words, megatron_model_type=f'deepseek-v3-{layers}layer')"
    )
    reading = load_file_reading(write(tmp_path, body, "miles"))
    assert "${scripts_models_deepseek_v3_count_layers_layer_py}: may hold further arguments, which are not read." in (
        reading.uncertainty.open_points
    )


def test_a_text_in_the_place_of_a_file_is_known(tmp_path: Path) -> None:
    body = "U.execute_train(train_args=f'--te-precision-config-file {U.encode_pseudo_file(\"a: 1\")}')"
    assert get_script(write(tmp_path, body, "miles")).strip().endswith("--te-precision-config-file base64:YTogMQ==")


PROFILES = """\
from dataclasses import dataclass, field

@dataclass
class Words:
    values: tuple = ()

@dataclass
class Plan:
    words: Words = field(default_factory=Words)

PROFILES = ({"names": ("a", "b"), "words": "--bf16 "}, {"names": ("c",), "words": "--fp16 "})
WORDS_BY_NAME = {name: profile["words"] for profile in PROFILES for name in profile["names"]}

def get_words(options):
    plan = Plan()
    if getattr(options, "is_short", False):
        return "--fp8-format hybrid "
    if not plan.words.values:
        return WORDS_BY_NAME[options.name]
    return "--fp8-format e4m3 "
"""


def test_names_that_a_package_of_the_clone_imports_are_followed(tmp_path: Path) -> None:
    package = tmp_path / "miles" / "plan"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from .profiles import get_words\n")
    (package / "profiles.py").write_text(PROFILES)
    path = tmp_path / "run.py"
    path.write_text(
        "from dataclasses import dataclass\nimport miles.utils.external_utils.command_utils as U\n"
        "from miles.plan import get_words\n\n@dataclass\nclass Options:\n    name: str = 'b'\n\n"
        "if __name__ == '__main__':\n    U.execute_train(train_args=get_words(Options()), megatron_model_type=None)\n"
    )
    assert get_script(path).strip().endswith("miles/train.py --bf16")


def test_a_module_of_the_clone_is_followed(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "_common.py").write_text(
        "import slime.utils.external_utils.command_utils as U\n\n\ndef train(fp8):\n"
        '    U.execute_train(train_args="--fp8-format hybrid" if fp8 else "--bf16", megatron_model_type=None)\n'
    )
    path = tmp_path / "tests" / "test_a.py"
    path.write_text("from tests._common import train\n\nif __name__ == '__main__':\n    train(fp8=True)\n")
    script = maybe_read_launcher(Document.load(path), {})
    assert script is not None
    assert script.text.splitlines()[3].endswith("slime/train.py --fp8-format hybrid")


def test_a_program_that_calls_no_execute_train_is_not_a_launcher(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("import slime\n\nif __name__ == '__main__':\n    slime.run()\n")
    assert maybe_read_launcher(Document.load(path), {}) is None


def test_a_launcher_with_several_runs_is_followed_once_for_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.py"
    path.write_text(COMMAND_LINE)
    followed: list[bool] = []
    run = LauncherProgram.run
    monkeypatch.setattr(LauncherProgram, "run", lambda program: (followed.append(True), run(program)))
    assert main(["check", str(path)]) == 0
    assert capsys.readouterr().out.count("run ") >= 2
    count_for_all_runs = len(followed)
    followed.clear()
    load_run(config_file=path, strict=False)
    assert len(followed) == count_for_all_runs


COMMANDS = """\
import typer
import miles.utils.external_utils.command_utils as U

app = typer.Typer()


def _start(args):
    U.execute_train(train_args=args, num_gpus_per_node=8, megatron_model_type=None)


def _download(name):
    U.exec_command(f"hf download {name}")


@app.command()
def prepare(name: str = "a"):
    _download(name)


@app.command()
def train(name: str = "a"):
    _start("--bf16")


if __name__ == "__main__":
    app()
"""


def test_a_command_that_reaches_no_execute_train_starts_no_run(tmp_path: Path) -> None:
    path = tmp_path / "run.py"
    path.write_text(COMMANDS)
    program = LauncherProgram(path, {})
    program.run()
    assert program.list_commands_without_start() == ["prepare"]
    again = LauncherProgram(path, {}, skipped=["prepare"])
    again.run()
    assert [start.arguments["train_args"].text for start in again.starts] == ["--bf16"]
    assert "prepare" in again.commands
