"""Launch scripts against bash itself: what it would start is what is read, and nothing is run while reading."""

import shutil
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.errors import PayloadError
from bridge.interop.shell import launches

BASH = shutil.which("bash")
SPY = 'torchrun() { printf "%s\\0" "$@"; printf "\\n"; }\n'


def by_bash(script: str, folder: Path) -> list[list[str]]:
    """What bash hands to torchrun, call by call."""
    done = subprocess.run([BASH, "-c", SPY + script], cwd=folder, capture_output=True, text=True, check=True, env={})
    return [line.split("\0")[1:-1] for line in done.stdout.splitlines()]


def by_us(script: str) -> list[list[str]]:
    return [list(launch.arguments) for launch in launches(script)]


SCRIPTS = [
    'A=1\nB="x $A"\ntorchrun t.py --a $B --b "$B" --c \'$B\' --d\\ e',
    'ARGS=(\n --bf16 # not "this\n --x "a b"\n\n --y z\n)\nARGS+=(--last)\ntorchrun t.py "${ARGS[@]}" ${ARGS[@]}',
    'O=" --bf16 \\\n   --lr 1 "\nO+="--more"\ntorchrun t.py $O',
    "torchrun t.py ${X:-d} ${X:=e} $X ${X:+f} ${#X} ${X%e} ${X/e/g}",
    "P=a.tar.gz\ntorchrun t.py ${P%.*} ${P%%.*} ${P#*.} ${P##*.} ${P^^} ${P//a/b}",
    "if [ 1 = 2 ]; then D=--fp16; elif [[ abc == a* ]]; then D=--bf16; else D=; fi\ntorchrun t.py $D",
    "N=4\n[ $N -gt 2 ] && E=--big || E=--small\n(( N == 4 )) && F=yes\ntorchrun t.py $E $F",
    "case bf16 in fp*) A=1 ;; bf*|x) A=2 ;; *) A=3 ;; esac\ntorchrun t.py $A",
    "for d in bf16 fp16; do\n torchrun t.py --$d\ndone",
    'f() { local r=$1; shift; torchrun t.py --fp8-recipe $r "$@"; }\nf delayed --margin 2\nfunction '
    'g { f "$1" x; }\ng blockwise',
    'C="torchrun t.py --bf16 --lr 1"\n$C\neval "$C --more"\neval $C',
    "cat <<EOF > /dev/null\nit's \"open\nEOF\ntorchrun t.py --bf16",
    "cat > /dev/null <<-'END'\n\tdon't $X\n\tEND\ntorchrun t.py --a",
    "A=$((64/2)) B=$(( 3 * (2 + 1) ))\ntorchrun t.py $A $B $((7 % 4)) $((-7/2))",
    'torchrun t.py --a=b --c="d e" \\\n  --f \'g\'h"i"',
    "A=1; B=2 ; { torchrun t.py $A; } ;\n ( torchrun t.py $B )",
    'set -- p q r\ntorchrun t.py "$@" $2\nshift\ntorchrun t.py $1',
    "A=x; A=y true; torchrun t.py $A",
    'A="a   b"; torchrun t.py $A"c" pre$A',
    "A=$'x y'; torchrun t.py \"$A\" \"\" ''",
    'read -r -d "" C <<EOF || true\ntorchrun t.py --bf16\nEOF\neval "$C"',
    "while false; do :; done; until true; do :; done; torchrun t.py ok",
    "! false && torchrun t.py --neg",
    'A=(1 2 3); torchrun t.py ${#A[@]} ${A[1]} "${A[*]}"',
]


@pytest.mark.skipif(BASH is None, reason="needs bash")
@pytest.mark.parametrize("script", SCRIPTS)
def test_what_bash_would_start_is_what_is_read(script: str, tmp_path: Path) -> None:
    assert by_us(script) == by_bash(script, tmp_path)


WORDS = st.sampled_from(["--bf16", "a b", "", "x", "--fp8-format hybrid", "1", "it's", "$"])


