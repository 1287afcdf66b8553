from __future__ import annotations

import errno
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import tokens
import torch

from fxsafe.dflash.batches import MicroBatch
from fxsafe.dflash.chat import conversation_of, encoder, mask_token
from fxsafe.dflash.errors import DataError
from fxsafe.dflash.prepare import prepare
from fxsafe.dflash.rows import BrokenRow, JsonLines, Stream, Table, open_rows, open_stream, split_rows
from fxsafe.dflash.stream import Examples, micro_batches
from fxsafe.dflash.target import Target

TURNS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "a=yes"},
    {"role": "user", "content": "and"},
    {"role": "assistant", "content": "b=no"},
]


def learnt(tokenizer: Any, row: dict[str, Any]) -> list[str]:
    """The stretches of text that are learnt."""
    example = encoder(tokenizer, 64)(row)
    out = []
    for learn, group in itertools.groupby(zip(example.ids, example.learn, strict=True), key=lambda pair: pair[1]):
        if learn:
            out.append("".join(tokenizer.convert_ids_to_tokens([i for i, _ in group])))
    return out


@pytest.mark.parametrize("template", [tokens.PLAIN, tokens.MARKED], ids=["plain", "marked"])
def test_only_the_assistants_words_and_its_end_are_learnt(template: str) -> None:
    assert learnt(tokens.tokenizer(template), {"messages": TURNS}) == ["a=yes<|end|>", "b=no<|end|>"]


def test_a_turn_that_the_template_rewrites_is_not_learnt() -> None:
    assert learnt(tokens.tokenizer(tokens.FORGETFUL), {"messages": TURNS}) == ["b=no<|end|>"]


def test_a_conversation_that_the_assistant_begins_is_learnt_from_its_second_answer_on() -> None:
    turns = [{"role": "assistant", "content": "hello"}, *TURNS[:2]]
    assert learnt(tokens.tokenizer(), {"messages": turns}) == ["a=yes<|end|>"]


def test_the_three_forms_of_a_conversation_are_one() -> None:
    plain = {"conversations": TURNS}
    shared = {
        "conversations": [
            {"from": {"user": "human", "assistant": "gpt"}[t["role"]], "value": t["content"]} for t in TURNS
        ]
    }
    assert conversation_of({"messages": TURNS}) == conversation_of(plain) == conversation_of(shared) == TURNS
    assert conversation_of({"text": "x"}) is None


def test_plain_text_is_learnt_whole() -> None:
    assert learnt(tokens.tokenizer(), {"text": "hello you"}) == ["hello you"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"role": "user"}]}, "no role and content"),
        ({"messages": "hi"}, "no list"),
        ({"messages": [3]}, "no object"),
        ({"other": 1}, "has none of"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "2 input_ids and 1"),
        ({"input_ids": "ab"}, "input_ids is no list of whole numbers"),
        ({"input_ids": [1, 2.5]}, "input_ids is no list of whole numbers"),
        ({"input_ids": [1, 2], "loss_mask": 1}, "loss_mask is no list"),
        ({"input_ids": [1, 2], "loss_mask": ["0", "1"]}, "loss_mask is no list of numbers"),
        ({"input_ids": [1, -1]}, "token -1 is not in"),
        ({"input_ids": [64]}, "token 64 is not in the target's vocabulary of 64 rows"),
    ],
)
def test_rows_that_cannot_be_understood_say_why(row: dict[str, Any], message: str) -> None:
    with pytest.raises(BrokenRow, match=message):
        encoder(tokens.tokenizer(), 64)(row)


def test_conversations_without_a_chat_template_end_the_run_at_once() -> None:
    tokenizer = tokens.tokenizer()
    tokenizer.chat_template = None
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}]
    with pytest.raises(DataError, match="no chat template"):
        encoder(tokenizer, 64)({"messages": turns})


