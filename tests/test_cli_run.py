"""``fxsafe run`` against ``python``: the same program must print the same and end the same, case by case."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
posix = pytest.mark.skipif(os.name != "posix", reason="signals and links of POSIX")


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str


@dataclass(frozen=True)
class Program:
    """Files to write, and the words that follow ``python``."""

    words: list[str]
    files: dict[str, str | bytes] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)


def script(text: str | bytes, *args: str, flags: list[str] | None = None) -> Program:
    return Program(["script.py", *args], {"script.py": text}, flags or [])


def execute(command: list[str], cwd: Path, **env: str) -> Outcome:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    out, err = (re.sub(r"0x[0-9a-fA-F]+", "0x..", text) for text in (done.stdout, done.stderr))
    return Outcome(done.returncode, out, err)


def both(program: Program, cwd: Path, **env: str) -> tuple[Outcome, Outcome]:
    for name, content in program.files.items():
        target = cwd / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content if isinstance(content, bytes) else content.encode())
    plain = execute([*program.flags, *program.words], cwd, **env)
    ours = execute([*program.flags, "-m", "fxsafe", "run", *program.words], cwd, **env)
    return plain, ours


NAMESPACE = """
import sys, atexit, builtins
def show():
    for key, value in list(globals().items()):
        if key.startswith("__") and key != "__builtins__":
            print(key, repr(value))
print(list(globals()))
show()
print(__builtins__ is builtins, sys.modules["__main__"].__dict__ is globals(), sys.argv, sys.path[0])
print("fxsafe.__main__" in sys.modules, "torch" in sys.modules, sys.exc_info())
atexit.register(show)
"""
PICKLES = """
import pickle
class Point:
    pass
def late():
    import sys
    return type(pickle.loads(pickle.dumps(Point()))) is Point, sys.modules["__main__"].Point is Point
print(late())
import atexit
atexit.register(lambda: print(late()))
"""
SPAWNS = """
import multiprocessing, sys
def double(x):
    return 2 * x, __name__
if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        print(pool.map(double, [1, 2]))
"""
THREAD = """
import threading, time, sys
def late():
    threading.main_thread().join()
    print("still", sys.modules["__main__"].__dict__ is globals(), value, "__file__" in globals())
threading.Thread(target=late).start()
value = 7
print("main ends")
"""
HOOK = """
import sys
def hook(kind, value, traceback):
    frames = []
    while traceback:
        frames.append(traceback.tb_frame.f_code.co_name)
        traceback = traceback.tb_next
    print("hook", kind.__name__, value, frames, sys.last_value is value)
    %s
sys.excepthook = hook
def f():
    raise ValueError("wrong")
f()
"""
CHAINED = """
def inner():
    try:
        {}["x"]
    except KeyError as error:
        raise ValueError("from") from error
def outer():
    try:
        inner()
    finally:
        raise TypeError("while")
