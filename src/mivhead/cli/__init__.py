"""The command line, `miv`: a thin layer over the Python API.

Conventions
-----------
- One module per command or group of commands. `add_parser(subparsers)` adds the command; in a group
  (`backbones`, `bench`, `cache`, `data`, `plot`) it calls one `_add_<action>` per action. The work
  starts in `run(args)`, or in `run_<action>(args)`, which returns the exit code. To add a command,
  write a module and list it in `main.COMMANDS`.
- A command parses arguments, calls the Python API and prints. What a Python user could want as well
  belongs to the library.
- `options` holds the options that commands share, `loading` what they read, `output` what they
  print and where they write.
- Every command prints plain text or, with `--json`, one JSON object in which a list is a named
  member. Results go to stdout, everything else to stderr.
- An option that takes several names takes them separated by commas (`--sets a,b`). An option whose
  values are free text, such as `--param`, is repeated.
- Errors are `MivError`s: one sentence, exit code 2. `--debug` adds the traceback.
- Modules import PyTorch, NumPy and Pillow inside functions, so that `--help` is instant.
"""
