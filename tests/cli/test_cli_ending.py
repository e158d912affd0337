"""The process ends at once, but leaves nothing undone."""

import subprocess
import sys

START = "import atexit, sys, threading, time; from mivhead.cli.main import end; "


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", START + code], capture_output=True, text=True)


def test_exit_code_output_and_what_was_registered():
    done = run("atexit.register(print, 'last'); print('first', end=' '); end(3)")
    assert done.returncode == 3
    assert done.stdout == "first last\n"


def test_memory_is_not_taken_apart():
    done = run("keep = type('Loud', (), {'__del__': lambda self: print('gone')})(); end(0)")
    assert (done.returncode, done.stdout) == (0, "")


def test_threads_finish_their_work():
    work = "lambda: (time.sleep(0.3), print('worked'))"
    assert run(f"threading.Thread(target={work}).start(); end(4)").stdout == "worked\n"
    done = run(f"threading.Thread(target={work}, daemon=True).start(); end(4)")
    assert (done.returncode, done.stdout) == (4, "")