outer()
"""
PACKAGE: dict[str, str | bytes] = {
    "pkg/__init__.py": "print('init', __name__)",
    "pkg/__main__.py": "from . import mod\n" + NAMESPACE,
    "pkg/mod.py": "print('mod', __name__)" + NAMESPACE,
    "pkg/bad.py": CHAINED,
    "pkg/syntax.py": "def f(:\n",
    "pkg/leave.py": "import sys; sys.exit('leave')",
    "pkg/needs.py": "import nowhere_to_be_found",
    "nomain/__init__.py": "",
}


def module(name: str, *args: str) -> Program:
    return Program(["-m", name, *args], PACKAGE)


PROGRAMS: dict[str, Program] = {
    "namespace": script(NAMESPACE),
    "relative-path": Program(["./sub/../sub/script.py"], {"sub/script.py": NAMESPACE}),
    "arguments-like-ours": script(NAMESPACE, "--fix", "nonsense", "-m", "x", "--strict", "--", "--help"),
    "package": module("pkg", "--fix", "x", "-m", "y"),
    "module": module("pkg.mod", "--help"),
    "module-raises": module("pkg.bad"),
    "module-syntax-error": module("pkg.syntax"),
    "module-exits": module("pkg.leave"),
    "module-import-error": module("pkg.needs"),
    "module-missing": module("nowhere_to_be_found"),
    "module-missing-in-package": module("pkg.nowhere"),
    "module-parent-is-no-package": module("pkg.mod.more"),
    "module-with-py-suffix": module("pkg.mod.py"),
    "package-without-main": module("nomain"),
    "module-interrupted": Program(["-m", "stop"], {"stop.py": "raise KeyboardInterrupt"}),
    "module-is-in-the-library": Program(["-m", "json.tool", "x.json"], {"x.json": '{"a":1}'}),
    "directory": Program(["folder", "a"], {"folder/__main__.py": NAMESPACE}),
    "directory-raises": Program(["folder"], {"folder/__main__.py": CHAINED}),
    "directory-without-main": Program(["folder"], {"folder/other.py": ""}),
    "script-missing": Program(["sub/missing.py"]),
    "unreadable-parent-is-a-file": Program(["script.py/x.py"], {"script.py": ""}),
    "syntax-error": script("x = 1\ndef f(:\n"),
    "indentation-error": script("if 1:\n  x = 1\n\ty = 2\n"),
    "unclosed": script("x = (1,\n\n"),
    "return-outside": script("return 1\n"),
    "syntax-error-not-ascii": script("é = 1\nx = é +* 2\n"),
    "syntax-error-latin-1": script("# coding: latin-1\nx = 'ÿ' +\n".encode("latin-1")),
    "syntax-error-in-an-import": Program(["script.py"], {"script.py": "import bad", "bad.py": "x ="}),
    "byte-order-mark": script(b"\xef\xbb\xbfprint('ok')"),
    "carriage-returns": script(b"print(1)\r\nprint(2)\r\n"),
    "no-future-of-ours": script("def f(x: undefined_name): pass"),
    "chained-exceptions": script(CHAINED),
    "exception-without-traceback-lines": script("exec('1/0')"),
    "exception-with-notes": script("e = ValueError(1)\nif hasattr(e, 'add_note'): e.add_note('n')\nraise e"),
    "base-exception": script("class B(BaseException): pass\nraise B('b')"),
    "exit-none": script("raise SystemExit"),
    "exit-zero": script("import sys; sys.exit(0)"),
    "exit-number": script("import sys; sys.exit(7)"),
    "exit-over-a-byte": script("import sys; sys.exit(261)"),
    "exit-true": script("import sys; sys.exit(True)"),
    "exit-text": script("import sys; sys.exit('text')"),
    "exit-tuple": script("import sys; sys.exit((1, 2))"),
    "exit-object": script("class O:\n    __str__ = lambda self: 'object'\nraise SystemExit(O())"),
    "exit-within-handler": script("import sys\ntry: 1/0\nexcept ZeroDivisionError: sys.exit(4)"),
    "exit-subclass": script("class E(SystemExit): pass\nraise E(5)"),
    "exit-in-thread": script("import sys, threading\nthreading.Thread(target=sys.exit, args=(3,)).start()"),
    "os-exit": script("import os; os._exit(9)"),
    "hook": script(HOOK % ""),
    "hook-raises": script(HOOK % "{}['in the hook']"),
    "hook-exits": script(HOOK % "sys.exit(11)"),
    "hook-missing": script("import sys\ndel sys.excepthook\n1/0"),
    "hook-sees-interrupt": script((HOOK % "").replace('ValueError("wrong")', "KeyboardInterrupt")),
    "interrupt-subclass": script("class K(KeyboardInterrupt): pass\nraise K"),
    "interrupt-caught": script("try: raise KeyboardInterrupt\nexcept KeyboardInterrupt: print('caught')"),
    "exception-in-thread": script("import threading\nthreading.Thread(target=lambda: 1/0).start()"),
    "exception-in-atexit": script("import atexit\natexit.register(lambda: 1/0)"),
    "atexit-after-failure": script("import atexit, sys\natexit.register(lambda: print(repr(sys.last_value)))\n1/0"),
    "thread-goes-on": script(THREAD),
    "thread-goes-on-after-failure": script(THREAD + "\n1/0"),
    "pickle": script(PICKLES),
    "pickle-module": Program(["-m", "pick"], {"pick.py": PICKLES}),
    "spawn": script(SPAWNS, "spawn"),
    "spawn-module": Program(["-m", "spawns", "spawn"], {"spawns.py": SPAWNS}),
    "warning": script(
        "import warnings\nwarnings.warn('old', DeprecationWarning)\nwarnings.warn('mine')\nprint(warnings.filters)"
    ),
    "warning-as-error": script("import warnings\nwarnings.warn('old', DeprecationWarning)", flags=["-W", "error"]),
    "optimised": script("assert False\nprint(__debug__)", flags=["-O"]),
    "empty": script(""),
    "reads-stdin": script("import sys; print(repr(sys.stdin.read()))"),
    "unittest": script(
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.fail()\nunittest.main(argv=['x'])"
    ),
    "argparse": script("import argparse; argparse.ArgumentParser().parse_args()", "--nonsense"),
    "argparse-module": Program(
        ["-m", "ap"], {"ap.py": "import argparse; argparse.ArgumentParser().parse_args(['-z'])"}
    ),
    "dataclass-and-type-hints": script(
        "import dataclasses, typing\n@dataclasses.dataclass\nclass D:\n    x: 'Later'\nclass Later: pass\n"
        "print(typing.get_type_hints(D), D.__module__)"
    ),
    "neighbour-import": Program(["sub/script.py"], {"sub/script.py": "import near", "sub/near.py": "print(__file__)"}),
}
if sys.version_info >= (3, 11):
    PROGRAMS["exception-group"] = script("raise ExceptionGroup('g', [ValueError(1), TypeError(2)])")
    PROGRAMS["safe-path"] = Program(["sub/script.py"], {"sub/script.py": NAMESPACE, "sub/near.py": ""}, ["-P"])
    PROGRAMS["safe-path-module"] = Program(["-m", "near"], {"near.py": NAMESPACE}, ["-P"])
    PROGRAMS["safe-path-directory"] = Program(["folder"], {"folder/__main__.py": NAMESPACE}, ["-P"])


def without_durations(outcome: Outcome) -> Outcome:
    return Outcome(outcome.status, outcome.out, re.sub(r"in \d+\.\d+s", "in ..s", outcome.err))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_prints_and_ends_as_with_python(name: str, tmp_path: Path) -> None:
    plain, ours = both(PROGRAMS[name], tmp_path)
    assert without_durations(ours) == without_durations(plain)


@pytest.mark.parametrize("name", ["chained-exceptions", "module-raises", "exit-text", "thread-goes-on-after-failure"])
def test_output_and_errors_come_in_the_same_order(name: str, tmp_path: Path) -> None:
    program = PROGRAMS[name]
    for file, content in program.files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, str) else content.decode()
        (tmp_path / file).write_text("print('first')\n" + text)

    def merged(*before: str) -> str:
        return subprocess.run(
            [sys.executable, *before, *program.words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        ).stdout

    assert merged("-m", "fxsafe", "run") == merged()


def test_a_link_to_a_script_puts_the_directory_of_the_file_on_the_path(tmp_path: Path) -> None:
    program = Program(["link.py"], {"real/script.py": NAMESPACE + "import near", "real/near.py": "print('near')"})
    (tmp_path / "hop.py").symlink_to("real/script.py")
    (tmp_path / "link.py").symlink_to("hop.py")
    plain, ours = both(program, tmp_path)
    assert ours == plain
    assert "near" in plain.out


def test_a_zip_file_runs(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", NAMESPACE + "import near")
        archive.writestr("near.py", "print(__file__)\n1/0")
    plain, ours = both(Program(["app.zip", "--fix"]), tmp_path)
    assert ours == plain
    assert "app.zip/near.py" in plain.out


def test_a_compiled_file_runs(tmp_path: Path) -> None:
    (tmp_path / "source.py").write_text(NAMESPACE + "1/0")
    execute(["-c", "import py_compile; py_compile.compile('source.py', 'script.pyc')"], tmp_path)
    plain, ours = both(Program(["script.pyc"]), tmp_path)
    assert ours == plain
    assert "SourcelessFileLoader" in plain.out


def test_a_compiled_file_of_another_python_is_refused(tmp_path: Path) -> None:
    plain, ours = both(Program(["script.pyc"], {"script.pyc": b"\x00" * 32}), tmp_path)
    assert ours == plain
    assert plain.status == 1


@posix
@pytest.mark.parametrize("words", [["script.py"], ["-m", "script"]])
def test_an_interrupt_kills_by_sigint(words: list[str], tmp_path: Path) -> None:
    text = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(30)"
    plain, ours = both(Program(words, {"script.py": text}), tmp_path)
    assert ours == plain
    assert plain.status == -2


@posix
def test_a_closed_pipe_is_reported_as_python_does(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('x')")

    def closed(*before: str) -> tuple[int, bytes]:
        read, write = os.pipe()
        os.close(read)
        try:
            done = subprocess.run(
                [sys.executable, *before, "script.py"],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=write,
                stderr=subprocess.PIPE,
                timeout=120,
                check=False,
            )
        finally:
            os.close(write)
        return done.returncode, re.sub(rb"0x[0-9a-f]+", b"", done.stderr)

    assert closed("-m", "fxsafe", "run") == closed()


@pytest.mark.parametrize("flags", [[], ["-I"]])
@pytest.mark.parametrize("words", [["sub/script.py", "-m"], ["-m", "json.tool", "--help"]])
def test_an_installed_launcher_leaves_no_trace_on_the_path(flags: list[str], words: list[str], tmp_path: Path) -> None:
    """What pip writes as the console script: its own directory is on the path, the program's is not."""
    (tmp_path / "bin").mkdir()
    launcher = tmp_path / "bin" / "fxsafe"
    site = "" if not flags else f"sys.path.append({str(ROOT)!r})\n"
    launcher.write_text(f"import sys\n{site}from fxsafe.cli import main\nsys.exit(main())\n")
    program = Program(words, {"sub/script.py": NAMESPACE}, flags)
    for name, content in program.files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    plain = execute([*flags, *words], tmp_path)
    assert execute([*flags, str(launcher), "run", *words], tmp_path) == plain


