from __future__ import annotations

import ast
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import tokens
import torch
from torch.torch_version import TorchVersion

import fxsafe
import fxsafe.cli
from fxsafe.dflash import cli, demo, files
from fxsafe.dflash.export import export_drafter
from fxsafe.dflash.settings import DataSettings
from fxsafe.dflash.target import Target, load_tokenizer


def call(*words: str) -> int:
    """The command as a user gives it; what it installs is taken back."""
    before = fxsafe.is_installed()
    try:
        return fxsafe.cli.main(["dflash", *words])
    finally:
        while fxsafe.is_installed() and not before:
            fxsafe.uninstall()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a tokenizer, a drafter for it, data and settings."""
    root = tmp_path_factory.mktemp("place")
    model = tiny.target_model("qwen3", eos_token_id=33)
    model.save_pretrained(root / "target")
    tokens.tokenizer().save_pretrained(root / "target")
    shape = Target(model).drafter_config(layers=1, block_size=4, mask_token_id=60, taps=(0, 2))
    export_drafter(tiny.drafter(shape).state_dict(), shape, root / "drafter")
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "a b c d e f g h"}]
    lines = [json.dumps({"messages": turns})] * 12
    (root / "data.jsonl").write_text("\n".join(lines) + "\n")
    (root / "settings.yaml").write_text(
        f"""
target: {{model: {root / "target"}, dtype: float32, devices: [cpu]}}
drafter:
  layers: 1
  block_size: 4
  anchors: 3
  target_layer_ids: [0, 2]
  devices: [cpu, cpu]
  dtype: float32
  compile: false
