"""Random scripts of everything that changes a variable: bash starts what is read, or the reading says it is unknown."""

from __future__ import annotations

import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from bridge.read.launch.launch import Launch
from bridge.read.launch.script_launches import read_launches

BASH = shutil.which("bash")
STUB = r"""#!/bin/bash
{ printf '%s\037' "$@" "E=${E-unset}"; printf '\036'; } >> "$STARTED"
"""
WORDS = ["--bf16", "--fp16", "--fp8-format hybrid", " x ", "", "a  b", "--fp8-recipe=delayed"]
SIMPLE = [
    "{name}='{word}'",
    '{name}="${name} {word}"',
    '{name}="${{{other}[*]}}"',
    "{name}+='{word}'",
    "{name}=({word} '{word}')",
    "{name}+=('{word}' y)",
    "{name}=()",
    '{name}=("${{{other}[@]}}" {word})',
    "{name}[{index}]='{word}'",
    "{name}[{index}]+='{word}'",
    "unset {name}",
    "unset '{name}[{index}]'",
    "unset -v {name} {other}",
    'local {name}="{word}"',
    "local {name}",
    "local -a {name}=({word})",
    "declare -a {name}",
    "declare -g {name}={word}",
    "declare {name}='{word}'",
    "readonly R='{word}'",
    "export E='{word}'",
    "export {name}",
    "export -n E",
    "unset E",
    "E={index}",
    "f",
    "f '{word}' ${other}",
    "E={index} f",
    "g",
    "unset -f g",
    "g() {{ {name}='{word}'; }}",
    "break",
    "continue",
    "false && exit",
    "set -- '{word}' b ${other}",
    "set -euo pipefail +e +u",
    "shift",
    "shift 2",
    'read -r {name} <<< "{word} z"',
    'read -ra {name} <<< "{word} z"',
    'read {name} {other} <<< "{word}"',
    "read -r -d '' {name} <<'X'\n{word}\nX",
    "read -r -d '' {name} <<X\n${other}\nX",
    'mapfile -t {name} <<< "{word}"',
    "printf -v {name} %s '{word}'",
    "(( N = {index} ))",
    "(( N += 2 ))",
    "(( N++ ))",
    "let N=N+{index}",
    "N=$((N + {index}))",
    ': "${{{name}:={word}}}"',
    "{name}=${{{other}:-{word}}}",
    "{name}=${{{other}-{word}}}",
    "{name}=${{{other}[1]}}",
    "{name}=${{#{other}[@]}}",
    '{name}=("${{{other}[@]:1}}")',
    "{name}=${{{other}:+{word}}}",
    "declare -n P={name}; P='{word}'; unset -n P",
    "eval '{name}={index}'",
    "eval \"{name}='{word}'\"",
    "eval 'unset {name}'",
    "bash -c '{name}=1; unset E'",
    "bash -c 'torchrun c{line}.py ${{E-}} \"$1\"' x",
    "trap '{name}=1' EXIT",
    "trap - EXIT",
    "IFS=,",
    "unset IFS",
    "torchrun a{line}.py ${name} \"${{{other}[@]}}\"",
    "E='{word}' torchrun b{line}.py \"${name}\" \"$@\" $#",
    "env E={index} torchrun d{line}.py ${name}",
    "env -u E torchrun e{line}.py \"${{{name}[*]}}\"",
    "nohup env -i PATH=\"$PATH\" STARTED=\"$STARTED\" torchrun h{line}.py $N",
    "export -n E; E=3",
]  # fmt: skip
NESTED = [
    "( {body} )",
    "{{ {body}\n}}",
    "{body} &\nwait",
    "echo x | while read -r l; do {body}\ndone",
    "{{ {body}\n}} | cat",
    "if true; then {body}\nelse {second}\nfi",
    "if [ {index} = 1 ]; then {body}\nelif [[ a == a* ]]; then {second}\nfi",
    "if ! false; then {body}\nfi",
    'if [ "${{{name}-}}" = --bf16 ]; then {body}\nfi',
    'if [ -z "${{{name}-}}" ] && true; then {body}\nfi',
    "true && {{ {body}\n}}",
    "false || {{ {body}\n}}",
    "case b{index} in b1|c) {body}\n;; b*) {second}\n;; esac",
    "case b{index} in b1) {body}\n;& b2) {second}\n;; esac",
    "for i in 1 2 3; do {body}\ndone",
    "for i in; do {body}\ndone",
    "for i; do {body}\ndone",
    "for i in a b; do if [ $i = b ]; then {body}\nfi; done",
    "for i in a b; do {body}\nbreak; {second}\ndone",
    "for (( i = 0; i < 2; i++ )); do {body}\ndone",
    "while true; do {body}\nbreak; {second}\ndone",
    "while false; do {body}\ndone",
    "until true; do {body}\ndone",
    "while [ $# -gt 0 ]; do {body}\nshift; done",
    "f() {{ {body}\n}}\nf a b",
    "f() {{ {body}\nreturn; {second}\n}}\nf '' b",
    "h() ( {body} )\nh",
    "f() {{ local A=z; {body}\n}}\nif f; then {second}\nfi",
    "if ! f x; then {body}\nfi",
]