def test_fxsafe_is_installed_before_the_program_and_torch_is_not_imported(tmp_path: Path) -> None:
    text = "import sys, fxsafe\nprint(fxsafe.is_installed(), 'torch' in sys.modules)"
    _, ours = both(script(text), tmp_path)
    assert ours == Outcome(0, "True False\n", "")


def test_a_program_may_install_fxsafe_itself(tmp_path: Path) -> None:
    text = "import fxsafe\nwith fxsafe.install():\n    print(fxsafe.is_installed())\nprint(fxsafe.is_installed())"
    _, ours = both(script(text), tmp_path)
    assert ours == Outcome(0, "True\nTrue\n", "")


def test_an_error_of_fxsafe_in_the_program_is_the_programs(tmp_path: Path) -> None:
    plain, ours = both(script("import fxsafe\nraise fxsafe.FxsafeError('mine')"), tmp_path)
    assert ours == plain
    assert "Traceback" in plain.err


@pytest.mark.parametrize(
    "words",
    [
        ["--fix", "always-false", "script.py", "--fix"],
        ["--fix=always-false", "script.py", "--fix"],
        ["--strict", "--", "script.py", "--fix"],
        ["--fix", "thread-local", "-mscript", "--fix"],
    ],
)
def test_our_options_stand_before_the_program(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; print(sys.argv[1:])")
    assert execute(["-m", "fxsafe", "run", *words], tmp_path) == Outcome(0, "['--fix']\n", "")


@pytest.mark.parametrize(
    "words",
    [
        ["run"],
        ["run", "-m"],
        ["run", "--fix"],
        ["run", "--fix", "nonsense", "script.py"],
        ["run", "--patches", "nonsense", "script.py"],
        ["run", "--patches", "", "script.py"],
        ["run", "--patches= , ", "script.py"],
        ["run", "--nonsense", "script.py"],
        ["nonsense"],
    ],
)
def test_a_mistake_is_one_line_and_status_2(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('must not run')")
    outcome = execute(["-m", "fxsafe", *words], tmp_path)
    assert outcome.status == 2
    assert outcome.out == ""
    assert outcome.err.startswith("fxsafe")
    assert outcome.err.count("\n") == 1


def test_patches_are_named_with_or_without_spaces(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import fxsafe\nprint([r['name'] for r in fxsafe.info() if r['status'] != 'disabled'])"
    )
    outcome = execute(["-m", "fxsafe", "run", "--patches", " tracing-flag, module-hooks ,", "script.py"], tmp_path)
    assert outcome == Outcome(0, "['tracing-flag', 'module-hooks']\n", "")


def test_patches_that_name_none_say_what_to_do(tmp_path: Path) -> None:
    outcome = execute(["-m", "fxsafe", "run", "--patches", "", "script.py"], tmp_path)
    assert "'' names no patch; leave --patches out" in outcome.err


def test_help_says_that_spawned_children_do_not_inherit(tmp_path: Path) -> None:
    outcome = execute(["-m", "fxsafe", "run", "--help"], tmp_path)
    assert outcome.status == 0
    assert "do not inherit" in outcome.out


def test_no_arguments_print_help(tmp_path: Path) -> None:
    outcome = execute(["-m", "fxsafe"], tmp_path)
    assert outcome.status == 0
    assert "doctor" in outcome.out
    assert outcome.err == ""


def test_version_names_the_package(tmp_path: Path) -> None:
    outcome = execute(["-m", "fxsafe", "--version"], tmp_path)
    assert outcome.status == 0
    assert outcome.out.startswith("fxsafe ")


def test_run_records_a_program_to_its_last_thread(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import threading, torch\n"
        "def late():\n"
        "    threading.main_thread().join()\n"
        "    torch.fx.symbolic_trace(torch.nn.ReLU())\n"
        "threading.Thread(target=late, name='late').start()\n"
        "print([t.name for t in threading.enumerate() if t.name.startswith('fxsafe')])\n"
        "raise SystemExit(3)\n"
    )
    words = ["run", "--record", "race.json", "--stall-after", "50", "program.py"]
    done = execute(["-m", "fxsafe", *words], tmp_path)
    assert (done.status, done.out) == (3, "['fxsafe-watchdog']\n")
    events = json.loads((tmp_path / "race.json").read_text())["traceEvents"]
    (thread,) = {e["tid"] for e in events if e["name"] == "trace"}
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["tid"] == thread] == ["late"]
    missing = execute(["-m", "fxsafe", "run", "--record", "no/race.json", "program.py"], tmp_path)
    assert (missing.status, missing.err.count("\n")) == (2, 1)


SETTING = """
import threading
import torch._dynamo
torch._dynamo.config.error_on_recompile = True
thread = threading.Thread(target=lambda: print(torch._dynamo.config.error_on_recompile))
thread.start()
thread.join()
"""


def test_threads_of_the_program_inherit_torchs_settings_unless_told_otherwise(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SETTING)
    plain = execute(["script.py"], tmp_path).out
    assert execute(["-m", "fxsafe", "run", "script.py"], tmp_path).out == "True\n"
    assert execute(["-m", "fxsafe", "run", "--no-inherit", "script.py"], tmp_path).out == plain
