"""The beginning of a turn in a chat, and its messages."""

from typing import Any

from services.tokenizer.history.turns import Turns

SYSTEM, DEVELOPER = ({"role": role, "content": role} for role in ("system", "developer"))
CALL = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f"}}]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "r"}
OLD_CALL = {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}
OLD_RESULT = {"role": "function", "name": "f", "content": "r"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def rests(*messages: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The rest after the removal of each number of turns."""
    turns = Turns(list(messages))
    return [turns.without_first(num) for num in range(len(turns))]


def test_a_turn_is_a_user_message_and_its_answers():
    chat = [user("a"), answer("b"), user("c"), answer("d"), user("e")]
    assert rests(*chat) == [chat, chat[2:], chat[4:]]


def test_instructions_stay_wherever_they_are():
    chat = [SYSTEM, user("a"), answer("b"), DEVELOPER, user("c"), SYSTEM]
    assert rests(*chat) == [chat, [SYSTEM, DEVELOPER, user("c"), SYSTEM]]


def test_consecutive_user_messages_are_one_turn():
    chat = [user("a"), SYSTEM, user("b"), answer("c"), user("d"), user("e")]
    assert rests(*chat) == [chat, [SYSTEM, user("d"), user("e")]]


def test_messages_before_the_first_user_belong_to_the_first_turn():
    chat = [answer("Hello"), user("a"), answer("b"), user("c"), answer("d")]
    assert rests(*chat) == [chat, chat[3:]]


def test_a_call_and_its_result_do_not_part():
    for call, result in ((CALL, RESULT), (OLD_CALL, OLD_RESULT)):
        chat = [user("a"), answer("b"), user("c"), call, result, answer("d"), user("e")]
        assert rests(*chat) == [chat, chat[2:], chat[6:]]
        chat = [user("a"), answer("b"), user("c"), call, user("d"), result, answer("e"), user("f")]
        assert rests(*chat) == [chat, chat[2:], chat[7:]]


def test_a_result_without_a_call_is_where_it_is():
    chat = [user("a"), answer("b"), user("c"), RESULT, user("d")]
    assert rests(*chat) == [chat, chat[2:], chat[4:]]


def test_no_chat_is_without_a_turn():
    for chat in ([], [SYSTEM], [answer("a")], [user("a")]):
        assert rests(*chat) == [chat]


def test_instructions_have_no_size():
    sizes = Turns([SYSTEM, user("ä"), answer("b"), user("")]).sizes()
    assert sizes == [
        len(b'{"role":"user","content":"\xc3\xa4"}{"role":"assistant","content":"b"}'),
        len(b'{"role":"user","content":""}'),
    ]