def test_the_mask_token_is_the_first_row_without_a_token() -> None:
    tokenizer = tokens.tokenizer()
    assert mask_token(tokenizer, 64, None) == len(tokenizer)
    assert mask_token(tokenizer, 64, 5) == 5
    assert mask_token(tokenizer, len(tokenizer), None) is None
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    assert mask_token(tokenizer, 64, None) == tokenizer.mask_token_id


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    good = [json.dumps({"text": f"text {c} of some length"}) for c in "abcdefgh"]
    path.write_text("\n".join([good[0], "", '{"text": "cut', *good[1:], "[1]"]) + "\n")
    return path


def examples(rows: Any, said: list[str] | None = None, **changes: Any) -> Examples:
    values: dict[str, Any] = {"seed": 1, "max_length": 100, "report": (said if said is not None else []).append}
    return Examples(rows, encoder(tokens.tokenizer(), 64), **(values | changes))


def test_a_broken_line_is_reported_with_file_and_line_and_left_out(lines: Path) -> None:
    said: list[str] = []
    stream = examples(JsonLines(lines), said)
    seen = {next(stream).origin for _ in range(8)}
    assert len(seen) == 8
    next(stream)
    assert stream.epoch == 1
    assert sorted(line.partition(": no")[0] for line in set(said)) == [f"left out: {lines}:11", f"left out: {lines}:3"]


