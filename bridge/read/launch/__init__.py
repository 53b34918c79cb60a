"""Launch scripts: the training programs that a script starts, with their arguments and environment.

    script_launches.py    `read_launches`: the launches of a script, also on its other branches
    launch.py             `Launch`: one start of a training program
    launch_command.py     recognises the command that starts one
    command_line_rows.py  the words by which it is recognised: `read/foreign/tables/command_lines.yaml`
    ray_job.py            the environment of a job of Ray; launched_ranks.py, the processes of a launcher
    slurm_header.py       the variables that Slurm sets by the `#SBATCH` lines of the script
    notes.py              `Note`: a part of the script that was not read

    interpreter.py        follows the script once: its commands, functions and nested scripts
    commands.py           the order of commands; branches.py, `if` and `case`; loops.py, loops
    trace.py              `ScriptTrace`: the launches and open conditions that were found
    nested_script.py      the script in `bash -c "..."` or `ssh host "..."`
    sourced_file.py       the file in `source FILE`, found next to the script
    syntax_tree.py        the syntax tree; shell_word.py, one of its words
    unexecuted_text.py    texts about precision that no followed command has
    bash/                 the state of the shell: variables, functions, conditions

To "follow" a command means to compute how it changes the variables. Nothing is executed.

A piece of a word, a variable or a condition is "open" if only the run decides it: `$1`, `$(date)`,
`[ -n "$FP8" ]` where the script does not set FP8. The word keeps an open piece as it is written.

Why a script is followed, and not only searched for options: this was counted in 1,197 launch
scripts of public repositories.

    branches (`if`, `case`, `&&`) decide the arguments of a launch      158 scripts
    `exit` in a branch                                                   73; 20 are refused without it
    `source FILE`                                                        49; 29 read otherwise without it
    `ray job submit`                                                     44
    placeholders, such as `DATA=<path>`                                  22; 8 are refused without them
    `bash -c "..."`                                                       9

A construct that no script needed is not followed. Its variables become open, and a text about
precision that no command reached is named in `Launch.unread`.
"""
