"""The state of bash at one point of a script, and what its words, conditions and commands change in it.

variables.py   values, and the words that bash makes of them; arithmetic.py
shell.py       scopes, functions, environment and assignments; environment.py
builtins.py    `unset`, `read`, `printf -v`, `set`, `shift`
conditions.py  the answer of a condition; condition_nodes.py, from its node in the tree
counted_loop.py    the header of a loop that counts
"""
