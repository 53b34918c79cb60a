"""Launch scripts: the starts of training programs in them, on each of its branches.

alternatives.py   `launches`, of a script
launches.py       `Launch`; recognition.py, the command that is one; job.py, jobs of Ray
signs.py          the words by which they are known, rows of `read/rows/command_lines.yaml`
notes.py          `Note`: a part of the script that was not read
reader.py         reads the script once: walk.py, branches.py, loops.py; reading.py, what it found
script.py         the syntax tree; word.py, its words; bash/, the state of the shell
nested_script.py  scripts within the script; sourced_file.py, files next to it
"""
