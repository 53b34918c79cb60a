"""Files that describe a run, whatever wrote them, read into one form: `read_file(path) -> FileReading`.

`kinds.py` says which framework wrote a file by what stands in it; each framework has a module that reads its files.
"""
