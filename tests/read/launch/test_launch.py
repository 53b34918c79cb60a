"""Launch scripts against bash itself: what it would start is what is read, and nothing is run while reading."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.convert.conversion import import_runs
from bridge.errors import PayloadError
from bridge.precision.mode import get_mode
from bridge.read.launch.script_launches import read_launches
from bridge.read.megatron_lm import importer as megatron_lm
from bridge.read.text.document import Document
from tests.read.properties import reasons
from tests.work import calls

BASH = shutil.which("bash")
LIMIT = 5_000_000
"""Calls of the reading of one script; the dearest here takes 2.4 million, and one without an end has no number."""
SPY = 'torchrun() { printf "%s\\0" "$@"; printf "\\n"; }\n'


def by_bash(script: str, folder: Path) -> list[list[str]]:
    """What bash hands to torchrun, call by call."""
    done = subprocess.run([BASH, "-c", SPY + script], cwd=folder, capture_output=True, text=True, check=True, env={})
    return [line.split("\0")[1:-1] for line in done.stdout.splitlines()]


def by_us(script: str) -> list[list[str]]:
    return [list(launch.arguments) for launch in read_launches(script)]


COUNTED = """\
LAYERS=5
DENSE=2
flags=()
for ((i = 0; i < LAYERS; i++)); do
  if (( i < DENSE )); then flags+=(0); else flags+=(1); fi
