"""`LauncherProgram`: a Python launcher, followed by its syntax from its start to the runs that it starts.

    program = LauncherProgram(Path("run_qwen3.py"), variables={})
    program.run()
    program.starts      # the arguments of each call of `execute_train`

No program is imported or run. The launcher is followed once, with what it states if nothing overrides
it: defaults of options, and of variables of the environment. A condition that rests on such a default,
or that only the run knows, is noted in `conditions`. Functions and constants of modules in the clone
of the launcher are followed too.
"""

from __future__ import annotations

import ast
import base64
import json
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bridge.read.framework.launcher.expressions import (
    BUILTINS,
    FAULTS,
    MAX_ITEMS,
    TEXT_METHODS,
    ExpressionReader,
)
from bridge.read.framework.launcher.syntax import (
    find_module_file,
    format_expression,
    make_pattern_test,
    make_read_expression,
    parse_file,
)
from bridge.read.framework.launcher.values import (
    Call,
    Class,
    Frame,
    Function,
    Imported,
    Instance,
    Module,
    PathEndError,
    Start,
    UnknownValueError,
    Value,
    get_plain,
    make_open_value,
    wrap,
)

TRAIN_FUNCTION = ".command_utils.execute_train"
"""End of the import path of the function that starts a run."""
TEXT_FILE_FUNCTION = ".command_utils.encode_pseudo_file"
"""End of the import path of the function that makes a text a value in the place of a file."""
TRAIN_PARAMETERS = ("train_args", "num_gpus_per_node", "megatron_model_type", "train_script")
TEMPORARY_FILE = "${tempfile}/file"
"""The path of a temporary file, which stands for the file too."""
MAX_DEPTH = 24
"""Functions inside one another that are followed."""
MAX_STATEMENTS = 20_000
"""Statements that are followed."""


class _ReturnedError(Exception):
    """The end of a function."""

    def __init__(self, value: Value) -> None:
        super().__init__()
        self.value = value


class _JumpedError(Exception):
    """A `break` or `continue`."""