def test_many_broken_lines_are_told_once_and_then_counted(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("[1]\n" * 50 + '{"text": "text a of some length"}\n')
    said: list[str] = []
    stream = examples(JsonLines(path), said)
    for _ in range(3):
        next(stream)
    assert len(set(said)) == len(said) == 21
    assert said[-1] == "data.train: further rows that are left out are only counted"
    assert stream.counts.broken >= 100


def test_one_row_among_many_that_are_broken_is_found_in_every_epoch(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("[1]\n" * 9 + '{"text": "text a of some length"}\n')
    stream = examples(JsonLines(path))
    assert {next(stream).origin for _ in range(40)} == {f"{path}:10"}
    assert stream.epoch in (39, 40)


def test_an_epoch_without_anything_to_learn_is_refused_with_its_counts(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("[1]\n" * 3 + '{"input_ids": [1, 2], "loss_mask": [0, 0]}\n')
    stream = examples(JsonLines(path), name="some rows")
    stream.seek({"epoch": 4, "offset": 2})
    with pytest.raises(DataError, match=r"some rows: none of 4 rows .* 3 broken, 0 too long, 1 without"):
        next(stream)


def test_a_broken_line_ends_the_run_if_asked(lines: Path) -> None:
    stream = examples(JsonLines(lines), on_error="refuse")
    with pytest.raises(DataError, match=r"data\.jsonl:(3|11): no JSON"):
        list(itertools.islice(stream, 9))


def test_an_epoch_holds_each_row_once_in_an_order_of_its_own(lines: Path) -> None:
    stream = examples(JsonLines(lines))
    first, second = ([next(stream).origin for _ in range(8)] for _ in range(2))
    assert sorted(first) == sorted(second)
    assert first != second


def test_a_stream_goes_on_from_any_position(lines: Path) -> None:
    whole = examples(JsonLines(lines))
    for count in range(20):
        again = examples(JsonLines(lines))
        again.seek(json.loads(json.dumps(whole.position)))
        assert next(again).origin == next(whole).origin, count


@pytest.mark.parametrize(("too_long", "kept"), [("truncate", [4, 6, 6]), ("skip", [4, 6])])
def test_long_sequences_are_cut_or_left_out(too_long: str, kept: list[int]) -> None:
    rows = Table([{"input_ids": [5] * n} for n in (4, 6, 9)], "made")
    stream = examples(rows, max_length=6, too_long=too_long, shuffle=False)
    assert [len(next(stream).ids) for _ in kept] == kept
    assert stream.counts.too_long == (too_long == "truncate") or stream.epoch == 0


def test_long_sequences_are_refused_if_asked() -> None:
    stream = examples(Table([{"input_ids": [5] * 9}], "made"), max_length=6, too_long="refuse")
    with pytest.raises(DataError, match=r"made, row 0: 9 tokens, and data\.max_length is 6"):
        next(stream)


def batches_of(rank: int, world: int, count: int) -> list[MicroBatch]:
    stream = examples(Table([{"input_ids": [5 + n] * (6 + n)} for n in range(12)], "made"))
    made = micro_batches(stream, seed=3, batch_size=2, anchors=3, bucket=8, rank=rank, world=world)
    return list(itertools.islice(made, count))


def test_processes_share_out_the_micro_batches_of_one() -> None:
    alone = batches_of(0, 1, 8)
    parts = [batches_of(rank, 2, 4) for rank in (0, 1)]
    together = [b for pair in zip(*parts, strict=True) for b in pair]
    for ours, theirs in zip(together, alone, strict=True):
        assert ours.index == theirs.index
        assert torch.equal(ours.ids_BS, theirs.ids_BS)
        assert torch.equal(ours.anchors_BN, theirs.anchors_BN)
    assert parts[0][-1].position == parts[1][-1].position == alone[-1].position
    assert {b.ids_BS.shape[1] % 8 for b in alone} == {0}


def parquet(path: Path, count: int = 23) -> Path:
    import datasets

    datasets.Dataset.from_list([{"text": f"text {i} of some length"} for i in range(count)]).to_parquet(str(path))
    return path


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_stream_gives_each_row_once_an_epoch_in_an_order_of_its_own(kind: str, tmp_path: Path) -> None:
    path = parquet(tmp_path / "rows.parquet")
    name = str(path if kind == "file" else path.parent)
    stream = examples(open_stream([name], 5))
    epochs = [[next(stream).origin for _ in range(23)] for _ in range(2)]
    assert set(epochs[0]) == set(epochs[1]) == {f"{name}, row {i}" for i in range(23)}
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        for start in range(0, 23, 5):
            assert set(epoch[start : start + 5]) == {f"{name}, row {i}" for i in range(start, min(start + 5, 23))}
    assert stream.epoch == 1


@pytest.mark.parametrize("window", [1, 4, 23, 100])
def test_a_stream_that_is_read_goes_on_from_any_position(window: int, tmp_path: Path) -> None:
    path = str(parquet(tmp_path / "rows.parquet"))
    whole = examples(open_stream([path], window))
    seen, places = [], []
    for _ in range(60):
        places.append(dict(whole.position))
        seen.append(next(whole).origin)
    for at in (0, 3, 4, 22, 23, 24, 50):
        again = examples(open_stream([path], window))
        again.seek(json.loads(json.dumps(places[at])))
        assert [next(again).origin for _ in range(9)] == seen[at : at + 9]
    for at in (50, 2, 30):  # the same object, back and forth
        whole.seek(places[at])
        assert [next(whole).origin for _ in range(9)] == seen[at : at + 9]


def test_several_streams_are_read_one_behind_the_other(tmp_path: Path) -> None:
    names = [str(parquet(tmp_path / f"{name}.parquet", count)) for name, count in (("a", 3), ("b", 4))]
    stream = examples(open_stream(names, 2), shuffle=False)
    expected = [f"{name}, row {i}" for name, count in zip(names, (3, 4), strict=True) for i in range(count)]
    assert [next(stream).origin for _ in range(8)] == [*expected, expected[0]]


def test_what_cannot_be_streamed_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line by line in any case"):
        open_stream(["a.jsonl"], 2)
    with pytest.raises(DataError, match=r"nowhere\.parquet does not exist"):
        open_stream([str(tmp_path / "nowhere.parquet")], 2)
    with pytest.raises(DataError, match=r"data\.train is empty"):
        open_stream([], 2)

    def failing() -> Iterator[dict[str, Any]]:
        yield {"text": "text a of some length"}
        raise OSError("the network is gone")

    with pytest.raises(DataError, match="far away, row 0 or a later one cannot be read: OSError: the network is gone"):
        next(examples(Stream([("far away", failing())], 2)))


def test_parquet_is_read_by_number(tmp_path: Path) -> None:
    import datasets

    table = datasets.Dataset.from_list([{"text": "one"}, {"text": "two"}])
    table.to_parquet(str(tmp_path / "x.parquet"))
    rows = open_rows([str(tmp_path / "x.parquet"), str(tmp_path / "x.parquet")])
    assert [rows[i]["text"] for i in range(len(rows))] == ["one", "two", "one", "two"]
    assert rows.origin(3).endswith("x.parquet, row 1")


@pytest.mark.parametrize("name", ["nowhere.jsonl", "nowhere.parquet", "no/such/place"])
def test_data_that_do_not_exist_are_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=name):
        open_rows([name])


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="not a single row"):
        open_rows([str(tmp_path / "x.jsonl")])


def test_the_validation_rows_are_apart_and_always_the_same() -> None:
    rows = Table([{"input_ids": [n]} for n in range(50)], "made")
    train, held = split_rows(rows, 0.1, 3)
    numbers = [[part.origin(i) for i in range(len(part))] for part in (train, held)]
    assert len(numbers[1]) == 5
    assert not set(numbers[0]) & set(numbers[1])
    assert [len(part) for part in split_rows(rows, 0.0, 3)] == [50, 0]
    again = split_rows(rows, 0.1, 3)[1]
    assert [again.origin(i) for i in range(5)] == numbers[1]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny.target_model("qwen3"))