done
printf -v FREQ "[%s]" "$(IFS=', '; echo "${flags[*]}")"
ARGS=(
  --moe-layer-freq "$FREQ"
  --other [0]*$DENSE+[1]*$LAYERS
)
torchrun t.py ${ARGS[@]}
"""

SCRIPTS = [
    COUNTED,
    'A=1\nB="x $A"\ntorchrun t.py --a $B --b "$B" --c \'$B\' --d\\ e',
    'ARGS=(\n --bf16 # not "this\n --x "a b"\n\n --y z\n)\nARGS+=(--last)\ntorchrun t.py "${ARGS[@]}" ${ARGS[@]}',
    'O=" --bf16 \\\n   --lr 1 "\nO+="--more"\ntorchrun t.py $O',
    "torchrun t.py ${X:-d} ${X:=e} $X",
    ': ${X:=--bf16}\n: "${Y=2}"\ntorchrun t.py $X $Y',
    "if [ 1 = 2 ]; then D=--fp16; elif [[ abc == a* ]]; then D=--bf16; else D=; fi\ntorchrun t.py $D",
    "N=4\n[ $N -gt 2 ] && E=--big || E=--small\ntorchrun t.py $E",
    "case bf16 in fp*) A=1 ;; bf*|x) A=2 ;; *) A=3 ;; esac\ntorchrun t.py $A",
    'f() { local r=$1; torchrun t.py --fp8-recipe $r "$@"; }\nf delayed --margin 2\nfunction '
    'g { f "$1" x; }\ng blockwise',
    'C="torchrun t.py --bf16 --lr 1"\n$C\neval "$C --more"\neval $C',
    "cat <<EOF > /dev/null\nit's \"open\nEOF\ntorchrun t.py --bf16",
    "cat > /dev/null <<-'END'\n\tdon't $X\n\tEND\ntorchrun t.py --a",
    'torchrun t.py --a=b --c="d e" \\\n  --f \'g\'h"i"',
    "A=1; B=2 ; { torchrun t.py $A; } ;\n ( torchrun t.py $B )",
    "A=x; A=y true; torchrun t.py $A",
    'A=1; B=46; torchrun t.py $((A + B)) $(( (A+$B) * 2 )) "n$((B/4))" $((${B}-A)) x',
    "A=8\nB=$((A * A))\nC=($((B + 1)) $((B / 3)))\ntorchrun t.py ${C[@]}",
    'Y=z\nX=$(cat <<E\n{"a": "$Y", "b": $((1 + 1))}\n\nE\n)\ntorchrun t.py "$X" --y "$(cat <<\'E\'\n$Y "q"\nE\n)" x',
    "A=3; torchrun t.py $((2 - A)) $((A*1)) $((0x10 + 1))",
    'A="a   b"; torchrun t.py $A"c" pre$A',
    "A='x y'; torchrun t.py \"$A\" \"\" ''",
    "while false; do :; done; until true; do :; done; torchrun t.py ok",
    "! false && torchrun t.py --neg",
    'A=(1 2 3); torchrun t.py "${A[*]}"',
    "A=x; A=y torchrun t.py $A",
    "torchrun t.py --a \\\n  --b",
    "echo --bf16 1 > /dev/null; A=$(:) B=2; torchrun t.py $B",
    "false || { A=1; }; true || exit 1; true && B=2; torchrun t.py $A $B",
    # what a function, a subshell, a pipeline and another shell have of their own
    'A=--bf16\nf() { local A=--fp16; g; }\ng() { A="$A x"; torchrun t.py $A; }\nf\ntorchrun t.py $A',
    "A=--bf16\n( A=--fp16; torchrun t.py $A )\necho x | while read l; do A=--fp16; done\ntorchrun t.py $A",
    "A=--bf16\nbash -c 'A=--fp16'\nA=--fp16 &\nwait\nf() ( A=x; exit 1 )\nf\ntorchrun t.py $A",
    "A=--bf16\nf() { declare A=--fp16; declare -g B=--x; export C=y; }\nf\ntorchrun t.py $A $B $C",
    # unset, elements, and what a command reads
    'X="--fp8-format hybrid"\nunset X\ntorchrun t.py --bf16 $X ${X:-d} ${X-e}',
    'P=(--fp16 a b)\nP[0]=--bf16\nP[7]=d\nP+=(e)\ntorchrun t.py "${P[@]}" $P',
    'A=(a b)\nA=c\nA+=d\ntorchrun t.py "${A[@]}" "$A" x',
    'set -- a "b c" d\nshift\ntorchrun t.py $1 "$@" $#',
    # loops
    "A=--bf16\nwhile true; do break; A=--fp16; done\nwhile false; do A=x; done\ntorchrun t.py $A",
    "for i in 1 2; do for j in 1 2; do continue 2; done; A=1; done; A+=x\ntorchrun t.py x $A",
    # commands that start others
    "run() { torchrun t.py --bf16; }\nif ! run; then exit 1; fi\ntime run",
    'A="--bf16 "; B=" --x"; torchrun t.py $A$B "$A"y',
]


@pytest.mark.skipif(BASH is None, reason="needs bash")
@pytest.mark.parametrize("script", SCRIPTS)
def test_what_bash_would_start_is_what_is_read(script: str, tmp_path: Path) -> None:
    assert by_us(script) == by_bash(script, tmp_path)


WORDS = st.sampled_from(["--bf16", "a b", "", "x", "--fp8-format hybrid", "1", "it's", "$"])


@st.composite
def scripts(draw) -> str:
    """Straight-line scripts of assignments, arrays and tests."""
    lines = []
    for place in range(draw(st.integers(1, 5))):
        name = draw(st.sampled_from("ABC"))
        value = draw(WORDS).replace("'", "").replace("$", "")
        lines.append(
            draw(
                st.sampled_from(
                    [
                        f'{name}="{value}"',
                        f"{name}='{value}'",
                        f'{name}="${{{name}:-{value}}} y"',
                        f'L+=("{value}" p{place})',
                        f'if [ "${{A:-}}" = "x" ]; then {name}=then; else {name}="else {place}"; fi',
                        f'[[ -n "${{B:-}}" ]] && {name}="${{B:-}}{place}"',
                        f'case "${{C:-}}" in "") {name}=empty;; x*) {name}=ex;; *) {name}=other;; esac',
                    ]
                )
            )
        )
    lines.append('torchrun t.py ${A:-} "${B:-}" ${C:-}z "${L[@]}"')
    return "\n".join(["L=()", *lines])


@pytest.mark.skipif(BASH is None, reason="needs bash")
@given(script=scripts())
def test_random_scripts_agree_with_bash(script: str, tmp_path_factory) -> None:
    (started,) = by_bash(script, tmp_path_factory.getbasetemp())
    first, *_ = by_us(script)  # the others are branches behind a default
    assert first == started


def test_nothing_is_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = (
        'X=$(touch a)\n`touch b`\neval "touch c"\ntouch d\nbash -c "touch e"\n: > f\nsource '
        "./g\ntorchrun t.py $X <(touch h)"
    )
    (launch,) = read_launches(script)
    assert launch.arguments[0] == "$(touch a)"
    assert list(tmp_path.iterdir()) == []


def test_the_branch_that_bash_takes_with_nothing_set_is_read_first() -> None:
    script = (
        'A=--bf16\nif [ "$1" = fast ]; then A="$A --fp8-format hybrid"; fi\nif [ -f x ]; then '
        "B=2; else B=3; fi\ntorchrun t.py $A --n $B"
    )
    first, second = read_launches(script)
    assert first.arguments == ("--bf16", "--n", "3")
    assert second.arguments[:3] == ("--bf16", "--fp8-format", "hybrid")
    assert first.label == 'line 4, t.py; line 2, not [ "$1" = fast ]'
    assert second.label == 'line 4, t.py; line 2, if [ "$1" = fast ]'
    (decided,) = read_launches(script, variables={"1": "fast"})
    assert (decided.decisions, "--fp8-format" in decided.arguments) == ((), True)


def test_one_value_is_assumed_wherever_it_is_asked_for() -> None:
    script = (
        'PR=$1\nif [ $PR = bf16 ]; then A=--bf16; fi\ncase "$PR" in bf*) A="$A --fp8-format hybrid";; esac\n'
        "torchrun t.py $A"
    )
    assert ("--bf16", "--fp8-format", "hybrid") in [launch.arguments for launch in read_launches(script)]


@pytest.mark.parametrize(
    "before",
    [
        '[ -z "$1" ] && A=--fp16',
        'A="${1:+--fp16}"',
        '[ "${1:-a}" = a ] && A=--fp16',
        "[[ $1 != fp* ]] && A=--fp16",
    ],
)
def test_a_value_that_a_branch_has_holds_for_the_commands_before_it_too(before: str) -> None:
    script = f'{before}\nif [ "$1" = fp8 ]; then B="--fp8-format hybrid"; fi\ntorchrun t.py --bf16 $A $B'
    stated = read_launches(script, variables={"1": "fp8"})[0].arguments
    assert stated in [launch.arguments for launch in read_launches(script) if 'if [ "$1" = fp8 ]' in launch.label]


def test_a_string_keeps_what_its_variables_were_when_it_was_written() -> None:
    script = 'CMD="torchrun t.py --bf16 $A --hysteresis ${X:-2}"\nA=--fp16\nX=1\n$CMD\neval "$CMD"\nbash -c "$CMD"'
    assert {launch.arguments for launch in read_launches(script)} == {("--bf16", "$A", "--hysteresis", "2")}


def test_a_shell_in_a_string_knows_what_was_exported_and_no_parameter_next_to_a_text_is_lost() -> None:
    script = 'export F=hybrid\nCMD=\'torchrun t.py --fp8-format $F --save a_\'"$2 --load $1-x"\nbash -c "$CMD"'
    (launch,) = read_launches(script)
    assert launch.arguments == ("--fp8-format", "hybrid", "--save", "a_$2", "--load", "$1-x")


def test_branches_do_not_multiply_without_end() -> None:
    script = (
        "\n".join(f'if [ -f {n} ]; then A="$A --loss-scale {n}"; fi' for n in range(40)) + "\ntorchrun t.py $A --bf16"
    )
    assert calls(lambda: read_launches(script)) < LIMIT
    found = read_launches(script)
    assert len(found) <= 49
    assert found[0].arguments[-1] == "--bf16"


@pytest.mark.parametrize(
    "script",
    [
        "A=" + "x" * 400_000,
        "a;" * 20_000,
        "A=xx\n" + 'A="$A$A"\n' * 400 + "torchrun t.py $A " * 300,
        "f() { f; f; }\nf\n" + "torchrun t.py --bf16\n" * 50,
        "for a in 1 2 3 4 5 6 7 8 9; do " * 6 + "torchrun t.py; " + "done; " * 6,
        "((" * 20_000,
        "$(" * 20_000,
        "cat <<EOF\n" + 'x"$y\n' * 60_000,
        "case x in " * 2000,
        'eval "' * 3000,
        "a" + "[[ " * 3000,
        'A="' + "$B " * 100_000 + '"',
        "torchrun t.py " + "${EXTRA_ARGS:-} " * 10_000,
        "X=${X:-1}\nf() { if [ $X = 1 ]; then f; f; else f; fi; }\nf\ntorchrun t.py --bf16",
        "".join(f"V{n}=${{V{n}:-1}}\nif [ $V{n} = 1 ]; then W{n}=a; else W{n}=b; fi\n" for n in range(800)),
        " && ".join(["[ $X = 1 ]"] * 2_000) + " && A=--bf16\ntorchrun t.py $A",
        "".join(f"[ -f {n} ] || exit 1\n" for n in range(2_000)) + "torchrun t.py --bf16",
        "".join(f"echo {{}} > f{n}.json\n" for n in range(2_000)) + "torchrun t.py --bf16\n" * 300,
        "set -- " + "a " * 20_000 + "\nshift" * 1_000 + '\ntorchrun t.py --bf16 "$@"',
        "cat > a.json <<EOF\n" + '{"enabled": ${X:-1} ' * 6_000 + "\nEOF\ntorchrun t.py --bf16",
        "a|" * 30_000,
        "x=(" * 10_000,
        "<<A " * 20_000,
        "".join(f"A{n}=${{A{n - 1}:-$A{n}}}\n" for n in range(1, 900)) + "torchrun t.py $A899 --bf16",
        "[ " + "${a%]" * 250 + "]" * 200_000,
        "[ " + "${a%]" * 40_000 + "\n" + "}" * 40_000 + "\ntorchrun t.py --bf16",
        'X="$(cat <<E\n' + "\n" * 60_000 + ')"\ntorchrun t.py --bf16',
        "A=1\nB=$((" + "A+" * 20_000 + "A))\ntorchrun t.py --bf16 $B",
    ],
    ids=range(28),
)
def test_a_hostile_script_is_soon_done(script: str) -> None:
    def read() -> None:
        try:
            read_launches(script)
        except PayloadError as error:
            assert str(error).count("\n") == 0

    assert calls(read) < LIMIT


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ('echo a\nA="open', 2),
        ("A='open", 1),
        ("A=$(ls\n", 1),
        ("\nA=( 1 2", 2),
        ("if true; then\n ls", 1),
        ("for x in a; do ls", 1),
        ("case x in a) ls", 1),
        ("echo ${X", 1),
    ],
)
def test_a_broken_script_that_starts_nothing_is_one_sentence(script: str, line: int) -> None:
    with pytest.raises(PayloadError) as caught:
        read_launches(script, "s.sh")
    rule = "must be bash that can be read here, and is not"
    assert re.fullmatch(rf"s\.sh, line [{line}{line + 1}]: {rule}\. .*", str(caught.value))


def test_a_script_that_is_broken_somewhere_says_so() -> None:
    (launch,) = read_launches("torchrun t.py --bf16\nif true; then\n ls")
    assert [str(note) for note in launch.notes] == ["line 2, which cannot be read here"]


# -- which branch was taken -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "decisions"),
    [
        (
            'if [ -f x ]; then\nif [ "$2" ]; then DTYPE=a; else DTYPE=b; fi\ntorchrun t.py --bf16\nfi',
            [("line 1, if [ -f x ]",)],
        ),
        (
            "case $X in a) P=--bf16;; b) P=--fp16;; esac\ntorchrun t.py $P",
            [
                ("line 1, not case $X in a)",),
                ("line 1, if case $X in a)",),
                ("line 1, if case $X in b)",),
            ],
        ),
        (
            'if [ "$1" ]; then torchrun a.py --bf16; else torchrun b.py --fp16; fi',
            [('line 1, not [ "$1" ]',), ('line 1, if [ "$1" ]',)],
        ),
        ('if [ "$1" ]; then DTYPE=a; else DTYPE=b; fi\ntorchrun t.py --bf16', [()]),
    ],
)
def test_a__the_branches_that_its_precision_depends_on(script: str, decisions) -> None:
    assert [launch.decisions for launch in read_launches(script)] == decisions


def test_arguments_of_a_launch_on_another_branch_are_no_run_of_their_own() -> None:
    script = 'ARGS=(--bf16 --num-layers 4)\nif [ "$1" -eq 0 ]; then torchrun pretrain_gpt.py ${ARGS[@]}; fi\n'
    assert [launch.name for launch in read_launches(script)] == ["pretrain_gpt.py"]
    other = script.replace("${ARGS[@]}", "--fp16")
    assert [launch.name for launch in read_launches(other)] == ["ARGS", "pretrain_gpt.py"]


@pytest.mark.parametrize(
    ("command", "started"),
    [
        ("read -r -d '' INNER <<'EOF' || true", [("train.py", ("--bf16", "$MODE"))]),
        ("MODE=--fp16; read -d '' INNER <<EOF", [("train.py", ("--bf16", "--fp16"))]),
        ("read -r INNER <<'EOF'", []),
    ],
)
def test_a_script_that_read_takes_from_a_here_document_is_started(command: str, started) -> None:
    script = f'{command}\n\ncd /opt\npython train.py --bf16 $MODE\n\nEOF\nsrun bash -c "${{INNER}}"\n'
    found = [launch for launch in read_launches(script) if launch.line]
    assert [(launch.name, launch.arguments) for launch in found] == started
    assert not [note for launch in found for note in launch.notes]


def test_a_file_that_is_sourced_on_the_branch_is_named() -> None:
    (launch,) = read_launches('if [ "$1" ]; then :; else source conf.sh; fi\ntorchrun t.py --bf16')
    assert [str(note) for note in launch.notes] == ["source conf.sh"]


@pytest.mark.parametrize("folder", ["", "/opt/clone/"])
def test_a_sourced_file_with_a_name_that_no_system_has_is_named(folder: str, tmp_path) -> None:
    script = tmp_path / "clone" / "run.sh"
    name = f"{folder}{'n' * 300}.sh"
    (launch,) = read_launches(f"source {name}\ntorchrun t.py --bf16", str(script))
    assert [str(note) for note in launch.notes] == [f"source {name}"]


# -- what somebody states of the run ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("PR=$OPTARG", "fp16"),
        ("PR=$1", "fp16"),
        ("PR=${1:-bf16}", "fp16"),
        ("PR=$(cat x)", "fp16"),
        ("PR=fp$1", "fp16"),
        ("export PR=$1", "fp16"),
        ("read PR", "fp16"),
        ("for PR in $LIST; do :; done", "fp16"),
        ("PR=bf16", "bf16"),
        ("PR=", ""),
        ("PR=bf$1", "fp16"),
        ("PR=${PR:-bf16}", "fp16"),
        ("PR+=$1", "fp16$1"),
    ],
)
def test_what_is_stated_wins_over_what_only_the_run_knows(script: str, expected: str) -> None:
    (launch,) = read_launches(f"{script}\ntorchrun t.py --bf16 --is=$PR", variables={"PR": "fp16"})
    assert launch.arguments[1] == f"--is={expected}"
    assert launch.variable_defaults == {}


def test_what_is_stated_may_hold_blanks_in_quotes() -> None:
    assert megatron_lm.parse_variables("A='--bf16 --x', B=2 1=c") == {
        "A": "--bf16 --x",
        "B": "2",
        "1": "c",
    }
    with pytest.raises(PayloadError, match="must be NAME=value pairs, got 'A=1 --x'"):
        megatron_lm.parse_variables("A=1 --x")


# -- what a command hands to its program -------------------------------------------------------------------------------

RUN = "torchrun pretrain_gpt.py --num-layers 2 --bf16"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (f"export A=1\nunset A\n{RUN}", {}),
        (f"export A=1 B=2\nexport -n A\n{RUN}", {"B": "2"}),
        (f"export A=1\nnohup env B=2 {RUN}", {"A": "1", "B": "2"}),
        (f"env A=1 {RUN}", {"A": "1"}),
        (f"( export A=1 )\n{RUN}", {}),
        (f"declare -x A=1\nset -a\nB=2\nset +a\nC=3\n{RUN}", {"A": "1", "B": "2"}),
        (f"f() {{ {RUN}; }}\nA=1 f", {"A": "1"}),
        (f"export A=1\nB=2 bash -c '{RUN}'", {"A": "1", "B": "2"}),
        (f"export A=1\nssh -p 22 host '{RUN}'", {}),
        (f"export A=1\nmpirun -x B=2 {RUN}", {"A": "1", "B": "2"}),
    ],
)
def test_the_variables_of_a_program_are_those_that_bash_gives_it(script: str, expected: dict[str, str]) -> None:
    (launch,) = read_launches(script)
    assert launch.environment == expected
    assert launch.unread_environment == ""


@pytest.mark.parametrize("option", ["-u", "-i", "--unset=A", "-S"])
def test_an_option_of_env_leaves_the_variables_of_the_program_to_the_run(option: str) -> None:
    (launch,) = read_launches(f"export A=1\nenv {option} A B=2 {RUN}")
    assert launch.environment == {}
    assert launch.unread_environment == f"env {option}"
    (nested,) = read_launches(f"export A=1\nenv {option} A bash -c '{RUN}'")
    assert nested.environment == {}
    assert [str(note) for note in nested.notes] == [f"env {option}"]


@pytest.mark.parametrize(
    "before",
    [
        "nohup",
        "time -p",
        "exec",
        "timeout 60",
        "numactl -m 0",
        "ssh host",
        "sudo -E",
        "if !",
        "until",
        "command",
        "python -m coverage run -a",
    ],
)
def test_a_program_behind_another_command_is_a_launch(before: str) -> None:
    after = {"if !": "; then exit 1; fi", "until": "; do sleep 1; done"}.get(before, "")
    (launch,) = read_launches(f"{before} {RUN}{after}")
    assert launch.arguments == ("--num-layers", "2", "--bf16")


@pytest.mark.parametrize("shell", ["bash -c", "srun bash -euo pipefail -c", "ssh -o A=b host", "docker run x bash -lc"])
def test_a_program_in_a_string_for_a_shell_is_a_launch(shell: str) -> None:
    (launch,) = read_launches(f"A=--fp16\n{shell} 'cd x && {RUN}'")
    assert launch.arguments == ("--num-layers", "2", "--bf16")


@pytest.mark.parametrize(
    "change",
    [
        *(
            "read A < x",
            "mapfile -t A < x",
            "printf -v A %q x",
            'A["$i"]=x',
            "getopts ab A",
            "read -n 3 A",
        ),
        *("read A <<< $UNSET", "read -r A <<'X'\n--fp8\nX"),
        *(
            "(( A = $1 ))",
            "(( A = 1 ))",
            "(( A++ ))",
            "let A=A+1",
            "A[-1]=x",
            "A[0]+=x",
            "unset 'A[0]'",
            "declare -i A=1",
        ),
        *("declare -u A", "B=A; declare -n B"),
    ],
)
def test_a_variable_that_only_the_run_knows_keeps_no_earlier_value(change: str) -> None:
    (launch,) = read_launches(f"A=--fp16\n{change}\n{RUN} $A")
    assert launch.arguments[3] == "$A"


def test_a_later_turn_of_a_loop_that_changes_the_precision_is_a_launch_too() -> None:
    found = read_launches('P=\nwhile read x; do torchrun t.py --bf16 $P; P="--fp8-format hybrid"; done')
    assert [launch.arguments for launch in found] == [("--bf16",), ("--bf16", "--fp8-format", "hybrid")]


@pytest.mark.parametrize("loop", ["for x in $LIST", "while read x", "for (( i = 0; i < $N; i++ ))", "until test -f x"])
def test_a_value_that_each_turn_of_a_loop_changes_is_of_the_run(loop: str) -> None:
    first = read_launches(f'A=--bf16\n{loop}; do A="$A y"; done\ntorchrun t.py $A')[0]
    assert first.arguments == ("$A",)


def test_a_loop_that_may_have_no_turn_is_a_question() -> None:
    first, second = read_launches("A=--bf16\nfor x in $LIST; do A=--fp16; done\ntorchrun t.py $A")
    assert (first.arguments, first.label) == (
        ("--fp16",),
        "line 3, t.py; line 2, in for x in $LIST",
    )
    assert (second.arguments, second.label) == (
        ("--bf16",),
        "line 3, t.py; line 2, not for x in $LIST",
    )


def test_words_behind_two_dashes_are_no_options() -> None:
    (run,) = runs(f"{RUN} -- --fp8-format hybrid")
    assert run.recipe == "bf16_mixed"


def test_a_script_passes_the_checks_that_its_own_values_fail() -> None:
    script = f'A=\nwhile [ $# -gt 0 ]; do case $1 in --a) A=$2;; esac; shift; done\n[ -z "$A" ] && exit 1\n{RUN}'
    (launch,) = read_launches(script)
    assert launch.label == "line 4, pretrain_gpt.py"


# -- what is no launch, and what a launch is not given ----------------------------------------------------------------


def runs(script: str):
    return megatron_lm.import_all(Document.from_text(script, "run.sh"))


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("torchrun t.py --num-layers 2 \\ \n  --bf16 \\\n  --lr 1", 2),
        ("torchrun t.py --num-layers 2 \\\n  # --fp16 \\\n  --bf16", 3),
        ("torchrun t.py --num-layers 2 \\\n\n  --bf16 | tee x", 3),
        ("torchrun t.py --num-layers 2 # \\\n  --bf16", 2),
        ("torchrun t.py --num-layers 2\n  --bf16", 2),
        ("A='--bf16'\ntorchrun t.py --num-layers 2 \\ \n  $A", 3),
    ],
)
def test_flags_behind_a_broken_continuation_are_no_run_and_are_named(script: str, line: int) -> None:
    (run,) = runs(script)
    where = f"line {line}, whose options belong to no command"
    assert (run.mode_is_stated, run.decided_by) == (False, where)
    assert reasons(run, where) == ["unsupported"]


def test_a_comment_at_the_end_of_a_continuation_breaks_nothing() -> None:
    (run,) = runs("torchrun t.py --num-layers 2 --bf16 \\\n  # --fp16 \\\n\n$POST x")
    assert run.recipe == "bf16_mixed"
    assert [loss.field for loss in run.unmapped] == ["--accumulate-allreduce-grads-in-fp32"]


def test_a_file_of_bare_arguments_is_one_run() -> None:
    (run,) = megatron_lm.import_all(Document.from_text("--num-layers 2\n--bf16\n--fp8-format hybrid\n", "args.txt"))
    assert (get_mode(run.config), run.config.fp8) == ("bf16", "hybrid")


@pytest.mark.parametrize(
    "expression",
    [
        "A + B",
        "A % 3",
        "-A / 2",
        "(2 - A) / 2",
        "A + 010",
        "A ** 2",
        "A / 0",
        "A + 1_0",
        "C + 1",
        "A > 2 ? A : 2",
        "A++",
        "2#101",
        "A + 16#ff",
    ],
)
def test_arithmetic_that_only_the_run_knows_stays_as_it_is_written(expression: str) -> None:
    (launch,) = read_launches(f"A=4\nC=${{C:-8}}\ntorchrun t.py --num-layers $(({expression}))")
    assert launch.arguments[1] == f"$(({expression}))"
    assert launch.arguments[1].is_open


def test_the_end_of_a_text_that_is_too_long_is_left_to_the_run() -> None:
    doubled = "A=x\n" + "A=$A$A\n" * 20
    (launch,) = read_launches(f"{doubled}{RUN} --name $A")
    assert launch.arguments[-1].is_open
    assert len(launch.arguments[-1]) < 70_000


@pytest.mark.parametrize("words", ["", " in x y", ' in "$@"'])
def test_a_for_loop_leaves_its_variable_to_the_run(words: str) -> None:
    (launch,) = read_launches(f"f() {{ for a{words}; do A=$a; done; }}\nf x y\n{RUN} $A")
    assert launch.arguments[3] == "$a"
    assert launch.arguments[3].is_open


@pytest.mark.parametrize("pattern", ["%%]*", "%]", "##*]", "//]/", "%%[]]*", "%%{*", "/]/x", "%%'*"])
def test_a_bracket_in_the_pattern_of_an_expansion_is_bash(pattern: str) -> None:
    script = f'x="a]b"\ny="${{x{pattern}}}"\ntorchrun t.py --bf16 --name $y --lr 1'
    (launch,) = read_launches(script)
    assert launch.notes == ()
    assert [*launch.arguments[:2], *launch.arguments[3:]] == ["--bf16", "--name", "--lr", "1"]
    assert launch.arguments[2].is_open


@pytest.mark.parametrize("reader", ["sbatch", "ssh host bash -s", "python", "cat > job.sh", "tee job.sh"])
def test_a_heredoc_that_is_not_only_shown_is_named(reader: str) -> None:
    text = f"{reader} <<EOF\ntorchrun text.py --fp16\nEOF\ncat <<EOF\ntorchrun no.py --fp16\nEOF\ntorchrun t.py"
    (launch,) = read_launches(text)
    assert (launch.program, *map(str, launch.notes)) == ("t.py", "heredoc on line 1")
    with pytest.raises(PayloadError, match="heredoc on line 1: it is not read, and may set the precision too"):
        import_runs(Document.from_text(text.removesuffix("torchrun t.py"), "run.sh"))


def test_only_programs_that_may_train_are_runs() -> None:
    script = (
        "python tools/preprocess_data.py --input $IN --output-prefix x\npython -m pip install --quiet x\n"
        "python download.py $DATA_DIR\npython -c \"import os; print('torchrun x.py --fp16')\"\n"
    )
    assert [run.label for run in runs(f"{script}torchrun u.py --num-layers 2 --bf16")] == ["line 5, u.py"]
    assert [launch.program for launch in read_launches(script)] == [
        "tools/preprocess_data.py",
        "download.py",
    ]


def test_an_unknown_word_behind_a_switch_may_hold_flags() -> None:
    (run,) = runs("torchrun t.py --num-layers 2 --swiglu $MORE --lr $LR")
    assert reasons(run, "$MORE") == ["unsupported"]
    assert reasons(run, "$LR") == []


def test_a_loop_over_a_number_of_the_environment_is_open() -> None:
    (launch,) = read_launches(COUNTED.replace("LAYERS=5", "LAYERS=$1"))
    assert launch.arguments == ("--moe-layer-freq", "$FREQ", "--other", "[0]*2+[1]*$1")


@pytest.mark.parametrize("subject", ["$(uname)", "`uname`", "${D:-$(uname && echo npu || echo gpu)}"])
def test_a_case_of_the_output_of_a_command_takes_its_first_arm(subject: str) -> None:
    (launch,) = read_launches(
        f'A=(--lr 1)\ncase "{subject}" in gpu) A+=(--seed 2);; npu) A=();; esac\n{RUN} "${{A[@]}}"'
    )
    assert launch.arguments[-4:] == ("--lr", "1", "--seed", "2")


def test_a_case_whose_last_arm_ends_the_script_takes_an_arm_that_goes_on() -> None:
    (launch,) = read_launches(f'case "$D" in gpu) A="--seed 2";; *) exit 1;; esac\n{RUN} $A')
    assert launch.arguments[-2:] == ("--seed", "2")


@pytest.mark.parametrize("sign", [";&", ";;&"])
def test_a_case_that_goes_on_to_its_next_pattern_is_noted(sign: str) -> None:
    (launch,) = read_launches(f"case a in a) A=1\n{sign} a*) A=2;; esac\n{RUN} $A")
    assert [str(note) for note in launch.notes] == ["the case on line 1, which goes on to its next pattern"]


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("IFS=',' read -r TP PP <<< 2,4", ["2", "4"]),
        ("C='2,4,8'; IFS=, read TP PP <<< \"$C\"", ["2", "4,8"]),
        ("read -r TP PP <<< ' 2 '", ["2", ""]),
        ("read -r TP PP <<< ${SIZES:-2 4}", ["2", "4"]),
        ("IFS=',' read -r TP PP <<< $1", ["$TP", "$PP"]),
        ("for C in 2,4 4,8; do IFS=, read -r TP PP <<< $C; done", ["$TP", "$PP"]),
    ],
)
def test_read_sets_its_variables_to_the_fields_of_a_known_string(script: str, arguments: list[str]) -> None:
    (launch,) = read_launches(f'TP=1; PP=1\n{script}\n{RUN} "$TP" "$PP"')
    assert list(launch.arguments[-2:]) == arguments


def test_read_fills_an_array_with_every_field() -> None:
    (launch,) = read_launches(f"IFS='|' read -ra A <<< '2|4|'\n{RUN} ${{A[@]}}")
    assert list(launch.arguments[-2:]) == ["2", "4"]
