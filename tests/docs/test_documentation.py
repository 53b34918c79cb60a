"""What the documentation says is true: its commands run, its Python runs, its generated pages are current."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import parse_args

from bridge.front.compare import require_enough_steps
from tests import warm

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
BIN = Path(sys.executable).parent
FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    found = []
    for indent, kind, body in FENCE.findall(page.read_text(encoding="utf-8")):
        if kind == language:
            found.append("\n".join(line.removeprefix(indent) for line in body.splitlines()))
    return found


def commands() -> list[tuple[str, str, int]]:
    """Return page, command and exit code of each command; a comment may say another code than 0."""
    found = []
    for page in PAGES:
        for block in blocks(page, "bash"):
            joined = block.replace("\\\n", " ")
            for line in joined.splitlines():
                command, _, comment = line.partition("  #")
                command, stated = command.strip(), re.match(r" exit code (\d)", comment)
                if command and not command.startswith("#"):
                    found.append((page.relative_to(ROOT).as_posix(), command, int(stated[1]) if stated else 0))
    return list(dict.fromkeys(found))


def files_of(page: Path, folder: Path) -> None:
    """Write the files that a page shows: blocks whose first line is a comment with a path."""
    for language in ("python", "yaml", "json"):
        for block in blocks(page, language):
            named = re.match(r"(?:#|//) (\S+\.(?:py|yaml|json))\n", block)
            if named:
                path = folder / named[1]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block + "\n")


@pytest.mark.parametrize(("page", "command", "code"), commands(), ids=[f"{p}:{c[:60]}" for p, c, _ in commands()])
def test_a_command_of_the_documentation_runs(page: str, command: str, code: int, tmp_path: Path) -> None:
    files_of(ROOT / page, tmp_path)
    words = shlex.split(command)
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    if words[0] == "make":
        target = re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert target, f"the Makefile has no target {words[1]}"
        return
    if words[0] in ("git", "cd", "torchrun", "tensorboard"):
        if "scripts/train.py" not in words:
            return
        words = ["python", *words[words.index("scripts/train.py") :]]
    is_comparison = "scripts/compare.py" in words
    if is_comparison:  # a sweep of the same script, with two words of its own
        words = ["python", "scripts/train.py", "--multirun", *words[words.index("scripts/compare.py") + 1 :]]
        words = [word for word in words if not word.startswith(("seeds=", "gate="))]
    if "scripts/train.py" in words and not {"--help", "--cfg"} & set(words):
        # The composed config, of the first job of a sweep; that jobs run is the business of other tests.
        if "--multirun" in words:
            words = [word.partition(",")[0] for word in words if word != "--multirun"]
        words += ["--cfg", "job"]
    if words[1:2] == ["checkpoint"]:  # of the run above it; tests/cli/test_checkpoint.py has real ones
        words = [*words[:3], "--help"]
    words = [str(ROOT / word) if word.startswith("scripts/") else word for word in words]
    done = warm.run(words, cwd=tmp_path, env=environment)
    assert done.returncode == code, done.stderr
    if is_comparison:
        composed = yaml.safe_load(done.stdout)
        require_enough_steps(composed["train"], composed["logging"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    code = "\n\n".join(block for block in blocks(page, "python") if "# not run" not in block)
    if (
        not code or page.name == "add-a-foreign-system.md"
    ):  # its table is a file first: tests/convert/test_add_a_foreign_system.py
        return
    done = warm.run(["python", "-W", "ignore", "-c", code], cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_launch_files_for_slurm_and_kubernetes_start_one_run_that_composes() -> None:
    page = ROOT / "docs" / "howto" / "train.md"
    script = next(block for block in blocks(page, "text") if block.startswith("#!/bin/bash"))
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    asked = dict(re.findall(r"--(\S+?)=(\S+)", script.partition("#SBATCH")[2].partition("\n")[0]))
    manifest = next(block for block in blocks(page, "yaml") if block.startswith("apiVersion"))
    service, job = yaml.safe_load_all(manifest)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}

    slurm, kubernetes = (
        parse_args(shlex.split(text.replace("\\\n", " ").partition("torchrun ")[2]))
        for text in (
            script.replace("$SLURM_NNODES", asked["nodes"]),
            container["args"][0].replace("$JOB_COMPLETION_INDEX", "0"),
        )
    )
    assert slurm.nnodes == kubernetes.nnodes == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])
    assert slurm.nproc_per_node == kubernetes.nproc_per_node == asked["gpus-per-node"]
    assert f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={container['env'][0]['value']}" in script
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(kubernetes.nproc_per_node)
    assert kubernetes.master_addr == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert (slurm.training_script, slurm.training_script_args) == (
        kubernetes.training_script,
        kubernetes.training_script_args,
    )
    words = [str(ROOT / slurm.training_script), *slurm.training_script_args]
    done = warm.run(["python", *words, "--cfg", "job"])
    assert done.returncode == 0, done.stderr


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")} - {"index.md"}
    pages = {page for page in pages if not page.startswith("examples/")}
    assert sorted(page for page in pages if f"({page}" not in index) == []


def test_the_generated_pages_are_current() -> None:
    done = warm.run(["python", str(ROOT / "scripts/write_reference.py"), "--check"])
    assert (done.returncode, done.stdout) == (0, ""), "run python scripts/write_reference.py"


def test_the_site_builds_with_warnings_as_errors(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs the extra [docs]")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path / "site")]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
