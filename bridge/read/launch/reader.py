"""`Reader`: a script, read once as bash would with only the stated variables set.

Each class adds to the class before it:

    Variables   values, and the words that bash makes of them        bash/variables.py
    Shell       scopes, functions, environment, assignments          bash/shell.py
    Builtins    `unset`, `read`, `printf -v`, `set`, `shift`         bash/builtins.py
    Walk        the order of commands, and what was found            walk.py
    Branches    `if`, `case`, `&&`, `||`                             branches.py
    Loops       `for`, `while`, `until`                              loops.py
    Reader      commands: calls, redirections, scripts, launches
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from bridge.errors import PayloadError
from bridge.read.launch.bash.builtins import variable_read_whole
from bridge.read.launch.bash.environment import environment_of
from bridge.read.launch.bash.shell import DECLARERS
from bridge.read.launch.job import is_job, job_environment
from bridge.read.launch.loops import Loops
from bridge.read.launch.nested_script import nested_script
from bridge.read.launch.notes import Note, NoteKind
from bridge.read.launch.recognition import launch_of
from bridge.read.launch.script import WORDS, name_of, parse, statements, text_of
from bridge.read.launch.signs import PRECISION_WORDS
from bridge.read.launch.sourced_file import file_named, maybe_text, text_named
from bridge.read.launch.word import DEFAULT, UNKNOWN, Word

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tree_sitter import Node

    from bridge.read.launch.launches import Launch

MAX_DEPTH = 12
"""Of functions, strings and sourced files within each other."""
COMMANDS = frozenset(
    {
        "command",
        "variable_assignment",
        "variable_assignments",
        "declaration_command",
        "unset_command",
    }
)
BEFORE_A_COMMAND = frozenset({"time", "exec", "command", "builtin"})
"""Words in front of a command of this shell."""
CHANGE_NO_FILE = frozenset({"cat", "echo", "ls", "head", "mkdir", "jq"})
"""Commands that change no file which they name."""


class Reader(Loops):
    """A script that is read to its end when the reader is made."""

    def __init__(
        self,
        root: Node,
        path: str,
        stated: Mapping[str, str],
        answers: Mapping[str, bool],
        *,
        is_lenient: bool = False,
    ) -> None:
        super().__init__(stated, answers, is_lenient=is_lenient)
        self.path = path
        self.scripts = [root]
        """The script, and the strings and files in it that are scripts."""
        self.sourced: list[str] = []
        """Paths of the sourced files around the command."""
        self.executed: set[int] = set()
        """Nodes of the commands that were read."""
        self.depth = 0
        """Functions, strings and sourced files around the command."""
        self.readers["redirected_statement"] = self._redirected
        self.readers |= dict.fromkeys(COMMANDS, self._command)
        self.run(statements(root))

    # -- commands ----------------------------------------------------------------------------------

    def _command(self, node: Node, behind: Sequence[Node] = ()) -> None:
        """Read a command.

        Args:
            node: The command.
            behind: Words of it that stand behind a redirection.
        """
        self.executed.add(node.id)
        words = self.expanded(node) + self.words(behind)
        before = self.values.copy()
        exported = self.exported
        names = self.assign(node)
        self.has_failed = False
        if words and words[0] in DECLARERS:
            self.declare(words, names, before)
        elif words and names:  # `NAME=value command` sets it for the command only
            self.exported = {**exported, **names}
            self._simple(words, self.line_of(node))
            self.exported = exported
            self._take_back(names, before)
        elif words:
            self._simple(words, self.line_of(node))

    def _take_back(self, names: Iterable[str], before: Mapping[str, dict[int, str]]) -> None:
        """Give variables the values that they had before."""
        for name in names:
            self.values.pop(name, None)
        for name in names:
            if name in before:
                self.values[name] = before[name]

    def _simple(self, words: list[str], line: int) -> None:
        """Read a command whose words are known."""
        first = words[0]
        if first in ("exit", "return"):
            self.end = first
        elif first in ("break", "continue") and self.loops:
            self.end = first
            self.levels = 1
            if words[1:] and words[1].isdecimal():
                self.levels = int(words[1])
        elif first.startswith("-") and len(first) > 1:
            self.reading.stray += map(Word.of, words)
            if self.reading.launches:
                noun = f"line {line}, whose options belong to no command"
                self.reading.note(Note(noun, NoteKind.STRAY_OPTIONS))
        elif first in self.functions:
            self._call(self.functions[first], words[1:])
        elif first in ("source", "."):
            self._source(Word.of("".join(words[1:2])), line)
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

    # -- functions and scripts within the script --------------------------------------------------------

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
        self._read_script(text, line, Note(f"the string on line {line}"))
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
        self.leave_subshell(state)

    def _source(self, name: Word, line: int) -> None:
        """Read a file that is next to the file which sources it, or next to the script."""
        note = Note(str(name), NoteKind.SOURCED_FILE)
        for path in (*reversed(self.sourced), self.path):
            file = file_named(path, name)
            if file is not None:
                self.sourced.append(str(file))
                self._read_script(maybe_text(file), line, note)
                self.sourced.pop()
                return
        self.reading.note(note)

    def _read_script(self, text: str | None, line: int, note: Note) -> None:
        """Read a text that is a script; without a text, or where it is no bash, add the note."""
        root = None
        if text is not None:
            try:
                root = parse(text, self.path)
            except PayloadError:
                root = None
        if root is None:
            self.reading.note(note)
            return
        self.scripts.append(root)
        self._within(statements(root), line)

    # -- redirections ------------------------------------------------------------------------------

    def _redirected(self, node: Node) -> None:
        """Read a command with its redirections; name a here-document about precision."""
        inner, *outer_redirects = node.named_children
        redirects = outer_redirects.copy()
        for redirect in outer_redirects:
            redirects += redirect.children_by_field_name("redirect")
        if inner.type == "command" and self.answer(inner) is None:
            behind: list[Node] = []
            for redirect in redirects:
                words = [child for child in redirect.named_children if child.type in WORDS]
                behind += words[1:]  # the first is the file
            self._command(inner, behind)
        else:
            self.read(inner)
        for redirect in redirects:
            self.run(child for child in redirect.named_children if child.type == "pipeline")
        self._written(name_of(inner), redirects)
        is_followed = name_of(inner) == "cat" and len(redirects) == 1
        if name_of(inner) == "read":
            is_followed = self._read_heredoc(inner, redirects)
        if not is_followed and any(map(_bears_on_precision, redirects)):
            noun = f"heredoc on line {self.line_of(node)}"
            self.reading.note(Note(noun, NoteKind.HERE_DOCUMENT))

    def _heredoc(self, redirect: Node) -> str:
        """Return the text of a here-document."""
        text = text_of(_first_child(redirect, "heredoc_body"))
        if redirect.children[0].type == "<<-":
            text = re.sub(r"(?m)^\t+", "", text)
        start = text_of(_first_child(redirect, "heredoc_start"))
        if start.startswith(("'", '"', "\\")):
            return text
        return self.expanded_text(text, is_quoted=True)

    def _read_heredoc(self, command: Node, redirects: Sequence[Node]) -> bool:
        """Set the variable of `read -d '' NAME <<EOF` to the here-document; return whether it is such a command."""
        heredocs = [redirect for redirect in redirects if redirect.type == "heredoc_redirect"]
        variable = variable_read_whole(self.expanded(command))
        if variable is None or len(heredocs) != 1:
            return False
        self.set(variable, [self._heredoc(heredocs[0]).strip()])
        return True

    def _written(self, command: str, redirects: Sequence[Node]) -> None:
        """Note the text of a file that `cat` writes from a here-document.

        The text of a file that another command writes is unknown.
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
            self.reading.files.pop(name, None)
            if command == "cat" and len(targets) == len(heredocs) == 1:
                self.reading.files[name] = self._heredoc(heredocs[0])

    # -- launches ----------------------------------------------------------------------------------

    def _start(self, words: list[str], line: int) -> None:
        """Add the launch that a command is, or those of the script that it hands to a shell."""
        count = len(self.reading.launches)
        script = nested_script(words)
        if script is not None:
            environment: dict[str, Word] = {}
            if not script.is_elsewhere:
                environment = environment_of(words[: script.place], self.environment())
            self._in_shell(script.text, line, environment)
        launch = launch_of([Word.of(word) for word in words], line)
        if launch is None:
            self._forget_files(words)
        elif len(self.reading.launches) == count:
            self._add_launch(launch, words)

    def _forget_files(self, words: Sequence[str]) -> None:
        """Forget the text of the files that a command names, since it may change them."""
        if words[0] in CHANGE_NO_FILE:
            return
        for word in words[1:]:
            self.reading.files.pop(word, None)

    def _add_launch(self, launch: Launch, words: Sequence[str]) -> None:
        """Add a launch with its environment and the files that the script has written."""
        launch = replace(launch, files=dict(self.reading.files))
        if is_job(words):
            job = job_environment(words, lambda name: text_named(self.path, name))
            launch = replace(launch, environment=job.variables, unread_environment=job.unread)
        else:
            environment = environment_of(launch.runner, self.environment())
            launch = replace(launch, environment=environment)
        self.reading.launches.append(launch)


def _bears_on_precision(redirect: Node) -> bool:
    """Return whether the text of a here-document holds a word of precision."""
    for child in redirect.named_children:
        if child.type == "heredoc_body" and PRECISION_WORDS.search(text_of(child)):
            return True
    return False


def _first_child(node: Node, kind: str) -> Node | None:
    for child in node.children:
        if child.type == kind:
            return child
    return None
