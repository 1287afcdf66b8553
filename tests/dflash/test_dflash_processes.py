from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import test_dflash_train
import tiny
import torch

from fxsafe.dflash import checkpoint
from fxsafe.dflash.export import load_drafter
from fxsafe.dflash.journal import read_metrics
from fxsafe.dflash.processes import Processes
from fxsafe.dflash.target import Target
from fxsafe.dflash.train import Trainer

STEPS = 3
PROGRAM = """
import sys, pathlib, test_dflash_processes
test_dflash_processes.train(pathlib.Path(sys.argv[1]), ("cpu", "cpu"))
"""


def train(out: Path, devices: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    settings = test_dflash_train.settings(out, drafter__devices=devices, run__max_steps=STEPS, optim__lr=1e-3)
    target = Target(tiny.target_model("qwen3"))
    Trainer(settings, target=target, rows=test_dflash_train.rows(), say=lambda line: None).run(quiet=True)


def test_two_processes_of_two_drafters_are_one_of_four(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": str(Path(__file__).parent),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path / "two")]
    started = [subprocess.Popen(command, env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in (0, 1)]
    train(tmp_path / "one", ("cpu",) * 4)
    assert [process.wait(300) for process in started] == [0, 0]
    states = []
    for name in ("two", "one"):
        found = checkpoint.latest(tmp_path / name / "checkpoints")
        assert found is not None
        states.append(checkpoint.load_checkpoint(found))
    assert states[0][1]["position"] == states[1][1]["position"]
    for name, tensor in states[1][0].items():
        torch.testing.assert_close(states[0][0][name], tensor, atol=1e-4, rtol=1e-3)
    losses = [
        [r["loss"] for r in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in r] for name in ("two", "one")
    ]
    torch.testing.assert_close(*map(torch.tensor, losses), atol=1e-4, rtol=1e-4)


def test_one_process_needs_no_others() -> None:
    alone = Processes()
    assert alone.first
    assert alone.any(True)
    assert not alone.any(False)
    alone.wait()


def test_torchrun_runs_the_command_to_its_end_and_one_process_speaks(tmp_path: Path) -> None:
    tiny.target_model("qwen3").save_pretrained(tmp_path / "target")
    made = test_dflash_train.rows()
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(dict(made[i])) + "\n" for i in range(30)))
    document = test_dflash_train.settings(tmp_path / "run", run__max_steps=2).to_json()
    document["target"]["model"] = str(tmp_path / "target")
    document["data"]["train"] = [str(tmp_path / "data.jsonl")]
    (tmp_path / "settings.yaml").write_text(json.dumps(document))  # JSON is YAML too
    command = [
        sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "fxsafe", "dflash", "train", "--config", str(tmp_path / "settings.yaml"),
    ]  # fmt: skip
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("checkpoint ") == done.stdout.count("drafter    ") == 1
    assert load_drafter(tmp_path / "run" / "export")[0].target_layer_ids == (0, 2)
