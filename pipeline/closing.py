"""What a client is told of its request's way: the figures of a line, and when a request is over: of one choice, of one
prompt of a list, or of all there was.

Knows the calls of one body and nothing of the core. A request alone with one choice has one end; where a client gets
several choices each has its own, and the answer ends once every prompt of its body is over.
"""

from __future__ import annotations

from pipeline.call import Call
from pipeline.effects import Finish, Line
from pipeline.outbox import ChoiceEnd, End
from pipeline.summary import join, refused
from stages.logprobs import Entry


def progress(line: Line) -> dict[str, float | None] | None:
    """A line's figures as its client gets them (row L8); None where it does not want them."""
    if line.total:
        return {"rows_done": line.done, "rows_total": line.total}
    if line.position:
        return {"position": line.position, "estimate_s": line.estimate_s, "waited_s": line.waited_s}
    return None


def choice_ended(call: Call, choice: int, finish: str) -> ChoiceEnd:
    """One of several choices is complete."""
    call.choices_ended = choice + 1
    return ChoiceEnd(call.shown(choice), finish, call.rest())


def finished(call: Call, end: Finish, window: int, most_rows: int = 0) -> list[ChoiceEnd | End]:
    """A request is over: the end of the choice it was at, if that has one, and of the answer, if it was the last.

    ``most_rows``: the longest prompt that memory allows, 0: not known.
    """
    call.over()
    if end.code == "context_length_exceeded" and call.head.prompts:
        _too_long(call, window, most_rows)
    head = call.head
    head.ends.append(end)
    choice, rest = min(call.choices_ended, call.choices - 1), call.rest()
    listed = len(head.members) > 1
    if call.several and (not end.code or (listed and not refused(end))):
        one = ChoiceEnd(call.shown(choice), end.finish, rest, end.code)
        return [one, *_answer_ended(head, one.choice, True, [])]
    return [*_answer_ended(head, call.shown(choice), False, rest)]


def forgotten(call: Call) -> list[End]:
    """A request was given up: if another one of its body refused it, that one's end is the answer's."""
    call.over()
    return _answer_ended(call.head, 0, False, [])


def _answer_ended(head: Call, choice: int, closed: bool, rest: list[Entry]) -> list[End]:
    if not head.ends or not all(member.is_over for member in head.members):
        return []
    return [End(join(head.ends), head.message, head.param, rest, choice, closed)]


def _too_long(call: Call, window: int, most_rows: int) -> None:
    """Say which prompt does not fit, and by how much. A list is refused before it has members."""
    head, index = call.head, call.index
    sizes = [len(prompt) for prompt in head.prompts]
    if call is head:
        over = [at for at, size in enumerate(sizes) if size + 1 > window]
        beyond = [at for at, size in enumerate(sizes) if size > most_rows]
        index = [*over, *beyond, 0][0]
    head.param = "messages" if call.route == "chat" else f"prompt[{index}]" if len(sizes) > 1 else "prompt"
    if sizes[index] + 1 <= window:
        head.message = (
            f"The prompt has {sizes[index]} tokens. The workspace to read it does not fit in this machine's memory, "
            f"even with every cache given back: at most {most_rows} tokens fit. Shorten the prompt."
        )
        return
    head.message = (
        f"The prompt has {sizes[index]} tokens and the model's window is {window}; at least one must be left for the "
        "answer. Shorten the prompt."
    )