@st.composite
def scripts(draw) -> str:
    """Straight-line scripts of assignments, arrays, tests and loops."""
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
                        f'for i in 1 2; do {name}="${{{name}:-}}$i"; done',
                        f'[[ -n "${{B:-}}" ]] && {name}="${{B:-}}{place}"',
                        f'case "${{C:-}}" in "") {name}=empty;; x*) {name}=ex;; *) {name}=other;; esac',
                    ]
                )
            )
        )
    lines.append('torchrun t.py ${A:-} "${B:-}" ${C:-}z "${L[@]}"')
    return "\n".join(["L=()", *lines])


@pytest.mark.skipif(BASH is None, reason="needs bash")
@settings(max_examples=30, deadline=None)
@given(script=scripts())
def test_random_scripts_agree_with_bash(script: str, tmp_path_factory) -> None:
    assert by_us(script) == by_bash(script, tmp_path_factory.getbasetemp())


def test_nothing_is_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = (
        'X=$(touch a)\n`touch b`\neval "touch c"\ntouch d\nbash -c "touch e"\n: > f\nsource '
        "./g\ntorchrun t.py $X <(touch h)"
    )
    (launch,) = launches(script)
    assert launch.unknowns.shown(launch.arguments[0]) == "$(touch a)"
    assert list(tmp_path.iterdir()) == []


def test_an_undecided_branch_is_followed_both_ways_where_it_matters() -> None:
    script = (
        'A=--bf16\nif [ "$1" = fast ]; then A="$A --fp8-format hybrid"; fi\nif [ -f x ]; then '
        "B=2; else B=3; fi\ntorchrun t.py $A --n $B"
    )
    first, second = launches(script)
    assert first.arguments[:3] == ("--bf16", "--fp8-format", "hybrid")
    assert second.arguments[0] == "--bf16"
    assert first.label == 'line 4, t.py; line 2, if [ "$1" = fast ]'
    assert second.label == 'line 4, t.py; line 2, not [ "$1" = fast ]'
    (decided,) = launches(script, variables={"1": "fast"})
    assert decided.decisions == ()


def test_ways_do_not_multiply_without_end() -> None:
    script = (
        "\n".join(f'if [ -f {n} ]; then A="$A --loss-scale {n}"; fi' for n in range(40)) + "\ntorchrun t.py $A --bf16"
    )
    begun = time.process_time()
    found = launches(script)
    assert time.process_time() - begun < 2
    assert len(found) <= 16
    assert any("more than 16 ways" in note for note in found[0].notes)


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
    ],
    ids=range(12),
)
def test_a_hostile_script_is_done_in_less_than_two_seconds(script: str) -> None:
    begun = time.process_time()
    try:
        launches(script)
    except PayloadError as error:
        assert str(error).count("\n") == 0
    assert time.process_time() - begun < 2


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('echo a\nA="open', 's.sh, line 2: quote " is never closed. Complete the script.'),
        ("A='open", "s.sh, line 1: quote ' is never closed. Complete the script."),
        ("A=$(ls\n", "s.sh, line 1: ( is never closed. Complete the script."),
        ("\nA=( 1 2", "s.sh, line 2: array ( is never closed. Complete the script."),
        ("if true; then\n ls", "s.sh, line 1: `if` needs a `fi`. Complete the script."),
        ("for x in a; do ls", "s.sh, line 1: `for` needs a `done`. Complete the script."),
        ("ls; fi", "s.sh, line 1: `fi` closes nothing. Correct the script."),
        ("case x in a) ls", "s.sh, line 1: `case` needs a `esac`. Complete the script."),
        ("echo ${X", "s.sh, line 1: ${ is never closed. Complete the script."),
    ],
)
def test_a_broken_script_is_one_sentence(script: str, message: str) -> None:
    with pytest.raises(PayloadError) as caught:
        launches(script, "s.sh")
    assert str(caught.value) == message
