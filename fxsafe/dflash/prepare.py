"""``fxsafe dflash prepare``: answers of a data set, written anew by the target itself.

A drafter has to guess what the target says, so that it learns best from what the target has said.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxsafe.dflash.chat import conversation_of
from fxsafe.dflash.errors import DataError
from fxsafe.dflash.rows import BrokenRow, Rows
from fxsafe.dflash.sessions import TargetSession
from fxsafe.dflash.target import Target

__all__ = ["prepare", "sample"]

_BEGIN = b'{"id": '
"""of each line that is written here"""


def sample(
    target: Target,
    prompt: list[int],
    *,
    new_tokens: int,
    stop: set[int],
    temperature: float,
    top_p: float,
    generator: torch.Generator,
) -> list[int]:
    """Continue a prompt; greedily at temperature 0, else from the smallest set of tokens with probability ``top_p``."""
    session = TargetSession(target, ())
    logits, _ = session.feed(torch.tensor([prompt], device=target.device), last=True)
    session.keep(session.length)
    out: list[int] = []
    while True:
        out.append(_draw(logits[0, -1], temperature, top_p, generator))
        if len(out) >= new_tokens or out[-1] in stop:
            return out
        logits, _ = session.feed(torch.tensor([[out[-1]]], device=target.device), last=True)
        session.keep(session.length)


def prepare(
    target: Target,
    tokenizer: Any,
    rows: Rows,
    out: Path,
    *,
    new_tokens: int = 2048,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    limit: int | None = None,
    say: Callable[[str], None] = print,
) -> int:
    """Write each conversation anew, turn by turn, as a line of JSON; goes on behind the lines that stand there already.

    Args:
        target: writes the answers.
        tokenizer: with a chat template.
        rows: conversations.
        out: JSONL; appended to.
        new_tokens: of an answer; a conversation whose answer does not end within them, or within the target's
            positions, is left out from there on.
        temperature: 0 for greedy. Use the settings that the target is served with.
        top_p: of sampling.
        seed: together with the number of the row decides what is drawn.
        limit: rows at most.
        say: prints a line.

    Returns:
        Lines in the file.

    Raises:
        DataError: no chat template, or a file that cannot be written or holds something else.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise DataError("the tokenizer has no chat template, so that conversations cannot be put to the target")
    stop = {t for t in [tokenizer.eos_token_id, *_many(target.text_config.eos_token_id)] if t is not None}
    try:
        done = _finished(out)
        out.open("a").close()
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error}") from error
    total = min(len(rows), limit or len(rows))
    with out.open("ab", buffering=0) as stream:
        for number in range(total):
            if number in done:
                continue
            try:
                turns = conversation_of(rows[number])
            except BrokenRow as error:
                say(f"left out: {error.at(rows.origin(number))}")
                continue
            if turns is None:
                say(f"left out: {rows.origin(number)}: no conversation")
                continue
            if not any(turn["role"] == "assistant" for turn in turns):
                say(f"left out: {rows.origin(number)}: no turn of the assistant, which would be written anew")
                continue
            generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
            answered: list[dict[str, str]] = []
            full = False
            for turn in turns:
                if turn["role"] != "assistant":
                    answered.append(turn)
                    continue
                text = tokenizer.apply_chat_template(answered, tokenize=False, add_generation_prompt=True)
                prompt = list(tokenizer(text, add_special_tokens=False)["input_ids"])
                room = new_tokens if target.positions is None else min(new_tokens, target.positions - len(prompt))
                if full := room < 1:
                    say(
                        f"{rows.origin(number)}: left out from where it has {len(prompt)} tokens, as the target has "
                        f"{target.positions} positions"
                    )
                    break
                said = sample(
                    target,
                    prompt,
                    new_tokens=room,
                    stop=stop,
                    temperature=temperature,
                    top_p=top_p,
                    generator=generator,
                )
                answered.append({"role": "assistant", "content": tokenizer.decode(said, skip_special_tokens=True)})
                if said[-1] not in stop:
                    if room < new_tokens:
                        say(
                            f"{rows.origin(number)}: an answer is cut off after {room} tokens, where the target's "
                            f"{target.positions} positions end ({len(prompt)} are taken by what stands before it)"
                        )
                    break
            if full and not any(turn["role"] == "assistant" for turn in answered):
                continue
            _append(stream, out, json.dumps({"id": number, "messages": answered}) + "\n")
            done.add(number)
            if len(done) % 100 == 0:
                say(f"{len(done)} of {total}")
    return len(done)


def _draw(logits_V: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    if temperature <= 0:
        return int(logits_V.argmax())
    chance, token = (logits_V.float().cpu() / temperature).softmax(-1).sort(descending=True)
    chance[chance.cumsum(-1) - chance >= top_p] = 0
    return int(token[torch.multinomial(chance, 1, generator=generator)])


def _append(stream: io.FileIO, out: Path, line: str) -> None:
    rest = line.encode()
    try:
        while rest:  # a disk that is nearly full takes a part
            rest = rest[stream.write(rest) or 0 :]
    except OSError as error:
        raise DataError(
            f"{out} cannot be written: {error}; what it holds is kept, and the same command goes on"
        ) from error


def _finished(path: Path) -> set[int]:
    """Numbers of the rows that are written; a last line that was cut off is removed, and nothing else is touched.

    Raises:
        DataError: a line that was not written here.
    """
    if not path.exists():
        return set()
    done: set[int] = set()
    with path.open("rb+") as stream:
        at = 0
        for line_number, line in enumerate(stream, 1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not line.endswith(b"\n") and row is None and (line.startswith(_BEGIN) or _BEGIN.startswith(line)):
                stream.truncate(at)
                break
            if not (isinstance(row, dict) and isinstance(row.get("id"), int) and isinstance(row.get("messages"), list)):
                raise DataError(f"{path}:{line_number} was not written by prepare; choose another file to write")
            done.add(row["id"])
            at += len(line)
            if not line.endswith(b"\n"):
                stream.seek(at)
                stream.write(b"\n")
                break
    return done


def _many(token: Any) -> list[Any]:
    return list(token) if isinstance(token, (list, tuple)) else [token]
