"""`ScriptInterpreter`: a script, read once as bash would with only the stated variables set.

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
from bridge.read.launch.bash.environment import compute_environment
from bridge.read.launch.bash.shell import DECLARE_COMMANDS
from bridge.read.launch.ray_job import is_ray_job, read_ray_job_environment
from bridge.read.launch.loops import LoopInterpreter
from bridge.read.launch.nested_script import find_nested_script
from bridge.read.launch.notes import Note, NoteKind
from bridge.read.launch.recognition import find_launch
from bridge.read.launch.syntax_tree import (
    WORD_NODES,
    get_command_name,
    parse_script,
    list_statements,
    get_node_text,
)
from bridge.read.launch.command_line_rows import PRECISION_PATTERN
from bridge.read.launch.sourced_file import find_named_file, maybe_read_text, find_file_text
from bridge.read.launch.shell_word import DEFAULT_PATTERN, UNKNOWN_PATTERN, ShellWord

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tree_sitter import Node

    from bridge.read.launch.launch import Launch

MAX_NESTED_SCRIPTS = 12
"""Of functions, strings and sourced files within each other."""
COMMAND_NODES = frozenset(
    {
        "command",
        "variable_assignment",
        "variable_assignments",
        "declaration_command",
        "unset_command",
    }
)
PREFIX_COMMANDS = frozenset({"time", "exec", "command", "builtin"})
"""Words in front of a command of this shell."""
READ_ONLY_COMMANDS = frozenset({"cat", "echo", "ls", "head", "mkdir", "jq"})
"""Commands that change no file which they name."""


class ScriptInterpreter(LoopInterpreter):
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
        self.readers["redirected_statement"] = self._run_redirected
        self.readers |= dict.fromkeys(COMMAND_NODES, self._run_command)
        self.run(list_statements(root))

    # -- commands ----------------------------------------------------------------------------------

    def _run_command(self, node: Node, behind: Sequence[Node] = ()) -> None:
        """Read a command.

        Args:
            node: The command.
            behind: Words of it that stand behind a redirection.
        """
        self.executed.add(node.id)
        words = self.expand_command(node) + self.words(behind)
        before = self.values.copy()
        exported = self.exported
        names = self.assign(node)
        self.has_failed = False
        if words and words[0] in DECLARE_COMMANDS:
            self.declare(words, names, before)
        elif words and names:  # `NAME=value command` sets it for the command only
            self.exported = {**exported, **names}
            self._run_simple_command(words, self.line_of(node))
            self.exported = exported
            self._restore_variables(names, before)
        elif words:
            self._run_simple_command(words, self.line_of(node))

    def _restore_variables(
        self, names: Iterable[str], before: Mapping[str, dict[int, str]]
    ) -> None:
        """Give variables the values that they had before."""
        for name in names:
            self.values.pop(name, None)
        for name in names:
            if name in before:
                self.values[name] = before[name]

    def _run_simple_command(self, words: list[str], line: int) -> None:
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
            self.reading.stray_options += map(ShellWord.from_text, words)
            if self.reading.launches:
                noun = f"line {line}, whose options belong to no command"
                self.reading.note(Note(noun, NoteKind.STRAY_OPTIONS))
        elif first in self.functions:
            self._call_function(self.functions[first], words[1:])
        elif first in ("source", "."):
            self._run_sourced_file(ShellWord.from_text("".join(words[1:2])), line)
        elif first == "eval":
            self._run_string(" ".join(words[1:]), line)
        elif first in self.builtins:
            self.builtins[first](words)
        elif first in PREFIX_COMMANDS and words[1:]:
            self._run_prefixed_command(words, line)
        else:
            self._add_started(words, line)

    def _run_prefixed_command(self, words: list[str], line: int) -> None:
        """Read the command behind `exec`, `time` or `command`."""
        first, rest = words[0], words[1:]
        if first == "command" and rest[0] in ("-v", "-V"):
            return
        while rest and rest[0].startswith("-"):
            count = 2 if rest[0] == "-a" else 1
            rest = rest[count:]
        if rest:
            self._run_simple_command(rest, line)
            if first == "exec":
                self.end = "exit"

    # -- functions and scripts within the script --------------------------------------------------------

    def _call_function(self, function: Node, words: list[str]) -> None:
        """Read the commands of a function with its arguments."""
        outer = self.positional()
        for name in outer:
            self.values.pop(name)
        self.set_positional(words)
        self.frames.append({})
        loops = self.loops
        self.loops = 0
        self._run_nested(function.children_by_field_name("body"), self.line)
        self.loops = loops
        self.leave_function()
        for name in self.positional():
            self.values.pop(name)
        self.values |= outer

    def _run_nested(self, nodes: Iterable[Node], line: int) -> None:
        """Read commands of a function, a string or another file."""
        if self.depth >= MAX_NESTED_SCRIPTS:
            return
        before = self.line
        self.line = line
        self.depth += 1
        self.run(nodes)
        self.depth -= 1
        self.line = before
        self.end = self.end.removeprefix("return")

    def _run_string(self, text: str, line: int) -> None:
        """Read a string that is a script.

        A variable that nothing had set when the string was written is unknown unless it is
        exported.
        """
        names: set[str] = set()
        for pattern in (DEFAULT_PATTERN, UNKNOWN_PATTERN):
            for groups in pattern.findall(text):
                names.update(groups)
        hidden: dict[str, dict[int, str]] = {}
        unknown: dict[str, dict[int, str]] = {}
        for name in names & self.values.keys() - self.exported.keys():
            hidden[name] = self.values[name]
            unknown[name] = {0: f"${name}"}
            self.values[name] = unknown[name]
        self._run_script(text, line, Note(f"the string on line {line}"))
        for name, value in hidden.items():
            if self.values.get(name) is unknown[name]:
                self.values[name] = value

    def _run_in_new_shell(self, text: str, line: int, environment: Mapping[str, ShellWord]) -> None:
        """Read a string that another shell runs, with the variables of its environment alone."""
        state = self.state()
        shared = self.shared_functions
        functions = self.functions.items()
        self.values = {name: {0: str(value)} for name, value in environment.items()}
        self.exported = dict.fromkeys(environment)
        self.functions = {name: node for name, node in functions if name in shared}
        self.frames = []
        self._run_string(text, line)
        self.leave_subshell(state)

    def _run_sourced_file(self, name: ShellWord, line: int) -> None:
        """Read a file that is next to the file which sources it, or next to the script."""
        note = Note(str(name), NoteKind.SOURCED_FILE)
        for path in (*reversed(self.sourced), self.path):
            file = find_named_file(path, name)
            if file is not None:
                self.sourced.append(str(file))
                self._run_script(maybe_read_text(file), line, note)
                self.sourced.pop()
                return
        self.reading.note(note)

    def _run_script(self, text: str | None, line: int, note: Note) -> None:
        """Read a text that is a script; without a text, or where it is no bash, add the note."""
        root = None
        if text is not None:
            try:
                root = parse_script(text, self.path)
            except PayloadError:
                root = None
        if root is None:
            self.reading.note(note)
            return
        self.scripts.append(root)
        self._run_nested(list_statements(root), line)

    # -- redirections ------------------------------------------------------------------------------

    def _run_redirected(self, node: Node) -> None:
        """Read a command with its redirections; name a here-document about precision."""
        inner, *outer_redirects = node.named_children
        redirects = outer_redirects.copy()
        for redirect in outer_redirects:
            redirects += redirect.children_by_field_name("redirect")
        if inner.type == "command" and self.answer(inner) is None:
            behind: list[Node] = []
            for redirect in redirects:
                words = [child for child in redirect.named_children if child.type in WORD_NODES]
                behind += words[1:]  # the first is the file
            self._run_command(inner, behind)
        else:
            self.read(inner)
        for redirect in redirects:
            self.run(child for child in redirect.named_children if child.type == "pipeline")
        self._note_written_file(get_command_name(inner), redirects)
        is_followed = get_command_name(inner) == "cat" and len(redirects) == 1
        if get_command_name(inner) == "read":
            is_followed = self._read_heredoc(inner, redirects)
        if not is_followed and any(map(_has_precision_text, redirects)):
            noun = f"heredoc on line {self.line_of(node)}"
            self.reading.note(Note(noun, NoteKind.HERE_DOCUMENT))

    def _get_heredoc_text(self, redirect: Node) -> str:
        """Return the text of a here-document."""
        text = get_node_text(_find_child(redirect, "heredoc_body"))
        if redirect.children[0].type == "<<-":
            text = re.sub(r"(?m)^\t+", "", text)
        start = get_node_text(_find_child(redirect, "heredoc_start"))
        if start.startswith(("'", '"', "\\")):
            return text
        return self.expand_text(text, is_quoted=True)

    def _read_heredoc(self, command: Node, redirects: Sequence[Node]) -> bool:
        """Set the variable of `read -d '' NAME <<EOF` to the here-document; return whether it is such a command."""
        heredocs = [redirect for redirect in redirects if redirect.type == "heredoc_redirect"]
        variable = variable_read_whole(self.expand_command(command))
        if variable is None or len(heredocs) != 1:
            return False
        self.set(variable, [self._get_heredoc_text(heredocs[0]).strip()])
        return True

    def _note_written_file(self, command: str, redirects: Sequence[Node]) -> None:
        """Note the text of a file that `cat` writes from a here-document.

        The text of a file that another command writes is unknown.
        """
        targets: list[Node] = []
        for redirect in redirects:
            if redirect.type == "file_redirect":
                targets += redirect.named_children
        heredocs = [redirect for redirect in redirects if redirect.type == "heredoc_redirect"]
        for target in targets:
            if target.type not in WORD_NODES:
                continue
            name = self.text(target)
            self.reading.files.pop(name, None)
            if command == "cat" and len(targets) == len(heredocs) == 1:
                self.reading.files[name] = self._get_heredoc_text(heredocs[0])

    # -- launches ----------------------------------------------------------------------------------

    def _add_started(self, words: list[str], line: int) -> None:
        """Add the launch that a command is, or those of the script that it hands to a shell."""
        count = len(self.reading.launches)
        script = find_nested_script(words)
        if script is not None:
            environment: dict[str, ShellWord] = {}
            if not script.is_remote:
                environment = compute_environment(words[: script.place], self.environment())
            self._run_in_new_shell(script.text, line, environment)
        launch = find_launch([ShellWord.from_text(word) for word in words], line)
        if launch is None:
            self._forget_files(words)
        elif len(self.reading.launches) == count:
            self._add_launch(launch, words)

    def _forget_files(self, words: Sequence[str]) -> None:
        """Forget the text of the files that a command names, since it may change them."""
        if words[0] in READ_ONLY_COMMANDS:
            return
        for word in words[1:]:
            self.reading.files.pop(word, None)

    def _add_launch(self, launch: Launch, words: Sequence[str]) -> None:
        """Add a launch with its environment and the files that the script has written."""
        launch = replace(launch, files=dict(self.reading.files))
        if is_ray_job(words):
            job = read_ray_job_environment(words, lambda name: find_file_text(self.path, name))
            launch = replace(launch, environment=job.variables, unread_environment=job.unread)
        else:
            environment = compute_environment(launch.runner, self.environment())
            launch = replace(launch, environment=environment)
        self.reading.launches.append(launch)


def _has_precision_text(redirect: Node) -> bool:
    """Return whether the text of a here-document holds a word of precision."""
    for child in redirect.named_children:
        if child.type == "heredoc_body" and PRECISION_PATTERN.search(get_node_text(child)):
            return True
    return False


def _find_child(node: Node, kind: str) -> Node | None:
    for child in node.children:
        if child.type == kind:
            return child
    return None
