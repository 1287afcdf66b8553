"""From a row to tokens and to which of them the target would have written itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fxsafe.dflash.batches import Example
from fxsafe.dflash.errors import DataError
from fxsafe.dflash.rows import BrokenRow

__all__ = ["conversation_of", "encoder", "ids_of", "mask_token"]

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def conversation_of(row: Mapping[str, Any]) -> list[dict[str, str]] | None:
    """The messages of a row in any of the three usual forms, None if it is of another kind.

    Raises:
        BrokenRow: a conversation with a part that is not understood.
    """
    turns = row.get("messages") or row.get("conversations")
    if turns is None:
        return None
    if not isinstance(turns, (list, tuple)):
        raise BrokenRow("the conversation is no list")
    out = []
    for turn in turns:
        if not isinstance(turn, Mapping):
            raise BrokenRow("a turn is no object")
        role = turn.get("role", turn.get("from"))
        text = turn.get("content", turn.get("value"))
        if not isinstance(role, str) or not isinstance(text, str):
            raise BrokenRow("a turn has no role and content, nor from and value")
        check_text(role)
        check_text(text)
        out.append({"role": _ROLES.get(role, role), "content": text})
    return out


def ids_of(row: Mapping[str, Any], rows: int) -> list[int]:
    """The ``input_ids`` of a row.

    Raises:
        BrokenRow: they are none, or not of a target with so many rows.
    """
    ids = row["input_ids"]
    if not isinstance(ids, (list, tuple)) or any(type(i) is not int for i in ids):
        raise BrokenRow("input_ids is no list of whole numbers")
    check_ids(ids, rows)
    return list(ids)


def check_text(text: str) -> None:
    """Raise BrokenRow for half a surrogate pair, which JSON may hold where a text was cut and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BrokenRow(f"its text is no Unicode: {error}") from None


def check_ids(ids: Sequence[int], rows: int) -> None:
    """Raise BrokenRow if one of them is not in an embedding of so many rows."""
    for token in ids:
        if not 0 <= token < rows:
            raise BrokenRow(f"token {token} is not in the target's vocabulary of {rows} rows")


def encoder(tokenizer: Any, rows: int) -> Callable[[Mapping[str, Any]], Example]:
    """The function that turns a row into an example.

    Args:
        tokenizer: of transformers; None if all rows hold ``input_ids``.
        rows: of the target's embedding; greater ids are refused.

    Returns:
        A function that raises BrokenRow, without the place of the row, and DataError for what is true of all rows.
    """

    def encode(row: Mapping[str, Any]) -> Example:
        if "input_ids" in row:
            ids = ids_of(row, rows)
            learn = row.get("loss_mask")
            learn = [1] * len(ids) if learn is None else learn
            if not isinstance(learn, (list, tuple)):
                raise BrokenRow("loss_mask is no list")
            if any(not isinstance(x, (int, float)) for x in learn):  # "0" would be true
                raise BrokenRow("loss_mask is no list of numbers")
            if len(learn) != len(ids):
                raise BrokenRow(f"{len(ids)} input_ids and {len(learn)} numbers in loss_mask")
        else:
            if tokenizer is None:
                raise BrokenRow("there is no tokenizer, and the row has no input_ids")
            turns = conversation_of(row)
            if turns is not None:
                if not tokenizer.chat_template:
                    raise DataError(
                        "the target's tokenizer has no chat template, so that conversations cannot be learnt from; "
                        'give rows with "text" or "input_ids", or a target that was trained to chat'
                    )
                ids, learn = encode_conversation(tokenizer, turns)
            elif isinstance(row.get("text"), str):
                check_text(row["text"])
                ids = tokenizer(row["text"])["input_ids"]
                learn = [True] * len(ids)
            else:
                raise BrokenRow("the row has none of messages, conversations, text and input_ids")
        check_ids(ids, rows)
        return Example(ids, [bool(x) for x in learn])

    return encode


def encode_conversation(tokenizer: Any, turns: Sequence[Mapping[str, str]]) -> tuple[list[int], list[bool]]:
    """Tokens of a conversation, and which of them are the assistant's, as the chat template says.

    A template with ``{% generation %}`` marks says it itself. Else the text of an assistant's turn is what the template
    adds to the turns before it and the prompt to generate; its end is the first end-of-text token in it, which the
    target writes too. Turns that the template rewrites later (removed thoughts, for one) are not learnt.

    Raises:
        BrokenRow: the template refuses the conversation.
    """
    template = tokenizer.chat_template or ""
    try:
        if "{% generation %}" in template or "{%- generation" in template:
            out = tokenizer.apply_chat_template(
                list(turns), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            return list(out["input_ids"]), [bool(x) for x in out["assistant_masks"]]
        whole = tokenizer.apply_chat_template(list(turns), tokenize=False)
        spans = [
            span
            for i, turn in enumerate(turns)
            if turn["role"] == "assistant" and (span := _span(tokenizer, turns, i, whole)) is not None
        ]
    except Exception as error:  # templates raise what their authors chose
        raise BrokenRow(f"the chat template refuses it: {error}") from error
    coded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    learn = [
        any(start <= first and last <= end for start, end in spans) and last > first
        for first, last in coded["offset_mapping"]
    ]
    return list(coded["input_ids"]), learn


def mask_token(tokenizer: Any, rows: int, named: int | None) -> int | None:
    """The row that stands for "to be drafted": the named one, the tokenizer's own, or the first that no token uses.

    Returns:
        None if there is no such row. Taking a token that has a meaning (padding is often the end of text) costs quality
        without any error, so that this is for the user to decide.
    """
    if named is not None:
        return named
    own = getattr(tokenizer, "mask_token_id", None)
    if own is not None and own < rows:
        return int(own)
    return len(tokenizer) if tokenizer is not None and len(tokenizer) < rows else None


def _span(tokenizer: Any, turns: Sequence[Mapping[str, str]], i: int, whole: str) -> tuple[int, int] | None:
    """Characters of the answer ``i`` in the whole text; None if the target was asked for none such."""
    if not i:
        return None  # nothing stands before it, and transformers applies no template to nothing
    before = tokenizer.apply_chat_template(list(turns[:i]), tokenize=False, add_generation_prompt=True)
    through = tokenizer.apply_chat_template(list(turns[: i + 1]), tokenize=False)
    if not whole.startswith(before) or not whole.startswith(through) or not through.startswith(before):
        return None
    start, end = len(before), len(through)
    if tokenizer.eos_token:
        at = whole.find(tokenizer.eos_token, start, end)
        if at >= 0:
            end = at + len(tokenizer.eos_token)
    return start, end