@st.composite
def commands(draw, depth: int = 2) -> str:
    """One or several commands, each on lines of its own."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        is_nested = depth > 0 and draw(st.booleans())
        facts = {
            "name": draw(st.sampled_from("ABC")),
            "other": draw(st.sampled_from("ABC")),
            "word": draw(st.sampled_from(WORDS)),
            "index": draw(st.integers(0, 3)),
            "line": draw(st.integers(0, 10**9)),
        }
        if is_nested:
            facts["body"], facts["second"] = draw(commands(depth - 1)), draw(commands(depth - 1))
        found.append(draw(st.sampled_from(NESTED if is_nested else SIMPLE)).format(**facts))
    return "\n".join(found)


@st.composite
def scripts(draw) -> str:
    """A script whose last command starts a program with every variable."""
    head = "f() { :; }\ng() { A=g; }\nN=1"
    body = "\n".join(draw(commands()) for _ in range(draw(st.integers(1, 3))))
    return f'{head}\n{body}\ntorchrun last.py $A "${{B[@]}}" ${{C[*]}} "$N" "$@"\n'


def by_bash(script: str, folder: Path) -> dict[str, set[tuple[str, ...]]]:
    """Return the arguments of each program that bash starts, each with the variable E."""
    folder.mkdir(parents=True, exist_ok=True)
    stub, started = folder / "torchrun", folder / "started"
    if not stub.exists():
        stub.write_text(STUB)
        stub.chmod(0o755)
    started.write_text("")
    variables = {"PATH": f"{folder}:/usr/bin:/bin", "STARTED": str(started)}
    assert BASH is not None
    command = [BASH, "-c", f"ulimit -t 1\n{script}", "bash", "p", "q"]  # the words are made here
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        done = subprocess.run(command, cwd=folder, env=variables, timeout=5, check=False, **quiet)
    except subprocess.TimeoutExpired:
        reject()
    if done.returncode < 0:  # a loop without an end
        reject()
    found = defaultdict[str, set[tuple[str, ...]]](set)
    for call in started.read_text().split("\x1e")[:-1]:
        program, *words = call.split("\x1f")[:-1]
        found[program].add(tuple(words))
    return found


def is_open(launch: Launch) -> bool:
    """Whether the reading says that the run decides something of a launch."""
    words = (*launch.arguments, *launch.environment.values())
    return bool(launch.decisions or launch.notes) or any(word.is_open or word.defaults for word in words)


def words_of(launch: Launch) -> tuple[str, ...]:
    return (*launch.arguments, f"E={launch.environment.get('E', 'unset')}")


def compare(script: str, folder: Path) -> None:
    """Fail where a launch is read as certain that bash does not make, or where one of bash's is not read."""
    started = by_bash(script, folder)
    read = [launch for launch in read_launches(script) if launch.line]
    for launch in read:
        if not is_open(launch):
            assert words_of(launch) in started[launch.program], script
    opened = {launch.program for launch in read if is_open(launch)}
    known = {(launch.program, words_of(launch)) for launch in read}
    for program, calls in started.items():
        for words in calls:
            assert program in opened or (program, words) in known, script


@pytest.mark.skipif(BASH is None, reason="needs bash")
@given(script=scripts())
def test_a_random_script_is_read_as_bash_runs_it_or_as_unknown(script: str, tmp_path_factory) -> None:
    compare(script, tmp_path_factory.getbasetemp() / "stub")
