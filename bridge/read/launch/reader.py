"""`Reader`: one pass over the tree of a script, as bash would go with nothing set but what is stated.

A condition that the file does not decide is a question: `alternatives` asks for the same pass with another answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bridge.errors import PayloadError
from bridge.read.launch import launches as starts
from bridge.read.launch.arithmetic import computed
from bridge.read.launch.builtins import DECLARERS, Builtins, State, environment_of
from bridge.read.launch.conditions import Test, answer, matched
from bridge.read.launch.job import is_job, job_environment
from bridge.read.launch.script import WORDS, name_of, parse, statements, text_of
from bridge.read.launch.word import DEFAULT, UNKNOWN, Word, variable_of
from bridge.read.text.document import Document

if TYPE_CHECKING:
    from tree_sitter import Node

MAX_STEPS = 12_000
"""Commands."""
MAX_DEPTH = 12
"""Of functions, strings and sourced files within each other."""
MAX_REPEATED = 1_500
"""Commands that are read again to know what a loop leaves behind."""
MAX_TURNS = 64
"""Of a loop that is read with each of its words."""
ABOVE = re.compile(r"\A\$\(\s*cd\s[^|;]*?/(?P<up>\.\.(?:/\.\.)*)/?[\"']?\s[^|;]*&&\s*pwd[^|;]*\)\Z")
"""`$(cd "$(dirname "$0")/../.." && pwd)`, a folder above that of the script."""
MAX_COUNTED = 256
"""Turns of `for ((i = 0; i < N; i++))` that are read."""
COMMANDS = frozenset(
    {
        "command",
        "variable_assignment",
        "variable_assignments",
        "declaration_command",
        "unset_command",
    }
)
CONTAINERS = frozenset({"compound_statement", "do_group", "else_clause", "ERROR"})
LOOPS = frozenset({"for_statement", "while_statement", "c_style_for_statement"})
HEREDOC = ("heredoc_start", "heredoc_body")
BEFORE_A_COMMAND = frozenset({"time", "exec", "command", "builtin"})
"""Words in front of a command of this shell."""
READERS = frozenset({"cat", "echo", "ls", "head", "mkdir", "jq"})
"""Commands that change no file which they name."""
NO_BODY = ("comment", "elif_clause", "else_clause")
ANSWERS = {"true": True, ":": True, "false": False}


class Arm(NamedTuple):
    """A condition with its answer, and the commands that it decides about."""

    test: Test
    text: str
    """The condition as it is written."""
    line: int
    body: Sequence[Node]
    word: str = "if"

    def label(self, *, holds: bool) -> str:
        """The branch where it holds, or where not."""
        return f"line {self.line}, {self.word if holds else 'not'} {self.text}"


class _Count(NamedTuple):
    """The header of `for ((i = 0; i < N; i++))`."""

    name: str
    start: str
    condition: str

    @classmethod
    def of(cls, node: Node) -> _Count | None:
        """Return the header of a loop that counts up by one; None for any other loop."""
        if node.type != "c_style_for_statement":
            return None
        parts = [node.child_by_field_name(name) for name in ("initializer", "condition", "update")]
        start, condition, step = ("".join(text_of(part).split()) for part in parts)
        name, sign, value = start.partition("=")
        if not sign or step not in (f"{name}++", f"++{name}", f"{name}+=1"):
            return None
        return cls(name, value, condition)

    def values(self, known: Mapping[str, Mapping[int, str]]) -> list[str] | None:
        """Return the values of the counter in the turns; None where only the run knows one."""
        first = computed(f"$(({self.start}))", known)
        found: list[str] = []
        while first is not None and len(found) <= MAX_COUNTED:
            value = str(int(first) + len(found))
            holds = computed(f"$(({self.condition}))", {**known, self.name: {0: value}})
            if holds is None:
                return None
            if holds == "0":
                return found
            found.append(value)
        return None


class Reader(Builtins):
    """What bash knows at a point of a script, and what it started before."""

    def __init__(
        self,
        root: Node,
        path: str,
        stated: Mapping[str, str],
        answers: Mapping[str, bool],
        *,
        is_lenient: bool = False,
    ) -> None:
        super().__init__(stated)
        self.path, self.answers, self.is_lenient = path, answers, is_lenient
        self.scripts = [root]
        """The script, and the strings and files in it that are scripts."""
        self.questions: dict[object, tuple[Arm, str]] = {}
        """Conditions that the file does not decide, each with the branch that is taken."""
        self.launches: list[starts.Launch] = []
        self.notes: dict[str, None] = {}
        """What was not read."""
        self.files: dict[str, str] = {}
        """Name of a file that `cat` has written from a here-document -> its text."""
        self.executed: set[int] = set()
        """Nodes of the commands that were read."""
        self.stray: list[Word] = []
        """Options that stand where a command should."""
        self.has_failed = False
        """The last command was `false`, or a condition that did not hold."""
        self.end = ""
        """`exit`, `return`, `break` or `continue` where the script, a function, a loop or its turn has ended."""
        self.levels = 0
        """How many loops `break` or `continue` ends."""
        self.loops = 0
        """Loops of the function around the command."""
        self.is_repeated = False
        """A loop is read again: nothing is noted."""
        self.repeated = 0
        """Commands that were read again."""
        self.line = 0
        """The line of the script that a string or a sourced file stands on; 0: outside of one."""
        self.steps = self.depth = 0
        self.readers: dict[str, Callable[[Node], None]] = {
            "redirected_statement": self._redirected,
            "list": self._pair,
            "negated_command": self._negated,
            "if_statement": self._conditional,
            "case_statement": self._case,
            "function_definition": self._define,
            "subshell": self._subshell,
            "pipeline": self._pipeline,
            **dict.fromkeys(COMMANDS, self._command),
            **dict.fromkeys(LOOPS, self._loop),
            **dict.fromkeys(CONTAINERS, self._body),
        }
        self.run(statements(root))

    def run(self, nodes: Iterable[Node]) -> None:
        """Read commands in their order."""
        for node in nodes:
            if self.is_repeated:
                self.repeated += 1
            else:
                self.steps += 1
            if self.steps > MAX_STEPS:
                self.notes[f"what follows after {MAX_STEPS} commands"] = None
            elif not self.end and self.repeated <= MAX_REPEATED:
                follows = node.next_sibling
                if follows is not None and follows.type == "&":
                    self._in_subshell(node)
                else:
                    self._one(node)

    def _one(self, node: Node) -> None:
        kind, test = node.type, self._test(node)
        if test is not None:
            self.has_failed = not test.holds
            if kind == "command":
                self._expanded(node)  # `: ${NAME:=value}` sets a variable
            else:
                self._arithmetic(node)
        elif kind in self.readers:
            self.readers[kind](node)

    def _body(self, node: Node) -> None:
        self.run(statements(node))

    def _negated(self, node: Node) -> None:
        self.run(node.named_children)
        self.has_failed = not self.has_failed

    def _define(self, node: Node) -> None:
        self.functions |= {text_of(name): node for name in node.children_by_field_name("name")}

    def _subshell(self, node: Node) -> None:
        state = self.state()
        self._body(node)
        self._leave_subshell(state)

    def _pipeline(self, node: Node) -> None:
        for child in statements(node):
            self._in_subshell(child)

    def _in_subshell(self, node: Node) -> None:
        """Read a command whose variables are its own."""
        state = self.state()
        self._one(node)
        self._leave_subshell(state)

    def _leave_subshell(self, state: State) -> None:
        self.restore(state)
        self.end = ""

    def _arithmetic(self, node: Node) -> None:
        """Read what `((A = 1))` changes; a test changes nothing."""
        text = text_of(node)
        if text.startswith("((") and text.endswith("))"):
            self.compute(text[2:-2])

    # -- loops ---------------------------------------------------------------------------------------------------------

    def _loop(self, node: Node) -> None:
        """Read the body of a loop once; what it leaves behind is computed for constant words.

        The values that a further turn would change are of the run where the number of turns is not known.
        """
        body = node.children_by_field_name("body")
        variables = [*map(text_of, node.children_by_field_name("variable"))]
        words = self._words_of(node) if variables else None
        is_sure = bool(words)
        test = None
        if node.type == "while_statement":
            test = self._condition(node)
            is_sure = not test.is_free
        elif not variables:
            count = _Count.of(node)
            if count is not None and self._counted(count, body):
                return
            header, _, _ = text_of(node).partition("do")
            self.compute(header)
        if words == [] or (is_sure and test is not None and not test.holds):
            return
        before = self.state()
        for variable in variables:
            self.set(variable, [f"${variable}"])
        goes_on = self._turn(body)
        if words is not None and is_sure:
            if self._is_changed(before, variables):
                self._repeat(before, body, variables[0], words)
        elif self._is_changed(before, variables):
            self._settle(before, node, body if goes_on else (), is_sure=is_sure)

    def _counted(self, count: _Count, body: Sequence[Node]) -> bool:
        """Read a loop that counts from a constant to another; return whether it is one."""
        before, name = self.state(), count.name
        values = count.values(self.values)
        if values is None or len(values) > MAX_COUNTED:
            return False
        if not values:
            return True
        self.set(name, [values[0]])
        if not self._turn(body):
            return True

        def others() -> None:
            for value in values[1:]:
                self.set(name, [value])
                if not self._turn(body):
                    return
            self.set(name, [str(int(values[-1]) + 1)])

        first = self.state()
        self._again(others)
        if self.repeated > MAX_REPEATED:
            self.restore(first)
            self._forget_changed(before)
        return True

    def _words_of(self, node: Node) -> list[str] | None:
        """Return the words of a `for`, None where only the run knows one."""
        values = node.children_by_field_name("value")
        has_list = any(child.type == "in" for child in node.children)
        words = self.words(values) if has_list else self.held("@") if "@" in self.values else None
        if words is None or len(words) > MAX_TURNS or any(Word.of(word).defaults for word in words):
            return None
        return (
            None
            if any(
                Word.of(word).is_unknown or any(sign in word for sign in "*?[{") for word in words
            )
            else words
        )

    def _condition(self, node: Node) -> Test:
        """Read the condition of `while` or `until`; return whether the body is read."""
        condition = [one for one in statements(node) if one.type != "do_group"]
        self.run(child for child in condition if self._test(child) is None)
        test = self._test(condition[-1]) if condition else None
        if test is None or test.is_free:
            return Test(holds=True)
        return test.negated if node.children[0].type == "until" else test

    def _turn(self, body: Sequence[Node]) -> bool:
        """Read the body of a loop; return whether the loop goes on."""
        self.loops += 1
        self.run(body)
        self.loops -= 1
        if self.end not in ("break", "continue"):
            return not self.end
        goes_on = self.end == "continue" and self.levels <= 1
        self.levels -= 1
        if self.levels <= 0 or not self.loops:
            self.end = ""
        return goes_on

    def _is_changed(self, before: State, but: Sequence[str]) -> bool:
        """Return whether a turn has changed what is known, other than the variables of the loop."""
        kept = {name: before.values[name] for name in but if name in before.values}
        now = {**{name: held for name, held in self.values.items() if name not in but}, **kept}
        return (
            now != before.values
            or self.exported != before.exported
            or self.functions != before.functions
        )

    def _repeat(
        self, before: State, body: Sequence[Node], variable: str, words: Sequence[str]
    ) -> None:
        """Read a loop again with each of its words, for the values that it leaves behind."""
        first, end = self.state(), self.end
        self.restore(replace(before, values=before.values.copy()))
        self.end = ""

        def turns() -> None:
            for word in words:
                self.set(variable, [word])
                if not self._turn(body):
                    return

        self._again(turns)
        if self.repeated > MAX_REPEATED:
            self.restore(first)
            self.end = end
            self._forget_changed(before)

    def _settle(self, before: State, node: Node, body: Sequence[Node], *, is_sure: bool) -> None:
        """Make values that a further turn changes unknown; a loop that may have no turn is a question."""
        first, end = self.state(), self.end
        after = self.state()
        self._again(lambda: self._turn(body))
        second, self.end = self.state(), end
        self.restore(after)
        if self.repeated > MAX_REPEATED:
            self._forget_changed(before)
        for name in first.values.keys() | second.values.keys():
            one, two = first.values.get(name), second.values.get(name)
            if one != two and not any(map(UNKNOWN.search, (one or {}).values())):
                self.forget(name)
        if is_sure:
            return
        header = " ".join(text_of(node).partition("\n")[0].partition(";")[0].split())
        arm = Arm(Test(holds=True), header, self._line(node), body, "in")
        if not self._holds(arm):
            self.restore(before)
        self.questions.setdefault(arm.text, (arm, arm.label(holds=True)))

    def _forget_changed(self, before: State) -> None:
        for name in [*self.values]:
            if self.values[name] != before.values.get(name):
                self.forget(name)

    def _again(self, read: Callable[[], object]) -> None:
        """Read commands again; noted are the variables, and launches whose precision is another than before."""
        noted = self.launches, self.notes, self.questions, self.files, self.stray, self.is_repeated
        self.launches, self.notes, self.questions = [*noted[0]], noted[1].copy(), noted[2].copy()
        self.files, self.stray, self.is_repeated = noted[3].copy(), [*noted[4]], True
        read()
        again = self.launches[len(noted[0]) :]
        self.launches, self.notes, self.questions, self.files, self.stray, self.is_repeated = noted
        for launch in again:
            same = [one for one in self.launches if one.line == launch.line]
            is_open = any(word.is_unknown for one in (*same, launch) for word in one.arguments)
            if not is_open and launch.known not in [one.known for one in same]:
                self.launches.append(launch)

    def _line(self, node: Node) -> int:
        return self.line or node.start_point.row + 1

    def _redirected(self, node: Node) -> None:
        """Read a command with its redirections; a here-document that bears on precision is named."""
        inner, *redirects = node.named_children
        redirects += [
            one for redirect in redirects for one in redirect.children_by_field_name("redirect")
        ]
        words = [
            [one for one in redirect.named_children if one.type in WORDS] for redirect in redirects
        ]
        if inner.type == "command" and self._test(inner) is None:
            self._command(inner, [word for group in words for word in group[1:]])
        else:
            self._one(inner)
        for redirect in redirects:
            self.run(child for child in redirect.named_children if child.type == "pipeline")
        self._written(name_of(inner), redirects)
        bodies = [
            text_of(one)
            for part in redirects
            for one in part.named_children
            if one.type == "heredoc_body"
        ]
        is_shown = name_of(inner) == "cat" and len(redirects) == 1
        if not is_shown and any(map(starts.PRECISION_WORDS.search, bodies)):
            self.notes[f"heredoc on line {self._line(node)}"] = None

    def _heredoc(self, redirect: Node) -> str:
        """Return the text of a here-document."""
        start, body = (
            next((one for one in redirect.children if one.type == kind), None) for kind in HEREDOC
        )
        text = text_of(body)
        if redirect.children[0].type == "<<-":
            text = re.sub(r"(?m)^\t+", "", text)
        is_plain = text_of(start)[:1] in ("'", '"', "\\")
        return text if is_plain else self._text(text, is_quoted=True)

    def _written(self, command: str, redirects: Sequence[Node]) -> None:
        """Note the file that `cat` writes from a here-document; one that another command writes is unknown."""
        targets = [
            one
            for redirect in redirects
            if redirect.type == "file_redirect"
            for one in redirect.named_children
        ]
        heredocs = [one for one in redirects if one.type == "heredoc_redirect"]
        for name in map(self.text, (one for one in targets if one.type in WORDS)):
            self.files.pop(name, None)
            if command == "cat" and len(targets) == len(heredocs) == 1:
                self.files[name] = self._heredoc(heredocs[0])

    # -- branches ------------------------------------------------------------------------------------------------------

    def _pair(self, node: Node) -> None:
        left, right, is_and = node.children[0], node.children[-1], node.children[1].type == "&&"
        test = self._test(left)
        if test is not None:
            arm = self._arm(test, [left], [right] if is_and else [])
            self.has_failed = not self._branch([arm], [] if is_and else [right])
        else:
            self._one(left)
            if self.has_failed != is_and and not self.end:
                self._one(right)

    def _conditional(self, node: Node) -> None:
        arms = list[Arm]()
        for clause in (node, *(child for child in node.children if child.type == "elif_clause")):
            then = next((at for at, child in enumerate(clause.children) if child.type == "then"), 0)
            condition = [
                child
                for child in clause.children[:then]
                if child.is_named and child.type != "comment"
            ]
            body = [
                child
                for child in clause.children[then:]
                if child.is_named and child.type not in NO_BODY
            ]
            self.run(child for child in condition if self._test(child) is None)
            test = (self._test(condition[-1]) if condition else None) or Test(holds=False)
            arms.append(
                self._arm(test, condition or [clause], body, "if" if clause is node else "elif")
            )
        self._branch(arms, [child for child in node.children if child.type == "else_clause"])
        self.has_failed = False

    def _arm(
        self, test: Test, condition: Sequence[Node], body: Sequence[Node], word: str = "if"
    ) -> Arm:
        text = " ".join(" ".join(map(text_of, condition)).split())
        return Arm(test, text, self._line(condition[0]), body, word)

    def _case(self, node: Node) -> None:
        subject, arms = self.text(node.children_by_field_name("value")[0]), list[Arm]()
        name = f"${variable_of(subject)}" if variable_of(subject) else Word.of(subject)
        for item in (child for child in node.named_children if child.type == "case_item"):
            patterns = item.children_by_field_name("value")
            head = " ".join(text_of(item).removeprefix("(").partition(")")[0].split())
            test = matched(subject, [self.text(one) for one in patterns if one.type in WORDS])
            body = item.named_children[len(patterns) :]
            arms.append(Arm(test, f"case {name} in {head})", self._line(item), body))
            if item.children[-1].type in (";&", ";;&"):
                self.notes[
                    f"the case on line {self._line(node)}, which goes on to its next pattern"
                ] = None
        self._branch(arms, [])
        self.has_failed = False

    def _branch(self, arms: Sequence[Arm], otherwise: Sequence[Node]) -> bool:
        """Read the commands of the first condition that holds; return whether there is one.

        A branch that ends the script and starts nothing is left for the next one that the run may take: a lenient
        reading takes it for a check that the run passes, also where the file decides its condition.
        """
        free = [arm for arm in arms if arm.test.is_free]
        arm = next((arm for arm in arms if self._holds(arm)), None)
        others = [other for other in (None, *free) if other is not arm]
        if not (free or self.is_lenient):  # the file decides
            others = []
        ended = list[Arm | None]()
        before = self.state()
        for taken in (arm, *others):
            if ended:
                self.restore(before)
                before = self.state()
            arm, count, self.end = taken, len(self.launches), ""
            self.run(otherwise if arm is None else arm.body)
            if self.end not in ("exit", "return") or len(self.launches) > count:
                break
            ended.append(arm)
        if arms and None not in ended:
            label = arms[0].label(holds=False) if arm is None else arm.label(holds=True)
            for one in (one for one in free if one not in ended):
                self.questions.setdefault(one.test.equal or one.text, (one, label))
        return arm is not None

    def _holds(self, arm: Arm) -> bool:
        return self.answers.get(arm.text, arm.test.holds) if arm.test.is_free else arm.test.holds

    def _test(self, node: Node) -> Test | None:
        """Return the answer of a condition, None for a command that is none."""
        kind, first = node.type, node.children[0].type if node.children else ""
        if kind == "negated_command":
            inner = self._test(node.named_children[-1])
            return None if inner is None else inner.negated
        if kind == "list":
            return self._joined(node)
        if kind == "test_command" and first in ("[", "[["):
            return answer(
                [self.text(one) if one.type in WORDS else text_of(one) for one in tested(node)]
            )
        if kind == "command" and name_of(node) == "test":
            return answer([self.text(one) for one in node.children[1:] if one.type in WORDS])
        if kind == "command" and name_of(node) in ANSWERS:
            return Test(holds=ANSWERS[name_of(node)], is_free=False)
        if first == "((":
            value = computed(f"${text_of(node)}", self.values)
            return Test(holds=False) if value is None else Test(holds=value != "0", is_free=False)
        return Test(holds=False) if kind == "test_command" else None

    def _joined(self, node: Node) -> Test | None:
        """Return the answer of two conditions; only the run has it unless both are of constants."""
        left, right = self._test(node.children[0]), self._test(node.children[-1])
        if left is None or right is None:
            return None
        if left.is_free or right.is_free:
            return Test(holds=False)
        is_and = node.children[1].type == "&&"
        return Test(
            left.holds and right.holds if is_and else left.holds or right.holds, is_free=False
        )

    # -- commands ------------------------------------------------------------------------------------------------------

    def _command(self, node: Node, behind: Sequence[Node] = ()) -> None:
        """Read a command; `behind` are words of it that stand behind a redirection."""
        self.executed.add(node.id)
        words, before, exported = (
            self._expanded(node) + self.words(behind),
            self.values.copy(),
            self.exported,
        )
        names = self.assign(node)
        self.has_failed = False
        if words and words[0] in DECLARERS:
            self.declare(words, names, before)
        elif words and names:
            self.exported = {
                **exported,
                **names,
            }  # `NAME=value command` sets it for the command only
            self._simple(words, self._line(node))
            self.exported = exported
            for name in names:
                self.values.pop(name, None)
            self.values |= {name: before[name] for name in names if name in before}
        elif words:
            self._simple(words, self._line(node))

    def _expanded(self, node: Node) -> list[str]:
        """Return the words of a command."""
        words: list[str] = []
        children = () if node.type == "variable_assignment" else node.children
        for child in children:
            if child.type == "command_name" or child.type in WORDS:
                words += self.words(child.children[:1] if child.type == "command_name" else [child])
            elif child.type in ("=", "==") or (not child.is_named and child.type != "$"):
                words.append(text_of(child))
        return words

    def _simple(self, words: list[str], line: int) -> None:
        first = words[0]
        if first in ("exit", "return"):
            self.end = first
        elif first in ("break", "continue") and self.loops:
            self.end, self.levels = (
                first,
                int(words[1]) if words[1:] and words[1].isdecimal() else 1,
            )
        elif first.startswith("-") and len(first) > 1:
            self.stray += map(Word.of, words)
            if self.launches:
                self.notes[f"line {line}, {starts.STRAY}"] = None
        elif first in self.functions:
            self._call(self.functions[first], words[1:])
        elif first in ("source", "."):
            name = Word.of("".join(words[1:2]))
            self._read(neighbour(self.path, name), line, f"source {name}")
        elif first == "eval":
            self._string(" ".join(words[1:]), line)
        elif first in self.builtins:
            self.builtins[first](words)
        elif first in BEFORE_A_COMMAND and words[1:]:
            self._command_behind(words, line)
        else:
            self._start(words, line)

    def _command_behind(self, words: list[str], line: int) -> None:
        """Read the command behind `exec`, `time` or `command`."""
        first, rest = words[0], words[1:]
        if first == "command" and rest[0] in ("-v", "-V"):
            return
        while rest and rest[0].startswith("-"):
            rest = rest[2 if rest[0] == "-a" else 1 :]
        if rest:
            self._simple(rest, line)
            self.end = "exit" if first == "exec" else self.end

    def _call(self, function: Node, words: list[str]) -> None:
        """Read the commands of a function with its arguments."""
        outer = self.positional()
        for name in outer:
            self.values.pop(name)
        self.set_positional(words)
        self.frames.append({})
        loops, self.loops = self.loops, 0
        self._within(function.children_by_field_name("body"), self.line)
        self.loops = loops
        self.leave_function()
        for name in self.positional():
            self.values.pop(name)
        self.values |= outer

    def _within(self, nodes: Iterable[Node], line: int) -> None:
        """Read commands of a function, a string or another file."""
        if self.depth >= MAX_DEPTH:
            return
        before, self.line = self.line, line
        self.depth += 1
        self.run(nodes)
        self.depth -= 1
        self.line = before
        self.end = self.end.removeprefix("return")

    def _string(self, text: str, line: int) -> None:
        """Read a string that is a script: what nothing had set when it was written is unknown unless it is exported."""
        names = {
            name
            for found in (DEFAULT, UNKNOWN)
            for groups in found.findall(text)
            for name in groups
        }
        hidden = {
            name: self.values[name] for name in names & self.values.keys() - self.exported.keys()
        }
        unknown = {name: {0: f"${name}"} for name in hidden}
        self.values |= unknown
        self._read(text, line, f"the string on line {line}")
        for name, value in hidden.items():
            if self.values.get(name) is unknown[name]:
                self.values[name] = value

    def _in_shell(self, text: str, line: int, environment: Mapping[str, Word]) -> None:
        """Read a string that another shell runs, with the variables that it is given and no others."""
        state = self.state()
        self.values = {name: {0: str(value)} for name, value in environment.items()}
        self.exported, self.frames = dict.fromkeys(environment), []
        self.functions = {
            name: node for name, node in self.functions.items() if name in self.shared_functions
        }
        self._string(text, line)
        self._leave_subshell(state)

    def _read(self, text: str | None, line: int, name: str) -> None:
        """Read a text that is a script; note one that is not there, or is none."""
        try:
            root = None if text is None else parse(text, self.path)
        except PayloadError:
            root = None
        if root is None:
            self.notes[name] = None
            return
        self.scripts.append(root)
        self._within(statements(root), line)

    def _start(self, words: list[str], line: int) -> None:
        """Note what a command starts."""
        count, inner = len(self.launches), starts.nested_script(words)
        if inner is not None:
            given = (
                {}
                if inner.is_elsewhere
                else environment_of(words[: inner.place], self.environment())
            )
            self._in_shell(inner.text, line, given)
        started = starts.found_launch([Word.of(word) for word in words], line)
        if started is None and words[0] not in READERS:
            for word in words[1:]:
                self.files.pop(word, None)
        if started is None or len(self.launches) > count:
            return
        started = replace(started, files=dict(self.files))
        if is_job(words):
            job = job_environment(words, lambda name: neighbour(self.path, name))
            self.launches.append(
                replace(started, environment=job.variables, unread_environment=job.unread)
            )
        else:
            given = environment_of(started.runner, self.environment())
            self.launches.append(replace(started, environment=given))

    def environment(self) -> dict[str, Word]:
        """Return the variables that programs are given."""
        return {
            name: Word.of(self.values[name][0])
            for name in self.exported
            if 0 in self.values.get(name, {})
        }


def neighbour(path: str, word: Word) -> str | None:
    """Return the text of a file next to the script at a path, None where there is none."""
    unknown = [*UNKNOWN.finditer(word)]
    name = word[unknown[-1].end() :].lstrip("/") if unknown else word
    if not name or name.startswith("~"):
        return None
    above = ABOVE.search(unknown[-1][0]) if unknown else None
    if above is not None:
        name = f"{above['up']}/{name}"
    file = _in_the_clone(Path(path), name) if name.startswith("/") else Path(path).parent / name
    try:
        return Document.load(file).text if file is not None else None
    except (PayloadError, ValueError):
        return None


def _in_the_clone(script: Path, name: str) -> Path | None:
    """Return the file of an absolute path (`/root/slime/a/b.sh`) in the folder of that name that a script lies in."""
    parts = Path(name).parts
    for folder in script.resolve().parents:
        if folder.name and folder.name in parts[1:-1]:
            rest = parts[parts.index(folder.name) + 1 :]
            file = folder.joinpath(*rest)
            return file if file.is_file() else None
    return None


def tested(node: Node) -> Iterable[Node]:
    """Return the words and operators of `[ ... ]` or `[[ ... ]]` without the brackets."""
    for child in node.children:
        if child.type not in ("[", "]", "[[", "]]"):
            yield from [child] if child.type in WORDS or not child.child_count else tested(child)