data: {{train: [{root / "data.jsonl"}], max_length: 64, bucket: 32, micro_batches: 2, validation_share: 0.2}}
optim: {{lr: 1e-2}}
run: {{out: {root / "run"}, max_steps: 3, log_every: 1}}
"""
    )
    return root


@pytest.mark.parametrize("version", ["1", "2"])
def test_train_export_plot_and_eval_work_on_each_others_output(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], version: str
) -> None:
    out = tmp_path / "run"
    words = ["train", "--config", str(place / "settings.yaml"), "--run.out", str(out), "--run.max_steps", "4"]
    words += ["--drafter.version", version]
    assert call(*words, "--dry-run") == 0
    assert "drafter  " in capsys.readouterr().out
    assert not out.exists()
    assert call(*words) == 0
    said = capsys.readouterr().out
    assert "step 4/4" in said
    assert ("selector loss" in said) == (version == "2")
    assert json.loads((out / "settings.json").read_text())["drafter"]["target_layer_ids"] == [0, 2]
    assert call("export", str(out), str(tmp_path / "again")) == 0
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (out / "export" / name).read_bytes()
    assert call("plot", str(out)) == 0
    report = tmp_path / "report.json"
    assert (
        call(
            "eval", str(out / "export"), "--target", str(place / "target"), "--prompts", str(place / "data.jsonl"),
            "--limit", "2", "--new-tokens", "8", "--dtype", "float32", "--device", "cpu", "--json", str(report),
        )
        == 0
    )  # fmt: skip
    document = json.loads(report.read_text())
    assert document["equal"] == 2
    assert "equal to the target's own in 2 of 2" in capsys.readouterr().out


def test_prepare_writes_what_train_reads(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "new.jsonl"
    words = ("prepare", str(place / "data.jsonl"), "--target", str(place / "target"), "--out", str(out))
    assert call(*words, "--new-tokens", "4", "--limit", "2", "--dtype", "float32", "--device", "cpu") == 0
    assert len(out.read_text().splitlines()) == 2


def test_prepare_does_not_write_what_it_reads(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "mine.jsonl"
    data.write_bytes((place / "data.jsonl").read_bytes())
    assert call("prepare", str(data), "--target", str(place / "target"), "--out", str(data)) == 2
    assert "is read and cannot be written too" in capsys.readouterr().err
    assert data.read_bytes() == (place / "data.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--temperature", "-1"], "--temperature is -1.0 and has to be at least 0"),
        (["--temperature", ".nan"], "--temperature is nan and has to be at least 0"),
        (["--top-p", "0"], "--top-p is 0.0 and has to be above 0 and at most 1"),
        (["--top-p", "1.5"], "--top-p is 1.5"),
    ],
)
def test_numbers_that_nothing_can_be_drawn_with_are_refused(
    place: Path, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    data, target = str(place / "data.jsonl"), str(place / "target")
    assert call("prepare", data, "--target", target, "--out", str(out), *words) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_prepare_does_not_end_well_without_an_answer(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "a"}\n{"messages": [{"role": "user", "content": "a"}]}\n')
    out = tmp_path / "out.jsonl"
    words = ("--target", str(place / "target"), "--out", str(out), "--dtype", "float32", "--device", "cpu")
    assert call("prepare", str(data), *words) == 2
    said = capsys.readouterr()
    assert "data.jsonl:1: no conversation" in said.out
    assert "data.jsonl:2: no turn of the assistant" in said.out
    assert "no conversation was written" in said.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_a_report_that_does_not_fit_on_the_disk_is_told_with_its_name(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    settings = str(place / "settings.yaml")
    assert call("train", "--config", settings, "--run.out", str(run), "--run.max_steps", "1") == 0
    words = ("--target", str(place / "target"), "--prompts", str(place / "data.jsonl"), "--limit", "1")
    more = ("--new-tokens", "2", "--device", "cpu", "--json", "/dev/full")
    assert call("eval", str(run / "export"), *words, *more) == 2
    assert "--json /dev/full cannot be written: [Errno 28]" in capsys.readouterr().err


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, link, real = tmp_path / "report.json", tmp_path / "link.json", tmp_path / "real.json"
    report.write_text("before")
    link.symlink_to(real)
    files.require_writable("--json", report)
    with monkeypatch.context() as full:
        full.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            files.write_whole(report, "after")
    assert report.read_text() == "before"
    files.write_whole(report, "after")
    files.require_writable("--json", link)
    files.write_whole(link, "linked")
    assert report.read_text() == "after"
    assert link.is_symlink()
    assert real.read_text() == "linked"
    assert sorted(tmp_path.iterdir()) == [link, real, report]


def test_the_demo_replaces_a_demo_and_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("run", "file"):
        assert call("demo", "--out", str(tmp_path / name)) == 2
        assert "holds something else" in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_text() == (tmp_path / "file").read_text() == "mine"

    def run_demo(out: Path) -> None:
        assert not out.exists()

    monkeypatch.setattr(demo, "run_demo", run_demo)
    (run / demo.MARK).touch()
    assert call("demo", "--out", str(run)) == 130
    assert "the same command begins anew" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target.model", "/no/where"], "no causal LM can be loaded"),
        (["--data.train", "[nowhere.jsonl]"], "nowhere.jsonl cannot be read"),
        (["--drafter.target_layer_ids", "[0,3]"], "is the last one"),
        (["--drafter.devices", "[cuda:9]"], "cuda:9 does not exist"),
        (["--data.train", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["--data.validation", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["--target.devices", "cuda:9"], "cuda:9 does not exist"),
        (["--data.max_length", "1"], "data.max_length is 1 and has to be at least 2"),
        (["--target.devices", "[]"], "target.devices names no device"),
        (["--data.bucket", "0"], "data.bucket is 0 and has to be at least 1"),
    ],
)
def test_mistakes_are_answered_with_one_line(
    place: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("train", "--config", str(place / "settings.yaml"), *words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert message in lines[-1]
    assert not any("Traceback" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--data.bucket", "many"], 'Parser key "data.bucket": Expected a'),
        (["train", "--data.trian", "x.jsonl"], "nrecognized arguments: --data.trian x.jsonl"),
        (["trian"], "argument COMMAND: invalid choice: 'trian'"),
        (["train", "--target", "Qwen/none"], "one of them is given as --target.model"),
        (["train", "--config", "{target: {model"], "while parsing a flow mapping at line 1, column 10"),
    ],
)
def test_words_that_are_no_settings_are_answered_with_one_line_and_not_with_all_settings(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        call(*words)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    prog = f"fxsafe dflash {words[0]}" if words[1:] else "fxsafe dflash"
    assert line.startswith(f"{prog}: ")
    assert message in line
    assert line.endswith(f"; see {prog} --help")


def test_one_name_in_a_file_of_settings_stands_for_a_list_of_one(place: Path, tmp_path: Path) -> None:
    listed = (place / "settings.yaml").read_text()
    single = listed.replace("devices: [cpu]", "devices: cpu").replace(
        f"train: [{place / 'data.jsonl'}]", f"train: {place / 'data.jsonl'}"
    )
    (tmp_path / "single.yaml").write_text(single)
    parsed = [
        cli._settings(cli._parser().parse_args(["train", "--config", str(path)])["train"])
        for path in (place / "settings.yaml", tmp_path / "single.yaml")
    ]
    assert single.count("[") == listed.count("[") - 2
    assert parsed[0] == parsed[1]
    assert DataSettings(train="x.jsonl").train == ("x.jsonl",)


def test_a_prompt_that_goes_beyond_the_targets_positions_is_refused_with_the_numbers(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "eval", str(place / "drafter"), "--target", str(place / "target"), "--prompts", str(place / "data.jsonl"),
        "--dtype", "float32", "--device", "cpu", "--new-tokens",
    )  # fmt: skip
    assert call(*words, "1000000") == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "data.jsonl:1: " in line
    assert "--new-tokens 1000000 take 1000" in line
    assert "the target has 32768; lower --new-tokens or --prompt-tokens (1024)" in line


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", '{"version": "1.0", "trunc'),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "[]"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer.json", None),
    ],
)
@pytest.mark.parametrize("command", ["train", "prepare"])
def test_a_tokenizer_that_is_broken_is_not_taken_for_none(
    place: Path, tmp_path: Path, command: str, name: str, text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    target = shutil.copytree(place / "target", tmp_path / "target")
    if text is None:
        (target / name).unlink()
    else:
        (target / name).write_text(text)
    words = {
        "train": ("--config", str(place / "settings.yaml"), "--target.model", str(target), "--run.out", "nowhere"),
        "prepare": (
            str(place / "data.jsonl"),
            "--target",
            str(target),
            "--out",
            str(tmp_path / "out"),
            "--device",
            "cpu",
        ),
    }[command]
    assert call(command, *words) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"fxsafe dflash {command}: the tokenizer of {target} cannot be loaded: ")
    assert not (tmp_path / "out").exists()


def test_a_target_without_a_tokenizer_has_none_and_not_an_empty_one(place: Path, tmp_path: Path) -> None:
    target = shutil.copytree(place / "target", tmp_path / "target")
    for file in target.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            file.unlink()
    assert load_tokenizer(str(target)) is None
    assert len(load_tokenizer(str(place / "target"))) == 35


def test_a_drafter_of_another_target_is_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = tiny.config(hidden_size=16)
    export_drafter(tiny.drafter(shape).state_dict(), shape, tmp_path / "small")
    words = ("eval", str(tmp_path / "small"), "--target", str(place / "target"), "--prompts", str(place / "data.jsonl"))
    assert call(*words, "--dtype", "float32", "--device", "cpu") == 2
    assert "is no drafter for" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--new-tokens", "0"], "--new-tokens is 0 and has to be at least 1"),
        (["--limit", "0"], "--limit is 0"),
        (["--json", "no/where.json"], "--json no/where.json cannot be written"),
        (["--drafter", "run"], "is a run and no drafter; fxsafe dflash export"),
        (["--drafter", "finished"], "is a run and no drafter; its drafter is"),
    ],
)
def test_what_cannot_be_evaluated_is_told_before_anything_is_loaded(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for name in ("checkpoints", "export"):
        (tmp_path / "finished" / name).mkdir(parents=True)
    if words[0] == "--drafter":
        drafter, words = str(tmp_path / words[1]), []
    else:
        drafter = "nowhere"
    assert call("eval", drafter, "--target", "/no/where", "--prompts", "none.jsonl", *words) == 2
    assert message in capsys.readouterr().err


def test_help_names_each_setting_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        call("train", "--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "tokens of a block, the given one included" in text
    assert "default: 16" in text
    assert "peak learning rate" in text


def test_a_missing_package_is_named_with_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "datasets" else real(name, *a))
    monkeypatch.delitem(sys.modules, "fxsafe.dflash.cli", raising=False)
    assert fxsafe.cli.main(["dflash", "train"]) == 2
    assert "the package datasets is missing: pip install 'fxsafe[dflash]'" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["plot", "run"], ["stress", "--modes", "plain"]])
def test_a_torch_that_is_too_old_is_refused(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.5.1+cpu"))
    assert call(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"fxsafe dflash {words[0]}: torch 2.5.1+cpu is installed, and the trainer needs 2.6 or")


def test_the_core_does_not_import_the_trainer() -> None:
    code = "import sys, fxsafe, fxsafe.cli; fxsafe.install(); print([m for m in sys.modules if 'dflash' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_only_public_names_of_fxsafe_are_used() -> None:
    seen = set()
    for file in (Path(fxsafe.__file__).parent / "dflash").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "fxsafe":
                names = {alias.name for alias in node.names}
                if not (node.module or "").startswith("fxsafe.dflash") and names != {"dflash"}:
                    assert node.module == "fxsafe", f"{file}:{node.lineno}: from {node.module}"
                    seen |= names
            elif isinstance(node, ast.Import):
                names = {alias.name for alias in node.names if alias.name.startswith("fxsafe.")}
                assert all(name.startswith("fxsafe.dflash") for name in names), f"{file}:{node.lineno}: {names}"
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "fxsafe":
                seen.add(node.attr)
    assert "install" in seen
    assert seen <= {*fxsafe.__all__, "__file__"}


@pytest.mark.parametrize("name", ["dflash_qwen3_8b.yaml", "dflash_one_gpu.yaml"])
def test_the_examples_are_settings(name: str) -> None:
    path = Path(__file__).parents[2] / "examples" / name
    options = cli._parser().parse_args(["train", "--config", str(path)])
    read = cli._settings(options["train"])
    assert read.drafter.block_size == 16
    assert len(read.target.devices) in (1, 5)