class LauncherProgram(ExpressionReader):
    """A launcher while it is followed.

    Args:
        path: The launcher, or another program with a function that is followed.
        variables: As in `ExpressionReader`.
        forced: As in `ExpressionReader`.
        prefix: Beginning of the variables that set options of the command line.
        files: Import path -> the file of the module, or None for a module without one. Programs that
            follow the same launcher may share the mapping, which is filled while they are followed.
        skipped: Names of functions that are commands of the launcher and are not followed.
    """

    def __init__(
        self,
        path: Path,
        variables: Mapping[str, str],
        forced: Iterable[str] = (),
        prefix: str = "",
        *,
        files: dict[str, Path | None] | None = None,
        skipped: Collection[str] = (),
    ) -> None:
        super().__init__(variables, forced)
        self.path = path
        self.prefix = prefix
        self.skipped = skipped
        self.commands: dict[str, Function] = {}
        """Name of a function that is a command of the launcher -> the function."""
        self.starts: list[Start] = []
        self._modules: dict[str, Frame] = {}
        self._files: dict[str, Path | None] = {} if files is None else files
        self._line = 0
        """The line of the launcher that is followed."""
        self._depth = 0
        self._statement_count = 0
        self.main = Frame(Module("", str(path)))

    def run(self) -> None:
        """Follow the launcher.

        Raises:
            PathEndError: It ends with an error.
        """
        self.main.names |= {"__name__": Value("__main__"), "__file__": Value(str(self.path))}
        with suppress(_ReturnedError, _JumpedError):
            self._follow(parse_file(self.path).body, self.main)

    def load_functions(self) -> Frame:
        """Return the names of the program, which starts nothing."""
        self.main.names |= {"__name__": Value("module"), "__file__": Value(str(self.path))}
        self._follow(parse_file(self.path).body, self.main)
        return self.main

    # -- modules -----------------------------------------------------------------------------------

    def load_name(self, path: str) -> Value:
        """Return what an import path names: a module of the clone, a name in one, or its path alone."""
        if path.endswith((TRAIN_FUNCTION, TEXT_FILE_FUNCTION)):
            return Value(Imported(path))
        module, _, name = path.rpartition(".")
        file = self._find_module(path)
        if file is not None:
            return Value(Module(path, str(file)))
        file = self._find_module(module)
        if file is not None:
            value = self.load_module(Module(module, str(file))).names.get(name)
            if value is not None and isinstance(value.content, Imported):
                return self.load_name(value.content.path)
            if value is not None:
                return value
        return Value(Imported(path))

    def _find_module(self, path: str) -> Path | None:
        """Return the file of a module in the clone of the launcher; None for any other module."""
        if path not in self._files:
            self._files[path] = find_module_file(self.path, path)
        return self._files[path]

    def load_module(self, module: Module) -> Frame:
        """Return the names of a module, whose statements are followed once."""
        if module.path not in self._modules:
            frame = Frame(module, {"__name__": Value(module.name), "__file__": Value(module.path)})
            self._modules[module.path] = frame
            with suppress(PathEndError):
                self._follow(parse_file(Path(module.path)).body, frame)
        return self._modules[module.path]

    # -- statements --------------------------------------------------------------------------------

    def _follow(self, statements: Sequence[ast.stmt], frame: Frame) -> None:
        for node in statements:
            self._statement_count += 1
            if self._statement_count > MAX_STATEMENTS:
                raise PathEndError("the launcher has too many statements to be followed")
            if frame.module is self.main.module:
                self._line = node.lineno
            self._follow_statement(node, frame)

    def _follow_statement(self, node: ast.stmt, frame: Frame) -> None:  # noqa: PLR0912  a case for each form
        """Follow a statement. After one that has no case, the names that it sets are not known."""
        match node:
            case ast.Assign(targets=targets, value=expression):
                value = self.value(expression, frame)
                for target in targets:
                    self.assign(target, value, frame)
            case ast.AnnAssign(target=target, value=ast.expr() as expression):
                self.assign(target, self.value(expression, frame), frame)
            case ast.AugAssign(target=target, op=kind, value=expression):
                operation = ast.copy_location(
                    ast.BinOp(make_read_expression(target), kind, expression), node
                )
                self.assign(target, self.value(operation, frame), frame)
            case ast.Expr(value=expression):
                self.value(expression, frame)
            case ast.If():
                self._follow_if(node, frame)
            case ast.Match():
                self._follow_match(node, frame)
            case ast.For():
                self._follow_loop(node, frame)
            case ast.With(items=items, body=body):
                for item in items:
                    if item.optional_vars is not None:
                        value = self.value(item.context_expr, frame)
                        self.assign(item.optional_vars, value, frame)
                self._follow(body, frame)
            case ast.Try():
                self._follow_try(node, frame)
            case ast.Return(value=expression):
                raise _ReturnedError(
                    Value() if expression is None else self.value(expression, frame)
                )
            case ast.Assert(test=test) if self._fails(test, frame):
                fault = f"the assertion `{format_expression(test)}` fails"
                raise _make_error(node, frame, fault, self.value(test, frame).names)
            case ast.Raise():
                raise _make_error(node, frame, "an error is raised")
            case ast.Break() | ast.Continue():
                raise _JumpedError
            case ast.FunctionDef(name=name):
                frame.names[name] = Value(Function(node, frame))
            case ast.ClassDef(name=name):
                frame.names[name] = Value(Class(node, frame))
            case ast.Import() | ast.ImportFrom():
                self._follow_import(node, frame)
            case ast.While() | ast.Delete() | ast.Nonlocal() | ast.Global() | ast.AsyncFor():
                self._forget_names(node, frame)

    def _fails(self, test: ast.expr, frame: Frame) -> bool:
        """Return whether an assertion is known to fail. A run sets a variable that has no default."""
        answer = self.value(test, frame)
        is_unset = answer.content is None and bool(answer.names)
        holds = self.holds(test, frame, is_assertion=True)
        return not (holds or answer.late_name or is_unset)

    def _follow_if(self, node: ast.If, frame: Frame) -> None:
        """Follow the branch of a condition that is taken.

        If it raises an error, and only the run knows the condition, the other branch is followed. A
        variable that has no default is set by a run.
        """
        branches = [node.orelse, node.body]
        if self.holds(node.test, frame):
            branches.reverse()
        start_count = len(self.starts)
        try:
            self._follow(branches[0], frame)
        except PathEndError:
            answer = self.value(node.test, frame)
            is_unset = bool(answer.names) and all(self.defaults[n] is None for n in answer.names)
            if not (answer.late_name or is_unset) or len(self.starts) > start_count:
                raise
            self._follow(branches[1], frame)

    def _follow_try(self, node: ast.Try, frame: Frame) -> None:
        """Follow a `try` statement: its body, and the first handler if the body raises an error."""
        try:
            self._follow([*node.body, *node.orelse], frame)
        except PathEndError:
            if not node.handlers:
                raise
            self._follow(node.handlers[0].body, frame)
        self._follow(node.finalbody, frame)

    def _follow_import(self, node: ast.Import | ast.ImportFrom, frame: Frame) -> None:
        package = frame.module.name.split(".")
        if Path(frame.module.path).name != "__init__.py":
            package.pop()
        for alias in node.names:
            if isinstance(node, ast.Import):
                path = alias.name if alias.asname else alias.name.partition(".")[0]
                name = alias.asname or path
            else:
                name = alias.asname or alias.name
                parents = package[: len(package) - node.level + 1] if node.level else []
                path = ".".join(filter(None, [*parents, node.module, alias.name]))
            frame.names[name] = Value(Imported(path))

    def _forget_names(self, node: ast.AST, frame: Frame) -> None:
        """Make the names that a statement may set values that only the run knows."""
        names = set(getattr(node, "names", ()))
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store | ast.Del):
                names.add(inner.id)
        holder: Frame | None = frame
        for name in names:
            frame.names[name] = make_open_value(name)
            while holder is not None:
                if name in holder.names:
                    holder.names[name] = make_open_value(name)
                holder = holder.outer

    def _follow_loop(self, node: ast.For, frame: Frame) -> None:
        """Follow a loop over known items. The names that another loop sets are not known."""
        try:
            items = self.list_items(self.value(node.iter, frame))
        except FAULTS:
            self._forget_names(node, frame)
            return
        for item in items:
            self.assign(node.target, item, frame)
            try:
                self._follow(node.body, frame)
            except _JumpedError:
                if any(isinstance(inner, ast.Break) for inner in ast.walk(node)):
                    self._forget_names(node, frame)
                    return

    def _follow_match(self, node: ast.Match, frame: Frame) -> None:
        """Follow the first case that fits."""
        for case in node.cases:
            test = make_pattern_test(node.subject, case.pattern)
            if test is None:
                self._forget_names(node, frame)
                return
            if self.holds(ast.copy_location(test, node.subject), frame):
                self._follow(case.body, frame)
                return

    def assign(self, target: ast.expr, value: Value, frame: Frame) -> None:
        """Assign a value to a name, a field, an item, or several of them."""
        match target:
            case ast.Name(id=name):
                frame.names[name] = value
            case ast.Attribute(value=holder, attr=name):
                instance = self.value(holder, frame).content
                if isinstance(instance, Instance):
                    instance.fields[name] = value
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                items = [make_open_value(element) for element in targets]
                with suppress(*FAULTS):
                    items = self.list_items(value)
                for element, item in zip(targets, items, strict=False):
                    self.assign(element, item, frame)
            case ast.Subscript(value=holder, slice=index):
                if format_expression(holder) == "os.environ":
                    with suppress(*FAULTS):
                        self.variables[self.plain(index, frame, set())] = str(
                            get_plain(value, set())
                        )
                    return
                mapping = self.value(holder, frame).content
                key = self.value(index, frame)
                if isinstance(mapping, dict) and isinstance(key.content, str | int):
                    mapping[key.content] = value
                elif isinstance(holder, ast.Name):
                    frame.names[holder.id] = make_open_value(holder)

    # -- calls -------------------------------------------------------------------------------------

    def call(self, node: ast.Call, frame: Frame) -> Value:
        """Return the value that a call returns.

        Raises:
            UnknownValueError: The function has no source, and is none that is computed here.
        """
        if (
            isinstance(node.func, ast.Attribute)
            and format_expression(node.func) != "os.environ.get"
        ):
            holder = self.value(node.func.value, frame)
            if isinstance(holder.content, str | list | dict | re.Match):
                return self._call_method(holder, node.func, node, frame)
        is_name = isinstance(node.func, ast.Name) and frame.find(node.func.id) is None
        names = (*BUILTINS, "range", "getattr")
        if isinstance(node.func, ast.Name) and is_name and node.func.id in names:
            return self._call_builtin(node.func.id, node, frame)
        function = self.value(node.func, frame)
        arguments = [self.value(argument, frame) for argument in node.args]
        options: dict[str, Value] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value, frame)
            if keyword.arg is not None:
                options[keyword.arg] = value
            elif isinstance(value.content, dict):
                options |= value.content
        match function.content:
            case Function() as content:
                return self.follow_function(content, arguments, options)
            case Class() as kind:
                return self._make_instance(kind, arguments, options)
            case Imported(path=path):
                with suppress(UnknownValueError):
                    return self.call_imported(path, node, Call(arguments, options), frame)
        for argument in node.args:
            if isinstance(argument, ast.Name):
                changeable = self.value(argument, frame)
                if isinstance(changeable.content, list | dict):  # an unknown function may change it
                    frame.names[argument.id] = make_open_value(argument)
        raise UnknownValueError(format_expression(node.func))

    def call_imported(self, path: str, node: ast.Call, call: Call, frame: Frame) -> Value:
        """Return the value of a call of a function without source.

        Args:
            path: The import path of the function.
            call: Its arguments.
            frame: The names that it sees.

        Raises:
            UnknownValueError: The function is not computed here.
        """
        arguments, options = call.arguments, call.options
        match path:
            case "os.environ.get" | "os.getenv":
                default = arguments[1] if len(arguments) > 1 else options.get("default", Value())
                return self.read_variable(str(get_plain(arguments[0], set())), default)
            case "shlex.quote" if arguments[0].late_name:
                # A quoted text is one word, so its name must not look like that of arguments.
                return make_open_value(arguments[0].late_name.replace("args", "value"))
            case "shlex.quote":
                return Value(shlex.quote(arguments[0].text))
            case "json.dumps":
                names: set[str] = set()
                return Value(json.dumps(get_plain(arguments[0], names)), frozenset(names))
            case "typer.run":
                return self._follow_command(arguments[0])
            case "typer.Typer":
                return Value(Imported("typer.app"))
            case "typer.app":
                self._follow_commands(node.func, frame)
                return Value()
        if path == "os.path.join":
            return Value("/".join(argument.text for argument in arguments))
        if path == "re.search":
            return _search(arguments)
        if path.startswith("tempfile."):
            return Value(TEMPORARY_FILE)
        if path.endswith(TEXT_FILE_FUNCTION):
            names = set()
            text = str(get_plain(arguments[0], names)).encode()
            return Value(f"base64:{base64.b64encode(text).decode()}", frozenset(names))
        if path.endswith(TRAIN_FUNCTION):
            named = {**dict(zip(TRAIN_PARAMETERS, arguments, strict=False)), **options}
            self.starts.append(Start(self._line, path.partition(".")[0], named))
            return Value()
        raise UnknownValueError(path)

    def _get_attribute_or_default(self, node: ast.Call, frame: Frame) -> Value:
        """Return the value of `getattr(holder, "name", default)` of an instance of a known class.

        Raises:
            UnknownValueError: The holder, or the name, is not known.
        """
        holder = self.value(node.args[0], frame)
        name = str(self.plain(node.args[1], frame, set()))
        if not isinstance(holder.content, Instance):
            raise UnknownValueError(name)
        members = self._list_members(holder.content.kind)
        if name in holder.content.fields:
            return holder.content.fields[name]
        if name in members:
            return self.find_member(holder.content.kind, name, holder)
        return self.value(node.args[2], frame)

    def _call_builtin(self, name: str, node: ast.Call, frame: Frame) -> Value:
        """Return the value of a builtin function of known values."""
        if name == "getattr":
            return self._get_attribute_or_default(node, frame)
        names: set[str] = set()
        arguments = [self.plain(argument, frame, names) for argument in node.args]
        if name == "range" and len(range(*arguments)) <= MAX_ITEMS:
            return wrap(list(range(*arguments)), names)
        if node.keywords:
            raise UnknownValueError(name)
        return wrap(BUILTINS[name](*arguments), names)

    def _call_method(
        self, holder: Value, method: ast.Attribute, node: ast.Call, frame: Frame
    ) -> Value:
        """Return the value of a method of a text, a list, a mapping or a match.

        Args:
            holder: The text, list, mapping or match.
            frame: The names that it sees.
        """
        name = method.attr
        content = holder.content
        arguments = [self.value(argument, frame) for argument in node.args]
        match content, name, arguments:
            case str(), "join", [items]:
                texts = [item.text for item in self.list_items(items)]
                return Value(content.join(texts))
            case re.Match(), "group", [number]:
                return wrap(content.group(int(str(get_plain(number, set())))), holder.names)
            case str(), "strip" | "lstrip" | "rstrip", []:
                return Value(getattr(content, name)(), holder.names)
            case list(), "append", [item]:
                content.append(item)
                return Value()
            case list(), "extend", [items]:
                content.extend(self.list_items(items))
                return Value()
            case dict(), "update", [Value(content=dict() as other)]:
                content.update(other)
                return Value()
            case dict(), "get", [key, *rest]:
                default = rest[0] if rest else Value()
                found: Value = content.get(get_plain(key, set()), default)
                return found
            case dict(), "items", []:
                return Value([Value((Value(key), value)) for key, value in content.items()])
            case dict(), "values", []:
                return Value(list(content.values()))
        if not isinstance(content, str) or name not in TEXT_METHODS or node.keywords:
            if isinstance(method.value, ast.Name) and not isinstance(content, str):
                frame.names[method.value.id] = make_open_value(method.value)
            raise UnknownValueError(name)
        names: set[str] = set()
        text: Any = get_plain(holder, names)
        plain = [get_plain(argument, names) for argument in arguments]
        if sum(len(str(word)) for word in (text, *plain)) > MAX_ITEMS:
            raise UnknownValueError("a long text")
        return wrap(getattr(text, name)(*plain), names)

    def follow_function(
        self, function: Function, arguments: Sequence[Value], options: Mapping[str, Value]
    ) -> Value:
        """Return the value that a function with source returns."""
        if self._depth >= MAX_DEPTH:
            raise UnknownValueError("a function that is too deep")
        node = function.node
        frame = Frame(function.frame.module, outer=function.frame)
        if function.holder is not None:
            arguments = [function.holder, *arguments]
        self._bind(node.args, arguments, options, frame)
        if isinstance(node, ast.Lambda):
            return self.value(node.body, frame)
        line = self._line
        self._depth += 1
        try:
            self._follow(node.body, frame)
        except _ReturnedError as returned:
            return returned.value
        finally:
            self._depth -= 1
            self._line = line
        return Value()

    def _bind(
        self,
        signature: ast.arguments,
        arguments: Sequence[Value],
        options: Mapping[str, Value],
        frame: Frame,
    ) -> None:
        """Set the parameters of a function: arguments, defaults, or values that only the run knows."""
        positional = [*signature.posonlyargs, *signature.args]
        defaults: dict[ast.arg, ast.expr | None] = {}
        defaults |= dict(zip(positional[::-1], signature.defaults[::-1], strict=False))
        defaults |= dict(zip(signature.kwonlyargs, signature.kw_defaults, strict=True))
        others = dict(options)
        for index, parameter in enumerate((*positional, *signature.kwonlyargs)):
            name = parameter.arg
            default = defaults.get(parameter)
            if index < min(len(arguments), len(positional)):
                frame.names[name] = arguments[index]
            elif name in others:
                frame.names[name] = others.pop(name)
            elif default is not None and frame.outer is not None:
                frame.names[name] = self.value(default, frame.outer)
            else:
                frame.names[name] = make_open_value(name)
        if signature.kwarg is not None:
            frame.names[signature.kwarg.arg] = Value(others)
        if signature.vararg is not None:
            frame.names[signature.vararg.arg] = Value(list(arguments[len(positional) :]))

    # -- command lines -----------------------------------------------------------------------------

    def _follow_commands(self, app: ast.expr, frame: Frame) -> None:
        """Follow each command of an application of typer, as its own start of the launcher.

        Raises:
            PathEndError: No command starts a run, and one ends with an error.
        """
        error: PathEndError | None = None
        decorator = f"{format_expression(app)}.command"
        for name, value in list(frame.names.items()):
            if not isinstance(value.content, Function):
                continue
            for word in getattr(value.content.node, "decorator_list", ()):
                if not format_expression(word).startswith(decorator):
                    continue
                self.commands[name] = value.content
                if name in self.skipped:
                    continue
                try:
                    self._follow_command(value)
                except PathEndError as raised:
                    error = raised
        if error is not None and not self.starts:
            raise error

    def list_commands_without_start(self) -> list[str]:
        """Return the names of the commands that start no run, whatever the conditions are."""
        return [
            name for name, function in self.commands.items() if not self._may_start(function, set())
        ]

    def _may_start(self, function: Function, known: set[ast.AST]) -> bool:
        """Return whether a function, or one that it names, calls `execute_train`.

        Args:
            known: Functions that are looked through already.
        """
        known.add(function.node)
        for node in ast.walk(function.node):
            value: Value | None = None
            if isinstance(node, ast.Name):
                value = function.frame.find(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                value = self._find_module_member(node.value.id, node.attr, function.frame)
            if value is not None and isinstance(value.content, Imported):
                if value.content.path.endswith(TRAIN_FUNCTION):
                    return True
                value = self.load_name(value.content.path)
            if value is None or not isinstance(value.content, Function):
                continue
            if value.content.node not in known and self._may_start(value.content, known):
                return True
        return False

    def _find_module_member(self, module: str, name: str, frame: Frame) -> Value | None:
        """Return a member of an imported module, without its value; None for any other name."""
        holder = frame.find(module)
        if holder is None or not isinstance(holder.content, Imported):
            return None
        return Value(Imported(f"{holder.content.path}.{name}"))

    def _follow_command(self, command: Value) -> Value:
        """Follow a function whose parameters are options of the command line.

        A parameter that is an instance of a dataclass stands for its fields, each an option.
        """
        if not isinstance(command.content, Function):
            raise UnknownValueError("a command")
        function = command.content
        signature = function.node.args
        frame = Frame(function.frame.module, outer=function.frame)
        self._bind(signature, (), {}, frame)
        options: dict[str, Value] = {}
        for parameter in (*signature.args, *signature.kwonlyargs):
            kind = Value()
            annotation = ""
            if parameter.annotation is not None:
                kind = self.value(parameter.annotation, function.frame)
                annotation = format_expression(parameter.annotation)
            if isinstance(kind.content, Class):
                value = self._make_instance(kind.content, (), {}, is_command_line=True)
            else:
                default = frame.names[parameter.arg]
                value = self.read_variable(parameter.arg, default, kind=annotation)
            options[parameter.arg] = value
        return self.follow_function(function, (), options)

    # -- classes -----------------------------------------------------------------------------------

    def _make_instance(
        self,
        kind: Class,
        arguments: Sequence[Value],
        options: Mapping[str, Value],
        *,
        is_command_line: bool = False,
    ) -> Value:
        """Return an instance of a dataclass.

        Args:
            arguments: Positional arguments.
            options: Other arguments.
            is_command_line: Whether the fields are options of the command line.
        """
        instance = Instance(kind)
        value = Value(instance)
        members = self._list_members(kind)
        if "__init__" in members:
            raise UnknownValueError(kind.node.name)
        positional = list(arguments)
        for name, (node, frame) in members.items():
            if not isinstance(node, ast.AnnAssign):
                continue
            if name in options:
                field = options[name]
            elif positional:
                field = positional.pop(0)
            else:
                default = self._read_default(node.value, frame)
                field = default or make_open_value(name)
                if is_command_line:
                    variable = f"{self.prefix}{name.upper()}"
                    annotation = format_expression(node.annotation)
                    field = self.read_variable(variable, default, kind=annotation)
            instance.fields[name] = field
        if "__post_init__" in members:
            self.follow_function(self._make_method("__post_init__", members, value), (), {})
        return value

    def _read_default(self, expression: ast.expr | None, frame: Frame) -> Value | None:
        """Return the default of a field; None for a field without one."""
        if expression is None:
            return None
        if not isinstance(expression, ast.Call) or not format_expression(expression.func).endswith(
            "field"
        ):
            return self.value(expression, frame)
        for keyword in expression.keywords:
            if keyword.arg == "default":
                return self.value(keyword.value, frame)
            if keyword.arg == "default_factory":
                if isinstance(keyword.value, ast.Lambda):
                    return self.value(keyword.value.body, frame)
                if isinstance(keyword.value, ast.Name) and keyword.value.id in ("list", "dict"):
                    return Value([] if keyword.value.id == "list" else {})
                factory = self.value(keyword.value, frame).content
                if isinstance(factory, Class):
                    return self._make_instance(factory, (), {})
                return make_open_value(keyword.value)
        return None

    def _list_members(self, kind: Class) -> dict[str, tuple[ast.stmt, Frame]]:
        """Return the fields and methods of a class and its bases, those of the bases first."""
        members: dict[str, tuple[ast.stmt, Frame]] = {}
        for base in kind.node.bases:
            content = self.value(base, kind.frame).content
            if isinstance(content, Class):
                members |= self._list_members(content)
        for node in kind.node.body:
            match node:
                case ast.AnnAssign(target=ast.Name(id=name)) | ast.FunctionDef(name=name):
                    members[name] = (node, kind.frame)
                case ast.Assign(targets=[ast.Name(id=name)]):
                    members[name] = (node, kind.frame)
        return members

    def _make_method(
        self, name: str, members: Mapping[str, tuple[ast.stmt, Frame]], holder: Value | None
    ) -> Function:
        node, frame = members[name]
        if not isinstance(node, ast.FunctionDef):
            raise UnknownValueError(name)
        is_static = any(format_expression(word) == "staticmethod" for word in node.decorator_list)
        return Function(node, frame, None if is_static else holder)

    def find_member(self, kind: Class, name: str, holder: Value | None) -> Value:
        """Return a member of a class: a method, a property, or a constant."""
        members = self._list_members(kind)
        node, frame = members[name]
        if isinstance(node, ast.Assign):
            return self.value(node.value, frame)
        function = self._make_method(name, members, holder)
        decorators = getattr(node, "decorator_list", ())
        if any(format_expression(word).endswith("property") for word in decorators):
            return self.follow_function(function, (), {})
        return Value(function)


def _search(arguments: Sequence[Value]) -> Value:
    """Return the match of `re.search`, or None. A pattern with several repetitions may take too long."""
    names: set[str] = set()
    pattern, text = (str(get_plain(argument, names)) for argument in arguments)
    if len(re.findall(r"[+*{]", pattern)) > 1 or len(text) > MAX_ITEMS:
        raise UnknownValueError(pattern)
    return Value(re.search(pattern, text), frozenset(names))


def _make_error(
    node: ast.stmt, frame: Frame, fault: str, names: Iterable[str] = ()
) -> PathEndError:
    """Return the end of a path on which the launcher raises an error.

    Args:
        node: The statement that raises it.
        frame: The names that the statement sees.
        fault: The fault, as a clause.
        names: As in `PathEndError`.
    """
    text = f"{fault} on line {node.lineno} of {Path(frame.module.path).name}"
    return PathEndError(text, names)
