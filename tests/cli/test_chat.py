"""The conversation of `tokenbus chat`, and what is said when it changes."""

from tokenbus.cli.commands.chat import ChatTurns
from tokenbus.client.wire.request_fields import ChatMessageFields


def answered(*questions: str, system: str | None = None) -> ChatTurns:
    conversation = ChatTurns(system)
    for question in questions:
        conversation.add(question, ChatMessageFields(role="assistant", content=f"answer to {question}"))
    return conversation


def texts(conversation: ChatTurns, question: str) -> list[object]:
    return [message["content"] for message in conversation.with_question(question)]


def test_a_question_follows_all_turns_and_the_system_message() -> None:
    assert texts(answered("one", system="be brief"), "two") == ["be brief", "one", "answer to one", "two"]


def test_undo_takes_back_one_turn_and_says_which() -> None:
    conversation = answered("one", "a long question " * 10)
    shown = "a long question a long question a long question a long ques…"
    assert conversation.undo() == f"took back '{shown}' and its answer; 1 turn left"
    assert texts(conversation, "next") == ["one", "answer to one", "next"]
    assert conversation.undo() == "took back 'one' and its answer; nothing is left"
    assert conversation.undo() == "there is nothing to take back"


def test_starting_over_forgets_everything_but_the_system_message() -> None:
    conversation = answered("one", "two", system="be brief")
    before = conversation.session_id
    assert conversation.start_over() == "started over, without 2 turns"
    assert texts(conversation, "next") == ["be brief", "next"]
    assert conversation.session_id != before
    assert conversation.start_over() == "started over: nothing had been said"
