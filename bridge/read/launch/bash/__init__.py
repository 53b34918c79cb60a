"""The state of bash at one point of a script. No command is executed.

    variables.py        the values of variables
    expansion.py        the words that bash expands words to
    arithmetic.py       the value of `$((A + B))`
    shell.py            scopes, functions, exported variables and assignments
    environment.py      the variables that `env` and `mpirun -x` give to a program
    builtins.py         `unset`, `read`, `printf -v`, `set`, `shift`
    conditions.py       the result of a comparison
    condition_nodes.py  the result of a condition in the syntax tree
    counted_loop.py     the header of `for ((i = 0; i < N; i++))`

A model of this size is needed. It was counted in 1,197 launch scripts that public repositories
publish: branches decide the arguments in 158 of them, `source` is used in 49, placeholders such as
`DATA=<path>` in 22. `bridge/read/launch/__init__.py` has the whole count.
"""