def test_answers_are_written_by_the_target_and_a_second_run_goes_on(target: Target, tmp_path: Path) -> None:
    tokenizer = tokens.tokenizer()
    rows = Table([{"messages": TURNS}, {"text": "none"}, {"messages": TURNS[:2]}], "made")
    said: list[str] = []
    words: dict[str, Any] = {"new_tokens": 5, "say": said.append}
    out = tmp_path / "out.jsonl"
    assert prepare(target, tokenizer, rows, out, limit=1, **words) == 1
    out.write_text(out.read_text() + '{"id": 2, "mess')
    assert prepare(target, tokenizer, rows, out, **words) == 2
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in written] == [0, 2]
    assert said == ["left out: made, row 1: no conversation"]
    ids = tokenizer("<|user|>hi<|end|>\n<|assistant|>", add_special_tokens=False)["input_ids"]
    answer: list[int] = []
    while len(answer) < 5 and answer[-1:] != [tokenizer.eos_token_id] and answer[-1:] != [2]:
        answer.append(int(target.forward(torch.tensor([ids + answer]), ())[0][0, -1].argmax()))
    assert written[0]["messages"][1]["content"] == tokenizer.decode(answer, skip_special_tokens=True)


@pytest.mark.parametrize(
    "text",
    [
        '{"messages": []}\n',
        '{"id": "a", "messages": []}\n',
        '{"id": 0, "messages": []}\n{"text": "mine"}\n',
        '{"text": "no end of line"}',
        "words",
        "notes",
        '{"id": 0, "messages": []}\n[]\n',
        '{"id": "a"}\n',
        '{"id": 0, "mess\n{"id": 1, "messages": []}\n',
    ],
)
def test_a_file_that_prepare_did_not_write_is_left_as_it_is(target: Target, text: str, tmp_path: Path) -> None:
    out = tmp_path / "mine.jsonl"
    out.write_text(text)
    with pytest.raises(DataError, match=r"mine\.jsonl:\d was not written by prepare"):
        prepare(target, tokens.tokenizer(), Table([{"messages": TURNS}], "made"), out, new_tokens=2)
    assert out.read_text() == text


def test_a_last_line_that_lacks_only_its_end_is_kept(target: Target, tmp_path: Path) -> None:
    rows = Table([{"messages": TURNS[:2]}] * 2, "made")
    out = tmp_path / "out.jsonl"
    prepare(target, tokens.tokenizer(), rows, out, new_tokens=2)
    whole = out.read_text()
    first = whole.splitlines()[0]
    for cut in (first, first + "\n", first + '\n{"i', whole[:-1]):
        out.write_text(cut)
        assert prepare(target, tokens.tokenizer(), rows, out, new_tokens=2) == 2
        assert out.read_text() == whole


