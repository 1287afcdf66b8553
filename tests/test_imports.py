"""fxsafe and torch imported in any order; each program runs in a fresh interpreter."""

from __future__ import annotations

import importlib.metadata
import textwrap

import pytest
from support import FLAG_IS_GLOBAL, program, python

TRACING_FLAG = "active" if FLAG_IS_GLOBAL else "not-needed"


def test_importing_fxsafe_imports_nothing_heavy():
    assert program(
        """
        import sys, fxsafe
        print(sorted({m.partition(".")[0] for m in sys.modules} & {"torch", "packaging", "numpy"}))
        print("install" in dir(fxsafe), fxsafe.__version__)
        """
    ).splitlines() == ["[]", "True 0.1.0"]


def test_an_unknown_name_is_an_attribute_error():
    import fxsafe

    with pytest.raises(AttributeError, match="no attribute 'instal'"):
        fxsafe.instal  # noqa: B018


def test_install_before_torch_waits_and_takes_effect_when_torch_is_imported():
    out = program(
        """
        import fxsafe, sys
        handle = fxsafe.install("always-false")
        record = {r["name"]: r for r in fxsafe.info()}["guard-override"]
        print(record["status"], record["torch"], record["reason"])
        assert "torch" not in sys.modules
        import torch
        print({r["name"]: r["status"] for r in fxsafe.info()}["guard-override"])
        assert "torch._dynamo" not in sys.modules
        handle.uninstall()
        import torch.fx._symbolic_trace as st
        print([f.__code__.co_consts for f in (st.is_fx_tracing, st.Tracer.trace) if any(
            callable(c) for c in f.__code__.co_consts)])
        """
    )
    assert out.splitlines() == [
        "waiting None waits for the import of torch, torch.fx._symbolic_trace",
        "active",
        "[]",
    ]


def test_install_never_imports_dynamo_and_patches_of_it_follow_its_import():
    out = program(
        """
        import fxsafe, sys, torch
        heavy = {"torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd"}
        before = heavy & set(sys.modules)  # 2.5 imports the package torch._inductor itself
        with fxsafe.install():
            assert heavy & set(sys.modules) == before
            waiting = [r["name"] for r in fxsafe.info() if r["status"] == "waiting"]
            import torch._dynamo
            still = [r["name"] for r in fxsafe.info() if r["status"] == "waiting"]
            print(set(still) <= set(waiting), [r["name"] for r in fxsafe.info() if r["status"] == "unsupported"])
        """
    )
    assert out == "True []\n"


def test_uninstall_before_torch_is_imported_leaves_torch_untouched():
    assert program(
        """
        import fxsafe
        fxsafe.install("always-false").uninstall()
        import torch
        print({r["status"] for r in fxsafe.info()})
        with fxsafe.install("always-false"):
            print({r["name"]: r["status"] for r in fxsafe.info()}["guard-override"])
        """
    ).splitlines() == ["{'disabled'}", "active"]


def test_reinstalling_before_torch_is_imported_takes_effect_once():
    assert (
        program(
            """
            import fxsafe
            fxsafe.install().uninstall()
            fxsafe.install(); fxsafe.install()
            import torch
            print(fxsafe.info()[0]["status"])
            fxsafe.uninstall(); fxsafe.uninstall()
            print(fxsafe.is_installed())
            """
        )
        == f"{TRACING_FLAG}\nFalse\n"
    )


def test_a_failing_hook_never_breaks_the_users_import():
    done = python(
        "-W",
        "error",
        "-c",
        """
import fxsafe
from fxsafe import gate, installer
def fails(*args):
    raise ZeroDivisionError("a bug of ours")
installer.ask = fails
fxsafe.install()
import torch
print(torch.ones(1).item(), fxsafe.info()[0]["status"], fxsafe.info()[0]["reason"])
fxsafe.uninstall()
""",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "1.0 unsupported failed when its module was imported: ZeroDivisionError('a bug of ours')"
    )
    assert "fxsafe: left out" in done.stderr


def test_waiting_for_a_module_does_not_hang_threads_that_import_its_package_and_it(tmp_path):
    package = tmp_path / "family"
    package.mkdir()
    (package / "__init__.py").write_text(
        textwrap.dedent(
            """
            import importlib, family_events
            family_events.begun.set()
            assert family_events.asked.wait(30)
            for number in range(200):  # each takes the import lock, inside which the other thread looks for the child
                try:
                    importlib.import_module(f"family.missing_{number}")
                except ImportError:
                    pass
            """
        )
    )
    (package / "child.py").write_text("value = 1\n")
    (tmp_path / "family_events.py").write_text(
        "import threading\nbegun, asked = threading.Event(), threading.Event()\n"
    )
    out = program(
        f"""
        import faulthandler, sys, threading
        faulthandler.dump_traceback_later(30, exit=True)
        sys.path.insert(0, {str(tmp_path)!r})
        import family_events
        from fxsafe import imports

        told = []
        imports.expect(["family.child"], lambda: told.append(threading.current_thread().name))

        class Watching:
            def find_spec(self, name, path=None, target=None):
                if name == "family.child":
                    family_events.asked.set()

        sys.meta_path.insert(0, Watching())

        def child():
            assert family_events.begun.wait(30)
            import family.child

        threads = [threading.Thread(target=f, name=f.__name__) for f in (lambda: __import__("family"), child)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        import family.child
        loader = family.child.__loader__
        print(told, family.child.value, imports.ready("family.child") is family.child)
        print(type(loader).__name__, family.child.__spec__.loader is loader)
        """
    )
    assert out.splitlines() == ["['child'] 1 True", "SourceFileLoader True"]


