"""`Reader` reads the tree of a script once, as bash would with only the stated variables set.

A condition that the file does not decide is a question: `alternatives` asks for the same pass with
another answer.
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
        """Return the name of the branch that is taken where the condition holds, or does not."""
        word = self.word if holds else "not"
        return f"line {self.line}, {word} {self.text}"


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
        start = _without_blanks(node.child_by_field_name("initializer"))
        condition = _without_blanks(node.child_by_field_name("condition"))
        step = _without_blanks(node.child_by_field_name("update"))
        name, sign, value = start.partition("=")
        if not sign or step not in (f"{name}++", f"++{name}", f"{name}+=1"):
            return None
        return cls(name, value, condition)

    def values(self, known: Mapping[str, Mapping[int, str]]) -> list[str] | None:
        """Return the values of the counter in the turns; None where only the run knows one."""
        first = computed(f"$(({self.start}))", known)
        counted: list[str] = []
        while first is not None and len(counted) <= MAX_COUNTED:
            value = str(int(first) + len(counted))
            holds = computed(f"$(({self.condition}))", {**known, self.name: {0: value}})
            if holds is None:
                return None
            if holds == "0":
                return counted
            counted.append(value)
        return None


class _Noted(NamedTuple):
    """What a reader has noted beside the variables."""

    launches: list[starts.Launch]
    notes: dict[str, None]
    questions: dict[object, tuple[Arm, str]]
    files: dict[str, str]
    stray: list[Word]
    is_repeated: bool


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
        self.path = path
        self.answers = answers
        self.is_lenient = is_lenient
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
        """`exit`, `return`, `break` or `continue` after the end of the script, a function, a loop
        or its turn."""
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
        self.steps = 0
        """Commands that were read."""
        self.depth = 0
        """Functions, strings and sourced files around the command."""
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
                    self._statement(node)

    def _statement(self, node: Node) -> None:
        """Read a command or a condition."""
        test = self._test(node)
        if test is not None:
            self.has_failed = not test.holds
            if node.type == "command":
                self._expanded(node)  # `: ${NAME:=value}` sets a variable
            else:
                self._arithmetic(node)
        elif node.type in self.readers:
            self.readers[node.type](node)

    def _commands_of(self, condition: Iterable[Node]) -> None:
        """Read those commands of a condition that are no test.

        Each is looked at when those before it were read: expanding a test may set a variable.
        """
        for node in condition:
            if self._test(node) is None:
                self.run([node])

    def _body(self, node: Node) -> None:
        self.run(statements(node))

    def _negated(self, node: Node) -> None:
        self.run(node.named_children)
        self.has_failed = not self.has_failed

    def _define(self, node: Node) -> None:
        for name in node.children_by_field_name("name"):
            self.functions[text_of(name)] = node

    def _subshell(self, node: Node) -> None:
        state = self.state()
        self._body(node)
        self._leave_subshell(state)

    def _pipeline(self, node: Node) -> None:
        for child in statements(node):
            self._in_subshell(child)

    def _in_subshell(self, node: Node) -> None:
        """Read a command whose changes of variables are lost."""
        state = self.state()
        self._statement(node)
        self._leave_subshell(state)

    def _leave_subshell(self, state: State) -> None:
        self.restore(state)
        self.end = ""

    def _arithmetic(self, node: Node) -> None:
        """Read what `((A = 1))` changes; a test changes nothing."""
        text = text_of(node)
        if text.startswith("((") and text.endswith("))"):
            self.compute(text[2:-2])

    # -- loops -------------------------------------------------------------------------------------

    def _loop(self, node: Node) -> None:
        """Read the body of a loop once; what it leaves behind is computed for constant words.

        The values that a further turn would change are of the run where the number of turns is not
        known.
        """
        body = node.children_by_field_name("body")
        variables = [*map(text_of, node.children_by_field_name("variable"))]
        words = None
        if variables:
            words = self._words_of(node)
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
            further = body if goes_on else ()
            self._resolve(before, node, further, is_sure=is_sure)

    def _counted(self, count: _Count, body: Sequence[Node]) -> bool:
        """Read a loop that counts from a constant to another; return whether it is such a loop."""
        before = self.state()
        name = count.name
        values = count.values(self.values)
        if values is None or len(values) > MAX_COUNTED:
            return False
        if not values:
            return True
        self.set(name, [values[0]])
        if not self._turn(body):
            return True

        def further_turns() -> None:
            for value in values[1:]:
                self.set(name, [value])
                if not self._turn(body):
                    return
            self.set(name, [str(int(values[-1]) + 1)])

        first = self.state()
        self._again(further_turns)
        if self.repeated > MAX_REPEATED:
            self.restore(first)
            self._forget_changed(before)
        return True

    def _words_of(self, node: Node) -> list[str] | None:
        """Return the words of a `for`, None where only the run knows one of them."""
        if any(child.type == "in" for child in node.children):
            words = self.words(node.children_by_field_name("value"))
        elif "@" in self.values:
            words = self.held("@")
        else:
            return None
        if len(words) > MAX_TURNS:
            return None
        for text in words:
            word = Word.of(text)
            is_pattern = any(sign in text for sign in "*?[{")
            if word.defaults or word.is_unknown or is_pattern:
                return None
        return words

    def _condition(self, node: Node) -> Test:
        """Read the condition of `while` or `until`; return whether the body is read."""
        condition = [child for child in statements(node) if child.type != "do_group"]
        self._commands_of(condition)
        test = None
        if condition:
            test = self._test(condition[-1])
        if test is None or test.is_free:
            return Test(holds=True)
        if node.children[0].type == "until":
            return test.negated
        return test

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
        if self.exported != before.exported or self.functions != before.functions:
            return True
        now = self.values.copy()
        for name in but:
            now.pop(name, None)
            if name in before.values:
                now[name] = before.values[name]
        return now != before.values

    def _repeat(
        self, before: State, body: Sequence[Node], variable: str, words: Sequence[str]
    ) -> None:
        """Read a loop again with each of its words, for the values that it leaves behind."""
        first = self.state()
        end = self.end
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

    def _resolve(self, before: State, node: Node, body: Sequence[Node], *, is_sure: bool) -> None:
        """Make values that a further turn changes unknown.

        A loop that may have no turn is a question.
        """
        first = self.state()
        after = self.state()
        end = self.end
        self._again(lambda: self._turn(body))
        second = self.state()
        self.end = end
        self.restore(after)
        if self.repeated > MAX_REPEATED:
            self._forget_changed(before)
        for name in first.values.keys() | second.values.keys():
            value = first.values.get(name)
            is_unknown = value is not None and any(map(UNKNOWN.search, value.values()))
            if value != second.values.get(name) and not is_unknown:
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
        """Read commands again, and note the variables alone.

        A launch is noted where its precision is another than that of the launch on its line.
        """
        noted = self._noted()
        self.launches = noted.launches.copy()
        self.notes = noted.notes.copy()
        self.questions = noted.questions.copy()
        self.files = noted.files.copy()
        self.stray = noted.stray.copy()
        self.is_repeated = True
        read()
        again = self.launches[len(noted.launches) :]
        self._forget_notes_since(noted)
        for launch in again:
            same = [earlier for earlier in self.launches if earlier.line == launch.line]
            is_known = any(earlier.known == launch.known for earlier in same)
            is_open = any(_is_open(started) for started in (*same, launch))
            if not is_open and not is_known:
                self.launches.append(launch)

    def _noted(self) -> _Noted:
        return _Noted(
            launches=self.launches,
            notes=self.notes,
            questions=self.questions,
            files=self.files,
            stray=self.stray,
            is_repeated=self.is_repeated,
        )

    def _forget_notes_since(self, noted: _Noted) -> None:
        """Go back to what was noted."""
        self.launches = noted.launches
        self.notes = noted.notes
        self.questions = noted.questions
        self.files = noted.files
        self.stray = noted.stray
        self.is_repeated = noted.is_repeated

    def _line(self, node: Node) -> int:
        return self.line or node.start_point.row + 1

    def _redirected(self, node: Node) -> None:
        """Read a command with its redirections; name a here-document about precision."""
        inner, *outer_redirects = node.named_children
        redirects = outer_redirects.copy()
        for redirect in outer_redirects:
            redirects += redirect.children_by_field_name("redirect")
        if inner.type == "command" and self._test(inner) is None:
            behind: list[Node] = []
            for redirect in redirects:
                words = [child for child in redirect.named_children if child.type in WORDS]
                behind += words[1:]  # the first is the file
            self._command(inner, behind)
        else:
            self._statement(inner)
        for redirect in redirects:
            self.run(child for child in redirect.named_children if child.type == "pipeline")
        self._written(name_of(inner), redirects)
        is_shown = name_of(inner) == "cat" and len(redirects) == 1
        if not is_shown and any(map(_bears_on_precision, redirects)):
            self.notes[f"heredoc on line {self._line(node)}"] = None

    def _heredoc(self, redirect: Node) -> str:
        """Return the text of a here-document."""
        text = text_of(_first_child(redirect, "heredoc_body"))
        if redirect.children[0].type == "<<-":
            text = re.sub(r"(?m)^\t+", "", text)
        start = text_of(_first_child(redirect, "heredoc_start"))
        if start.startswith(("'", '"', "\\")):
            return text
        return self._text(text, is_quoted=True)

    def _written(self, command: str, redirects: Sequence[Node]) -> None:
        """Note the file that `cat` writes from a here-document.

        A file that another command writes is unknown.
        """
        targets: list[Node] = []
        for redirect in redirects:
            if redirect.type == "file_redirect":
                targets += redirect.named_children
        heredocs = [redirect for redirect in redirects if redirect.type == "heredoc_redirect"]
        for target in targets:
            if target.type not in WORDS:
                continue
            name = self.text(target)
            self.files.pop(name, None)
            if command == "cat" and len(targets) == len(heredocs) == 1:
                self.files[name] = self._heredoc(heredocs[0])

    # -- branches ----------------------------------------------------------------------------------

    def _pair(self, node: Node) -> None:
        """Read `left && right` or `left || right`."""
        left = node.children[0]
        right = node.children[-1]
        is_and = node.children[1].type == "&&"
        test = self._test(left)
        if test is not None and is_and:
            arm = self._arm(test, [left], [right])
            self.has_failed = not self._branch([arm], [])
        elif test is not None:
            arm = self._arm(test, [left], [])
            self.has_failed = not self._branch([arm], [right])
        else:
            self._statement(left)
            if self.has_failed != is_and and not self.end:
                self._statement(right)

    def _conditional(self, node: Node) -> None:
        arms = [self._clause(node, "if")]
        for child in node.children:
            if child.type == "elif_clause":
                arms.append(self._clause(child, "elif"))
        otherwise = [child for child in node.children if child.type == "else_clause"]
        self._branch(arms, otherwise)
        self.has_failed = False

    def _clause(self, clause: Node, word: str) -> Arm:
        """Read the condition of an `if` or an `elif`, and return it with its answer."""
        then = 0
        for place, child in enumerate(clause.children):
            if child.type == "then":
                then = place
                break
        condition: list[Node] = []
        for child in clause.children[:then]:
            if child.is_named and child.type != "comment":
                condition.append(child)
        body: list[Node] = []
        for child in clause.children[then:]:
            if child.is_named and child.type not in NO_BODY:
                body.append(child)
        self._commands_of(condition)
        test = None
        if condition:
            test = self._test(condition[-1])
        if test is None:
            test = Test(holds=False)
        return self._arm(test, condition or [clause], body, word)

    def _arm(
        self, test: Test, condition: Sequence[Node], body: Sequence[Node], word: str = "if"
    ) -> Arm:
        text = " ".join(" ".join(map(text_of, condition)).split())
        return Arm(test, text, self._line(condition[0]), body, word)

    def _case(self, node: Node) -> None:
        subject = self.text(node.children_by_field_name("value")[0])
        variable = variable_of(subject)
        name = f"${variable}" if variable else Word.of(subject)
        arms: list[Arm] = []
        for item in node.named_children:
            if item.type != "case_item":
                continue
            values = item.children_by_field_name("value")
            head = " ".join(text_of(item).removeprefix("(").partition(")")[0].split())
            patterns = [self.text(value) for value in values if value.type in WORDS]
            test = matched(subject, patterns)
            body = item.named_children[len(values) :]
            arms.append(Arm(test, f"case {name} in {head})", self._line(item), body))
            if item.children[-1].type in (";&", ";;&"):
                line = self._line(node)
                self.notes[f"the case on line {line}, which goes on to its next pattern"] = None
        self._branch(arms, [])
        self.has_failed = False

    def _branch(self, arms: Sequence[Arm], otherwise: Sequence[Node]) -> bool:
        """Read the commands of the first condition that holds; return whether there is such a one.

        A branch that ends the script and starts nothing is left for the next branch that the run
        may take. A lenient reading takes it for a check that the run passes, also where the file
        decides its condition.
        """
        free = [arm for arm in arms if arm.test.is_free]
        ended: list[Arm | None] = []
        taken: Arm | None = None
        before = self.state()
        for branch in self._candidates(arms, free):
            if ended:
                self.restore(before)
                before = self.state()
            taken = branch
            count = len(self.launches)
            self.end = ""
            self.run(otherwise if taken is None else taken.body)
            if self.end not in ("exit", "return") or len(self.launches) > count:
                break
            ended.append(taken)
        if arms and None not in ended:
            if taken is None:
                label = arms[0].label(holds=False)
            else:
                label = taken.label(holds=True)
            for arm in free:
                if arm not in ended:
                    self.questions.setdefault(arm.test.equal or arm.text, (arm, label))
        return taken is not None

    def _candidates(self, arms: Sequence[Arm], free: Sequence[Arm]) -> list[Arm | None]:
        """Return the branch that is taken, and those that the run may take; None is `else`."""
        first = None
        for arm in arms:
            if self._holds(arm):
                first = arm
                break
        if not (free or self.is_lenient):  # the file decides
            return [first]
        others = [branch for branch in (None, *free) if branch is not first]
        return [first, *others]

    def _holds(self, arm: Arm) -> bool:
        if arm.test.is_free:
            return self.answers.get(arm.text, arm.test.holds)
        return arm.test.holds

    def _test(self, node: Node) -> Test | None:
        """Return the answer of a condition, None for a command that is none."""
        kind = node.type
        first = ""
        if node.children:
            first = node.children[0].type
        if kind == "negated_command":
            inner = self._test(node.named_children[-1])
            return None if inner is None else inner.negated
        if kind == "list":
            return self._joined(node)
        if kind == "test_command" and first in ("[", "[["):
            return answer(self._tested_texts(node))
        if kind == "command" and name_of(node) == "test":
            texts = [self.text(child) for child in node.children[1:] if child.type in WORDS]
            return answer(texts)
        if kind == "command" and name_of(node) in ANSWERS:
            return Test(holds=ANSWERS[name_of(node)], is_free=False)
        if first == "((":
            value = computed(f"${text_of(node)}", self.values)
            if value is None:
                return Test(holds=False)
            return Test(holds=value != "0", is_free=False)
        if kind == "test_command":
            return Test(holds=False)
        return None

    def _tested_texts(self, node: Node) -> list[str]:
        """Return the words inside `[ ... ]` or `[[ ... ]]`, expanded."""
        texts: list[str] = []
        for child in tested(node):
            if child.type in WORDS:
                texts.append(self.text(child))
            else:
                texts.append(text_of(child))
        return texts

    def _joined(self, node: Node) -> Test | None:
        """Return the answer of two conditions; only the run has it unless both are of constants."""
        left = self._test(node.children[0])
        right = self._test(node.children[-1])
        if left is None or right is None:
            return None
        if left.is_free or right.is_free:
            return Test(holds=False)
        if node.children[1].type == "&&":
            holds = left.holds and right.holds
        else:
            holds = left.holds or right.holds
        return Test(holds, is_free=False)

    # -- commands ----------------------------------------------------------------------------------

    def _command(self, node: Node, behind: Sequence[Node] = ()) -> None:
        """Read a command; `behind` are words of it that stand behind a redirection."""
        self.executed.add(node.id)
        words = self._expanded(node) + self.words(behind)
        before = self.values.copy()
        exported = self.exported
        names = self.assign(node)
        self.has_failed = False
        if words and words[0] in DECLARERS:
            self.declare(words, names, before)
        elif words and names:
            # `NAME=value command` sets it for the command only
            self.exported = {**exported, **names}
            self._simple(words, self._line(node))
            self.exported = exported
            for name in names:
                self.values.pop(name, None)
            for name in names:
                if name in before:
                    self.values[name] = before[name]
        elif words:
            self._simple(words, self._line(node))

    def _expanded(self, node: Node) -> list[str]:
        """Return the words of a command."""
        words: list[str] = []
        if node.type == "variable_assignment":
            return words
        for child in node.children:
            if child.type == "command_name":
                words += self.words(child.children[:1])
            elif child.type in WORDS:
                words += self.words([child])
            elif child.type in ("=", "==") or (not child.is_named and child.type != "$"):
                words.append(text_of(child))
        return words

    def _simple(self, words: list[str], line: int) -> None:
        first = words[0]
        if first in ("exit", "return"):
            self.end = first
        elif first in ("break", "continue") and self.loops:
            self.end = first
            self.levels = 1
            if words[1:] and words[1].isdecimal():
                self.levels = int(words[1])
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
            count = 2 if rest[0] == "-a" else 1
            rest = rest[count:]
        if rest:
            self._simple(rest, line)
            if first == "exec":
                self.end = "exit"

    def _call(self, function: Node, words: list[str]) -> None:
        """Read the commands of a function with its arguments."""
        outer = self.positional()
        for name in outer:
            self.values.pop(name)
        self.set_positional(words)
        self.frames.append({})
        loops = self.loops
        self.loops = 0
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
        before = self.line
        self.line = line
        self.depth += 1
        self.run(nodes)
        self.depth -= 1
        self.line = before
        self.end = self.end.removeprefix("return")

    def _string(self, text: str, line: int) -> None:
        """Read a string that is a script.

        A variable that nothing had set when the string was written is unknown unless it is
        exported.
        """
        names: set[str] = set()
        for pattern in (DEFAULT, UNKNOWN):
            for groups in pattern.findall(text):
                names.update(groups)
        hidden: dict[str, dict[int, str]] = {}
        unknown: dict[str, dict[int, str]] = {}
        for name in names & self.values.keys() - self.exported.keys():
            hidden[name] = self.values[name]
            unknown[name] = {0: f"${name}"}
            self.values[name] = unknown[name]
        self._read(text, line, f"the string on line {line}")
        for name, value in hidden.items():
            if self.values.get(name) is unknown[name]:
                self.values[name] = value

    def _in_shell(self, text: str, line: int, environment: Mapping[str, Word]) -> None:
        """Read a string that another shell runs, with the variables of its environment alone."""
        state = self.state()
        shared = self.shared_functions
        functions = self.functions.items()
        self.values = {name: {0: str(value)} for name, value in environment.items()}
        self.exported = dict.fromkeys(environment)
        self.functions = {name: node for name, node in functions if name in shared}
        self.frames = []
        self._string(text, line)
        self._leave_subshell(state)

    def _read(self, text: str | None, line: int, name: str) -> None:
        """Read a text that is a script; note one that is not there, or is none."""
        root = None
        if text is not None:
            try:
                root = parse(text, self.path)
            except PayloadError:
                root = None
        if root is None:
            self.notes[name] = None
            return
        self.scripts.append(root)
        self._within(statements(root), line)

    def _start(self, words: list[str], line: int) -> None:
        """Note what a command starts."""
        count = len(self.launches)
        inner = starts.nested_script(words)
        if inner is not None:
            environment: dict[str, Word] = {}
            if not inner.is_elsewhere:
                environment = environment_of(words[: inner.place], self.environment())
            self._in_shell(inner.text, line, environment)
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
            environment = environment_of(started.runner, self.environment())
            self.launches.append(replace(started, environment=environment))

    def environment(self) -> dict[str, Word]:
        """Return the environment of the programs that the shell starts."""
        variables: dict[str, Word] = {}
        for name in self.exported:
            elements = self.values.get(name, {})
            if 0 in elements:
                variables[name] = Word.of(elements[0])
        return variables


def _is_open(launch: starts.Launch) -> bool:
    """Return whether only the run decides an argument of a launch."""
    return any(word.is_unknown for word in launch.arguments)


def _bears_on_precision(redirect: Node) -> bool:
    """Return whether the text of a here-document holds a word of precision."""
    for child in redirect.named_children:
        if child.type == "heredoc_body" and starts.PRECISION_WORDS.search(text_of(child)):
            return True
    return False


def _first_child(node: Node, kind: str) -> Node | None:
    for child in node.children:
        if child.type == kind:
            return child
    return None


def _without_blanks(node: Node | None) -> str:
    return "".join(text_of(node).split())


def neighbour(path: str, word: Word) -> str | None:
    """Return the text of a file next to the script at a path, None where there is none."""
    name: str = word
    unknown = [*UNKNOWN.finditer(word)]
    if unknown:
        name = word[unknown[-1].end() :].lstrip("/")
    if not name or name.startswith("~"):
        return None
    if unknown:
        above = ABOVE.search(unknown[-1][0])
        if above is not None:
            name = f"{above['up']}/{name}"
    file: Path | None = Path(path).parent / name
    if name.startswith("/"):
        file = _in_the_clone(Path(path), name)
    if file is None:
        return None
    try:
        return Document.load(file).text
    except (PayloadError, ValueError):
        return None


def _in_the_clone(script: Path, name: str) -> Path | None:
    """Return the file of an absolute path (`/opt/slime/a/b.sh`) in the clone of a script.

    The clone is the folder around the script whose name is a part of the path.
    """
    parts = Path(name).parts
    for folder in script.resolve().parents:
        if folder.name and folder.name in parts[1:-1]:
            rest = parts[parts.index(folder.name) + 1 :]
            file = folder.joinpath(*rest)
            if file.is_file():
                return file
            return None
    return None


def tested(node: Node) -> Iterable[Node]:
    """Return the words and operators of `[ ... ]` or `[[ ... ]]` without the brackets."""
    for child in node.children:
        if child.type in ("[", "]", "[[", "]]"):
            continue
        if child.type in WORDS or not child.child_count:
            yield child
        else:
            yield from tested(child)
