"""`ScriptInterpreter`: follows a script once, as bash would with only the stated variables set.

It is built in layers. Each class adds to the class before it:

    Variables           the values of variables                           bash/variables.py
    WordExpansion       words expanded                                    bash/expansion.py
    Shell               scopes, functions, environment, assignments       bash/shell.py
    Builtins            `unset`, `read`, `printf -v`, `set`, `shift`      bash/builtins.py
    CommandInterpreter  the order of commands                             commands.py
    BranchInterpreter   `if`, `case`, `&&`, `||`                          branches.py
    LoopInterpreter     `for`, `while`, `until`                           loops.py
    ScriptInterpreter   calls, nested scripts, redirections, launches     this file

    interpreter = ScriptInterpreter(parse_script(text, path), path, stated={}, forced_results={})
    interpreter.follow()
    interpreter.trace.launches
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from bridge.errors import PayloadError
from bridge.read.launch.bash.builtins import find_whole_read_variable
from bridge.read.launch.bash.environment import ProgramEnvironment, compute_environment
from bridge.read.launch.bash.shell import DECLARE_COMMANDS
from bridge.read.launch.bash.variables import VariableElements
from bridge.read.launch.command_line_rows import PRECISION_PATTERN
from bridge.read.launch.commands import End
from bridge.read.launch.launch_command import find_launch
from bridge.read.launch.loops import LoopInterpreter
from bridge.read.launch.nested_script import find_nested_script, find_started_script
from bridge.read.launch.notes import Note, NoteKind
from bridge.read.launch.ray_job import is_ray_job, read_ray_job_environment
from bridge.read.launch.shell_word import (
    DEFAULT_PATTERN,
    OPEN_PIECE_PATTERN,
    ShellWord,
    get_variable_name,
)
from bridge.read.launch.sourced_file import find_named_file, maybe_read_text
from bridge.read.launch.syntax_tree import (
    WORD_NODES,
    get_command_name,
    get_node_text,
    list_statements,
    parse_script,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tree_sitter import Node

    from bridge.read.launch.launch import Launch

DEFAULT_SEPARATORS = " \t\n"
"""The value of IFS that nothing sets."""
MAX_NESTED_SCRIPTS = 12
"""Functions, strings and sourced files within each other that are followed."""
COMMAND_NODES = frozenset(
    {
        "command",
        "variable_assignment",
        "variable_assignments",
        "declaration_command",
        "unset_command",
    }
)
"""Kinds of nodes that are commands."""
PREFIX_COMMANDS = frozenset({"time", "exec", "command", "builtin"})
"""Words in front of a command that this shell runs."""
READ_ONLY_COMMANDS = frozenset({"cat", "echo", "ls", "head", "mkdir", "jq"})
"""Commands that do not change the files that they name."""


class ScriptInterpreter(LoopInterpreter):
    """A script with the state of the shell that follows it.

    Args:
        root: The syntax tree of the script.
        path: Its path; the files that it sources are looked for from its folder.
        stated: Variables that its environment sets.
        forced_results: Condition as it is written -> whether it holds, for open conditions.
        is_lenient: Whether a branch that ends the script before any launch is skipped.
    """

    def __init__(
        self,
        root: Node,
        path: str,
        stated: Mapping[str, str],
        forced_results: Mapping[str, bool],
        *,
        is_lenient: bool = False,
    ) -> None:
        super().__init__(stated, forced_results, is_lenient=is_lenient)
        self.path = path
        self.scripts = [root]
        """The trees of the script, and of the strings and sourced files that it runs."""
        self.sourced: list[str] = []
        """Paths of the sourced files around the command, the outermost one first."""
        self.executed: set[int] = set()
        """Ids of the nodes of the commands that were followed."""
        self.depth = 0
        """Number of functions, strings and sourced files around the command."""
        self.handlers["redirected_statement"] = self._run_redirected
        self.handlers |= dict.fromkeys(COMMAND_NODES, self._run_command)

    def follow(self) -> None:
        """Follow the script to its end."""
        self.run_nodes(list_statements(self.scripts[0]))

    # -- commands ----------------------------------------------------------------------------------

    def _run_command(self, node: Node, words_after_redirect: Sequence[Node] = ()) -> None:
        """Follow a command.

        Args:
            node: The command.
            words_after_redirect: Words of the command after a redirection.
        """
        self.executed.add(node.id)
        words = self.expand_command(node) + self.expand_node_words(words_after_redirect)
        before = self.values.copy()
        exported = self.exported
        assigned = self.assign(node)
        self.has_failed = False
        if words and words[0] in DECLARE_COMMANDS:
            self.declare(words, assigned, before)
        elif words and assigned:  # `NAME=value command` sets it for the command only
            self.exported = {**exported, **assigned}
            self._run_simple_command(words, self.get_line(node))
            self._read_herestring(node, words)
            self.exported = exported
            self._restore_variables(assigned, before)
        elif words:
            self._run_simple_command(words, self.get_line(node))
            self._read_herestring(node, words)

    def _read_herestring(self, command: Node, words: list[str]) -> None:
        """Set the variables of `IFS=, read A B <<< "$TEXT"`, if the text and IFS are known."""
        string = _find_child(command, "herestring_redirect")
        if words[0] != "read" or string is None or not string.named_children:
            return
        text = ShellWord.from_text(self.expand_node_text(string.named_children[-1]))
        separators = "".join(self.get_elements("IFS"))
        if not separators or get_variable_name(separators):  # unset, or `IFS=$OLD_IFS`
            separators = DEFAULT_SEPARATORS
        is_plain = separators.isspace() or len(separators) == 1
        if is_plain and not text.is_open and "\n" not in text:
            self.read_text(words, str(text), separators)

    def _restore_variables(
        self, names: Iterable[str], before: Mapping[str, VariableElements]
    ) -> None:
        """Give variables the values that they had before, or none."""
        for name in names:
            self.values.pop(name, None)
            if name in before:
                self.values[name] = before[name]

    def _run_simple_command(self, words: list[str], line: int) -> None:
        """Follow a command.

        Args:
            words: Its words, expanded.
            line: Its line in the script.
        """
        name = words[0]
        if name in ("exit", "return"):
            self.end = End(name)
        elif name in ("break", "continue") and self.loop_depth:
            self._leave_loops(words)
        elif name.startswith("-") and len(name) > 1:
            self._add_stray_options(words, line)
        elif name in self.functions:
            self._call_function(self.functions[name], words[1:])
        elif name in ("source", "."):
            self._run_sourced_file(ShellWord.from_text("".join(words[1:2])), line)
        elif name == "eval":
            self._run_string(" ".join(words[1:]), line)
        elif name in self.builtins:
            self.builtins[name](words)
        elif name in PREFIX_COMMANDS and words[1:]:
            self._run_prefixed_command(words, line)
        else:
            self._run_program(words, line)

    def _leave_loops(self, words: Sequence[str]) -> None:
        """Follow `break [N]` or `continue [N]`."""
        self.end = End(words[0])
        self.levels = 1
        if words[1:] and words[1].isdecimal():
            self.levels = int(words[1])

    def _add_stray_options(self, words: Sequence[str], line: int) -> None:
        """Note a line that begins with an option: no command takes its words."""
        self.trace.stray_options += map(ShellWord.from_text, words)
        if self.trace.launches:
            noun = f"line {line}, whose options belong to no command"
            self.trace.note(Note(noun, NoteKind.STRAY_OPTIONS))

    def _run_prefixed_command(self, words: list[str], line: int) -> None:
        """Follow the command after `exec`, `time`, `command` or `builtin`."""
        prefix, remaining = words[0], words[1:]
        if prefix == "command" and remaining[0] in ("-v", "-V"):
            return  # it only asks whether a command exists
        while remaining and remaining[0].startswith("-"):
            remaining = remaining[1:]
        if remaining:
            self._run_simple_command(remaining, line)
            if prefix == "exec":
                self.end = End.EXIT

    # -- functions and scripts within the script --------------------------------------------------------

    def _call_function(self, function: Node, words: list[str]) -> None:
        """Follow the commands of a function with its arguments."""
        outer_parameters = self.get_positional()
        for name in outer_parameters:
            self.values.pop(name)
        self.set_positional(words)
        self.frames.append({})
        loop_depth = self.loop_depth
        self.loop_depth = 0  # `break` in a function ends no loop of its caller
        self._run_nested(function.children_by_field_name("body"), self.line)
        self.loop_depth = loop_depth
        self.leave_function()
        for name in self.get_positional():
            self.values.pop(name)
        self.values |= outer_parameters

    def _run_nested(self, nodes: Iterable[Node], line: int) -> None:
        """Follow the commands of a function, a string or another file.

        Args:
            nodes: The commands.
            line: The line of the script that counts for them; 0: their own lines.
        """
        if self.depth >= MAX_NESTED_SCRIPTS:
            return
        outer_line = self.line
        self.line = line
        self.depth += 1
        self.run_nodes(nodes)
        self.depth -= 1
        self.line = outer_line
        if self.end is End.RETURN:
            self.end = None

    def _run_string(self, text: str, line: int) -> None:
        """Follow a string that is a script.

        The string is already expanded. A variable that is still in it had no value at that point,
        so a value that it got later is hidden. An exported variable keeps its value: another shell
        expands the string then, and has it.
        """
        names: set[str] = set()
        for pattern in (DEFAULT_PATTERN, OPEN_PIECE_PATTERN):
            for groups in pattern.findall(text):
                names.update(groups)
        hidden: dict[str, VariableElements] = {}
        opened: dict[str, VariableElements] = {}
        for name in names & self.values.keys() - self.exported.keys():
            hidden[name] = self.values[name]
            opened[name] = {0: f"${name}"}
            self.values[name] = opened[name]
        self._run_script(text, line, Note(f"the string on line {line}"))
        for name, value in hidden.items():
            if self.values.get(name) is opened[name]:  # the string has not set it
                self.values[name] = value

    def _run_in_new_shell(self, text: str, line: int, environment: Mapping[str, ShellWord]) -> None:
        """Follow a string that another shell runs, with only the variables of its environment."""
        state = self.copy_state()
        self.values = {name: {0: str(value)} for name, value in environment.items()}
        self.exported = dict.fromkeys(environment)
        self.functions = {}
        self.frames = []
        self._run_string(text, line)
        self.leave_subshell(state)

    def _run_sourced_file(self, name: ShellWord, line: int) -> None:
        """Follow a file that is next to the file which sources it, or next to the script.

        A file that is not there is noted: it may set any variable.
        """
        note = Note(str(name), NoteKind.SOURCED_FILE)
        for path in (*reversed(self.sourced), self.path):
            file = find_named_file(path, name)
            if file is not None:
                self.sourced.append(str(file))
                self._run_script(maybe_read_text(file), line, note)
                self.sourced.pop()
                return
        self.trace.note(note)

    def _run_script(self, text: str | None, line: int, note: Note) -> None:
        """Follow a text that is a script; add the note if there is no text, or if it is no bash."""
        root = None
        if text is not None:
            try:
                root = parse_script(text, self.path)
            except PayloadError:
                root = None
        if root is None:
            self.trace.note(note)
            return
        self.scripts.append(root)
        self._run_nested(list_statements(root), line)

    # -- redirections ------------------------------------------------------------------------------

    def _run_redirected(self, node: Node) -> None:
        """Follow a command with its redirections, and note a here-document about precision."""
        inner, *outer_redirects = node.named_children
        redirects = outer_redirects.copy()
        for redirect in outer_redirects:
            redirects += redirect.children_by_field_name("redirect")
        if inner.type == "command" and self.evaluate(inner) is None:
            # In `command > file word` the grammar counts `word` to the redirection.
            words_after: list[Node] = []
            for redirect in redirects:
                words = [child for child in redirect.named_children if child.type in WORD_NODES]
                words_after += words[1:]  # the first word is the file
            self._run_command(inner, words_after)
        else:
            self.run_node(inner)
        for redirect in redirects:
            self.run_nodes(child for child in redirect.named_children if child.type == "pipeline")
        self._record_written_file(get_command_name(inner), redirects)
        is_followed = get_command_name(inner) == "cat" and len(redirects) == 1
        if get_command_name(inner) == "read":
            is_followed = self._read_heredoc(inner, redirects)
        if not is_followed and any(map(_has_precision_text, redirects)):
            noun = f"heredoc on line {self.get_line(node)}"
            self.trace.note(Note(noun, NoteKind.HERE_DOCUMENT))

    def _get_heredoc_text(self, redirect: Node) -> str:
        """Return the text of a here-document, expanded unless its end word is quoted."""
        text = get_node_text(_find_child(redirect, "heredoc_body"))
        if redirect.children[0].type == "<<-":  # it removes the tabs at the beginning of lines
            text = re.sub(r"(?m)^\t+", "", text)
        end_word = get_node_text(_find_child(redirect, "heredoc_start"))
        if end_word.startswith(("'", '"', "\\")):
            return text
        return self.expand_text(text, is_quoted=True)

    def _read_heredoc(self, command: Node, redirects: Sequence[Node]) -> bool:
        """Set the variable of `read -d '' NAME <<EOF` to the here-document.

        Returns:
            Whether the command is such a `read`.
        """
        heredocs = [redirect for redirect in redirects if redirect.type == "heredoc_redirect"]
        variable = find_whole_read_variable(self.expand_command(command))
        if variable is None or len(heredocs) != 1:
            return False
        self.set_text(variable, self._get_heredoc_text(heredocs[0]).strip())
        return True

    def _record_written_file(self, command: str, redirects: Sequence[Node]) -> None:
        """Record the text of a file that `cat` writes from a here-document.

        A file that another command writes is removed from the record: its text is unknown.
        """
        targets: list[Node] = []
        for redirect in redirects:
            if redirect.type == "file_redirect":
                targets += redirect.named_children
        heredocs = [redirect for redirect in redirects if redirect.type == "heredoc_redirect"]
        for target in targets:
            if target.type not in WORD_NODES:
                continue
            name = self.expand_node_text(target)
            self.trace.files.pop(name, None)
            if command == "cat" and len(targets) == len(heredocs) == 1:
                self.trace.files[name] = self._get_heredoc_text(heredocs[0])

    # -- launches ----------------------------------------------------------------------------------

    def _run_program(self, words: list[str], line: int) -> None:
        """Follow a command that is no part of bash: add its launch, or those of its nested script."""
        launch_count = len(self.trace.launches)
        script = find_nested_script(words)
        if script is not None:
            environment = ProgramEnvironment({})
            if not script.is_remote:
                environment = compute_environment(
                    words[: script.shell_index], self.get_environment()
                )
            if environment.unread:
                self.trace.note(Note(environment.unread))
            self._run_in_new_shell(script.text, line, environment.variables)
        launch = find_launch([ShellWord.from_text(word) for word in words], line)
        if launch is None:
            self._forget_files(words)
            started = find_started_script(words)
            if started is not None:
                self.trace.started_scripts[started] = None
        elif len(self.trace.launches) == launch_count:
            self._add_launch(launch, words)

    def _forget_files(self, words: Sequence[str]) -> None:
        """Remove the files that a command names from the record, since it may change them."""
        if words[0] in READ_ONLY_COMMANDS:
            return
        for word in words[1:]:
            self.trace.files.pop(word, None)

    def _add_launch(self, launch: Launch, words: Sequence[str]) -> None:
        """Add a launch with its environment and the files that the script has written."""
        launch = replace(launch, files=dict(self.trace.files))
        if is_ray_job(words):
            environment = read_ray_job_environment(words)
        else:
            environment = compute_environment(launch.runner, self.get_environment())
        launch = replace(
            launch, environment=environment.variables, unread_environment=environment.unread
        )
        self.trace.launches.append(launch)


def _has_precision_text(redirect: Node) -> bool:
    """Return whether the text of a here-document has a word about precision."""
    for child in redirect.named_children:
        if child.type == "heredoc_body" and PRECISION_PATTERN.search(get_node_text(child)):
            return True
    return False


def _find_child(node: Node, kind: str) -> Node | None:
    """Return the first child of a kind; None if there is none."""
    for child in node.children:
        if child.type == kind:
            return child
    return None
