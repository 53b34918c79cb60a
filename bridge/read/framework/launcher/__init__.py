"""A Python launcher of slime or miles, followed by its syntax. Nothing of it is imported or run.

program.py       `LauncherProgram`: the statements, functions and classes, to the calls that start runs
expressions.py   `ExpressionReader`: the expressions
values.py        `Value`: a value, and the text of bash that it becomes
syntax.py        syntax trees, files of modules, and patterns of `match`
"""
