"""The command line, `miv`: a thin layer over the Python API.

- One module per command; its function, declared with `options.command`, has the command's name. To
  add a command, write a module and add a line to `EVERYDAY` or `OTHERS` in `main`. Other packages
  add theirs by an entry point of the group `mivhead.commands`.
- A command reads its arguments, calls the Python API and prints. What a Python user could want as
  well belongs to the library.
- `options` declares what commands share and opens what they name; `output` is what they print.
- A command prints plain text or, with `--json`, one JSON object in which a list is a named member.
  Results go to stdout, everything else to stderr.
- Errors are `MivError`s: one sentence, exit code 2. `--debug` adds the traceback.
- Modules import NumPy, Pillow and PyTorch inside functions, so that `--help` is instant.
"""