@pytest.mark.parametrize("place", [0, 1])  # before ours, behind it
def test_another_librarys_finder_may_ask_all_finders_again(tmp_path, place):
    (tmp_path / "expected_once.py").touch()
    out = program(
        f"""
        import importlib.util, sys
        sys.path.insert(0, {str(tmp_path)!r})
        from fxsafe import imports

        told, asking = [], []
        imports.expect(["expected_once"], lambda: told.append(1))

        class Again:
            def find_spec(self, name, path=None, target=None):
                if name == "expected_once" and not asking:
                    asking.append(name)
                    return importlib.util.find_spec(name)

        sys.meta_path.insert({place}, Again())
        import expected_once
        print(told, type(expected_once.__spec__.loader).__name__)
        del sys.modules["expected_once"]
        import expected_once
        print(told)
        """
    )
    assert out.splitlines() == ["[1] SourceFileLoader", "[1]"]


def test_a_thread_may_install_while_another_imports_torch():
    assert (
        program(
            """
            import sys, threading, fxsafe
            importing = threading.Thread(target=lambda: __import__("torch"))
            importing.start()
            handles = []
            installing = threading.Thread(target=lambda: handles.append(fxsafe.install()))
            installing.start()
            for t in (installing, importing):
                t.join(240)
                assert not t.is_alive()
            print(fxsafe.info()[0]["status"])
            handles[0].uninstall()
            """
        )
        == f"{TRACING_FLAG}\n"
    )


def test_strict_before_torch_reads_the_installed_release(monkeypatch):
    version = importlib.metadata.version("torch")
    out = program(
        f"""
        import importlib.metadata, fxsafe
        fxsafe.install(strict=True).uninstall()
        real = importlib.metadata.version
        importlib.metadata.version = lambda name: "2.4.1+cpu" if name == "torch" else real(name)
        try:
            fxsafe.install(strict=True)
        except fxsafe.UnsupportedTorchError as error:
            print(error)
        print(fxsafe.is_installed(), {version!r} == real("torch"))
        """
    )
    assert out.splitlines() == [
        "strict: torch 2.4.1+cpu is older than the oldest supported one; fxsafe supports torch 2.5 to 2.15",
        "False True",
    ]


@pytest.mark.parametrize(
    ("version", "status", "says"),
    [("2.99.0.dev20301231+cu199", "active", "untested"), ("2.4.0", "unsupported", "older")],
)
def test_an_untested_torch_is_warned_about_once_and_refused_when_strict(version, status, says):
    out = program(
        f"""
        import warnings, torch, fxsafe
        torch.__version__ = {version!r}
        for _ in range(2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with fxsafe.install("always-false"):
                    record = {{r["name"]: r for r in fxsafe.info()}}["guard-override"]
            print(len(caught), [w.filename for w in caught], record["status"], {says!r} in record["reason"])
        try:
            fxsafe.install("always-false", strict=True)
        except fxsafe.UnsupportedTorchError as error:
            print("strict" in str(error), fxsafe.is_installed())
        """
    )
    first, second, strict = out.splitlines()
    assert first.startswith(("1 ['<string>'", "2 ['<string>', '<string>'"))
    assert first.endswith(f"{status} True")
    assert second == f"0 [] {status} True"
    assert strict == "True False"


def test_a_partly_imported_torch_is_patched_when_a_module_of_its_own_asks():
    """As a backend that torch loads at the end of its own import would."""
    assert (
        program(
            """
            import sys, importlib.abc, importlib.util
            class Finder(importlib.abc.MetaPathFinder):
                def find_spec(self, name, path, target=None):
                    if name != "torch.library":
                        return None
                    sys.meta_path.remove(self)
                    import fxsafe
                    fxsafe.install()
                    return None
            sys.meta_path.insert(0, Finder())
            import torch, fxsafe
            print(fxsafe.is_installed(), torch.ones(2).sum().item())
            import torch.utils.checkpoint
            print(fxsafe.info()[0]["status"])
            fxsafe.uninstall()
            """
        )
        == f"True 2.0\n{TRACING_FLAG}\n"
    )


NEWER_TORCH = """
import warnings
import fxsafe.gate
fxsafe.gate.NEWEST = (2, 4)
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as caught:
    fxsafe.install()
    import torch
    import torch._dynamo
print([(w.category.__name__, w.lineno, w.filename) for w in caught if w.category is fxsafe.FxsafeWarning])
print("is newer than the newest tested one" in str(caught[0].message))
"""


def test_an_untested_torch_is_warned_about_once_at_the_import_in_the_users_own_line(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(NEWER_TORCH, encoding="utf-8")
    done = python(str(script))
    assert done.stdout.splitlines() == [f"[('FxsafeWarning', 8, {str(script)!r})]", "True"], done.stderr