def test_a_full_disk_is_told_with_the_file_and_costs_nothing_that_was_written(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Table([{"messages": TURNS[:2]}] * 2, "made")
    whole = tmp_path / "whole.jsonl"
    prepare(target, tokens.tokenizer(), rows, whole, new_tokens=2)
    out = tmp_path / "out.jsonl"
    room = whole.stat().st_size - 5
    real = Path.open

    class Full:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *error: object) -> None:
            self.stream.close()

        def write(self, data: bytes) -> int:
            nonlocal room
            if not room:
                raise OSError(errno.ENOSPC, "No space left on device")
            taken = self.stream.write(data[:room])
            room -= taken
            return int(taken)

    def smaller(path: Path, mode: str = "r", **words: Any) -> Any:
        return Full(real(path, mode, **words)) if mode == "ab" else real(path, mode, **words)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", smaller)
        with pytest.raises(DataError, match=r"out\.jsonl cannot be written: .*No space left.*the same command goes on"):
            prepare(target, tokens.tokenizer(), rows, out, new_tokens=2)
    assert out.stat().st_size == whole.stat().st_size - 5
    assert prepare(target, tokens.tokenizer(), rows, out, new_tokens=2) == 2
    assert out.read_bytes() == whole.read_bytes()


def test_sampled_answers_are_the_same_for_the_same_seed(target: Target, tmp_path: Path) -> None:
    rows = Table([{"messages": TURNS[:2]}], "made")
    texts = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        out = tmp_path / name
        prepare(target, tokens.tokenizer(), rows, out, new_tokens=12, temperature=1.0, top_p=0.9, seed=seed)
        texts.append(out.read_text())
    assert texts[0] == texts[1] != texts[2]


def test_half_characters_and_bottomless_lines_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(
        b'{"text": "abc"}\n{"text": "a \\ud83d b"}\n{"text": ' + b"[" * 200_000 + b"\n"
        b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\\ude00"}]}\n'
    )
    said: list[str] = []
    stream = examples(open_rows([str(file)]), said)
    for _ in range(2):
        next(stream)
    assert sorted(line.split(": ")[1].rpartition(":")[2] for line in said) == ["2", "3", "4"]
    assert sum("surrogates not allowed" in line for line in said) == 2


def test_answers_go_on_where_the_first_line_was_cut_off(target: Target, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text('{"i')
    assert prepare(target, tokens.tokenizer(), Table([{"messages": TURNS}], "made"), out, new_tokens=5) == 1
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == [0]


def test_answers_end_with_the_targets_positions_and_it_is_said(tmp_path: Path) -> None:
    tokenizer = tokens.tokenizer()
    rows = Table([{"messages": TURNS[:2]}, {"messages": [{"role": "user", "content": "a" * 40}, TURNS[1]]}], "made")
    before = len(tokenizer("<|user|>hi<|end|>\n<|assistant|>", add_special_tokens=False)["input_ids"])
    target = Target(tiny.target_model("qwen3", eos_token_id=None, max_position_embeddings=before + 3))
    longest: list[int] = []
    plain = target.forward

    def forward(ids: torch.Tensor, taps: Any, cache: Any = None, **words: Any) -> Any:
        longest.append(ids.shape[1] + (cache.get_seq_length() if cache is not None else 0))
        return plain(ids, taps, cache, **words)

    target.forward = forward  # type: ignore[method-assign]
    said: list[str] = []
    out = tmp_path / "out.jsonl"
    assert prepare(target, tokenizer, rows, out, new_tokens=50, say=said.append) == 1
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == [0]
    assert said == [
        f"made, row 0: an answer is cut off after 3 tokens, where the target's {before + 3} positions end "
        f"({before} are taken by what stands before it)",
        f"made, row 1: left out from where it has 44 tokens, as the target has {before + 3} positions",
    ]
    assert max(longest) <= before + 3
