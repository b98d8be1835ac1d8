from fnmatch import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages import clients
from stages.clients import KINDS, SIDES, Client, format_for, kind, progress_kinds, reasoning_formats
from tests.captures import sent

AIOHTTP = {"User-Agent": "Python/3.11 aiohttp/3.14.5"}
PYTHON = {"user-agent": "OpenAI/Python 3.57.0", "x-stainless-lang": "python", "x-stainless-read-timeout": "600"}

FILES = (
    ("aider*", "aider"), ("cline*", "cline"), ("codex*", "codex"), ("continue-cli*", "continue"),
    ("hermes*", "hermes"), ("open-webui*", "open-webui"), ("opencode*", "opencode"), ("qwen-code*", "qwen-code"),
    ("guidellm*", "benchmark"), ("vllm-bench*", "benchmark"), ("promptfoo*", "benchmark"),
    ("openai-*", "openai-sdk"), ("instructor*", "openai-sdk"), ("langchain-*", "openai-sdk"),
    ("llm-*", "openai-sdk"), ("litellm*", "openai-sdk"), ("ai-sdk-*", "other"), ("schemathesis*", "other"),
)  # fmt: skip
"""Who wrote a capture, by its file's name."""
OTHERS = {
    "litellm.jsonl": (4, 5, 6, 7, 9),  # its own client, with its own name in the header
    "open-webui.jsonl": (18,),  # passed through for a script: nothing but aiohttp's header
    "open-webui-503.jsonl": (2,),
}
"""Lines of a file that tell of no client."""
SIDE = {
    "open-webui.jsonl": {
        3: "follow-ups", 4: "title", 5: "tags", 8: "follow-ups", 9: "title", 10: "tags", 11: "title", 12: "tags",
        13: "follow-ups", 14: "emoji", 15: "queries", 16: "mixture", 17: "image-prompt",
    },
    "open-webui-503.jsonl": {4: "follow-ups", 5: "title", 6: "tags"},
    "hermes-title.jsonl": {0: "title"},
    "opencode.jsonl": {0: "title"},
    "opencode-compaction.jsonl": {0: "title", 2: "compaction"},
    "opencode-qwen-model-id.jsonl": {0: "title"},
    "opencode-reasoning-off.jsonl": {0: "title"},
    "opencode-variant-high.jsonl": {0: "title"},
    "opencode-429.jsonl": {0: "title", 2: "title"},
    "opencode-503.jsonl": {0: "title", 2: "title"},
    "codex-compaction.jsonl": {1: "compaction"},
}  # fmt: skip
"""Side requests by file and line, read off the captures; every other line is a turn."""


def test_every_captured_request():
    """Q2: kind and side request of every captured body, those of the other routes too."""
    seen = 0
    for _, name, line, _, body, headers in sent():
        expected = next(kind for pattern, kind in FILES if fnmatch(name, pattern))
        expected = "other" if line in OTHERS.get(name, ()) else expected
        assert kind(body, headers) == Client(expected, SIDE.get(name, {}).get(line, "")), (name, line)
        seen += 1
    assert seen > 150


def test_the_body_alone():
    """Q2: agents that hide behind a library's header are told by their bodies without any header."""
    bare = ("open-webui", "hermes", "cline", "continue", "aider", "opencode", "codex", "qwen-code")
    for _, name, line, _, body, headers in sent():
        client = kind(body, headers)
        if client.kind in bare:
            assert kind(body, {}) == client, (name, line)
            assert kind(body, PYTHON) == client, (name, line)


def ask(text="hi", system=None, tools=(), headers=None, **fields):
    messages = [{"role": "system", "content": system}] if system else []
    body = {"messages": [*messages, {"role": "user", "content": text}], **fields}
    if tools:
        body["tools"] = [{"type": "function", "function": {"name": name}} for name in tools]
    return kind(body, headers or {})


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (AIOHTTP, "other"),
        ({}, "other"),
        (PYTHON, "openai-sdk"),
        ({"User-Agent": "AsyncOpenAI/Python 2.54.0"}, "openai-sdk"),
        ({"User-Agent": "curl/8.5.0"}, "curl"),
        ({"User-Agent": "Zed/0.200.1 (linux; x86_64)"}, "zed"),
        ({"User-Agent": "RooCode/3.30.0", "X-Stainless-Lang": "js"}, "roo"),
        ({"User-Agent": "claude-cli/2.1.0 (external, cli)"}, "claude-code"),
        ({"User-Agent": "codex_cli_rs/0.171.0"}, "codex"),
        ({"USER-AGENT": "opencode/1.18.33 ai-sdk/provider-utils/4.0.23"}, "opencode"),
        ({**AIOHTTP, "X-OpenWebUI-Chat-Id": "c"}, "open-webui"),
        ({"User-Agent": "ai/6.0.326 ai-sdk/provider-utils/4.0.65"}, "other"),
        ({"User-Agent": "OpenAI/Python 2.24.0", "x-stainless-read-timeout": "1800.0"}, "hermes"),
        ({"User-Agent": "OpenAI/Python 2.54.0", "x-stainless-read-timeout": "1800.0"}, "openai-sdk"),
        ({"User-Agent": "not curl/8"}, "other"),
    ],
)
def test_the_headers(headers, expected):
    """Q2: where the body tells nothing the headers do; aiohttp alone is other; names in any case."""
    assert ask(headers=headers) == Client(expected, "")


@pytest.mark.parametrize("opening", [tell.opening for tell in clients.TELLS if tell.where == "alone"])
def test_a_side_prompt_stands_alone(opening):
    """K1: with tools offered or a conversation around it, the same words are somebody's turn."""
    assert ask(opening + " and more").side
    assert ask(opening + " and more", system="Be brief.").side
    assert not ask(opening + " and more", tools=["get_weather"]).side
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    assert not kind({"messages": [*history, {"role": "user", "content": opening}]}, {}).side
    assert not ask("I found this prompt: " + opening).side


def test_body_before_headers():
    """Q2: Hermes and Open WebUI by prompt or tools, whatever the header; benchmarks by their fields, after those."""
    assert ask(system="You are Hermes Agent, an assistant.", headers={"User-Agent": "curl/8.5"}).kind == "hermes"
    assert ask(tools=["cronjob", "skill_manage", "session_search", "x"], headers=PYTHON).kind == "hermes"
    assert ask(tools=["cronjob", "skill_manage"], headers=PYTHON).kind == "openai-sdk"
    assert ask(tools=["search_chats", "view_chat"], headers=AIOHTTP).kind == "open-webui"
    assert ask(ignore_eos=True, headers=AIOHTTP).kind == "benchmark"
    assert ask(ignore_eos=False, headers=AIOHTTP).kind == "other"
    assert ask(system="You are Cline, an agent.", ignore_eos=True).kind == "cline"


def test_shared_prompts_name_the_task_only():
    """Q2: a prompt that several clients use tells the side request; the header tells who."""
    words = "You are a helpful AI assistant tasked with summarizing conversations."
    assert ask(system=words, headers={"User-Agent": "RooCode/3.30"}) == Client("roo", "compaction")
    assert ask(system=words) == Client("other", "compaction")
    title = "Generate a concise 3-7 word title for this conversation, omitting punctuation. Go straight to it."
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    body = {"messages": [*history, {"role": "user", "content": title}]}
    assert kind(body, {"User-Agent": "Zed/0.2"}) == Client("zed", "title")


def test_a_second_block_and_a_part_list():
    """Q2: Claude Code's name stands in its second system block; texts in parts count as texts."""
    blocks = [{"type": "text", "text": "x-other: 1"}, {"type": "text", "text": "You are Claude Code, a CLI."}]
    assert kind({"system": blocks, "messages": []}, {}).kind == "claude-code"
    assert kind({"messages": [{"role": "developer", "content": blocks}]}, {}).kind == "claude-code"
    assert ask([{"type": "text", "text": "### Task:\nGenerate 1-3 broad tags"}]) == Client("open-webui", "tags")


def test_the_review_replays_the_conversation():
    """K1: Hermes' review offers its tools and ends a whole conversation; it is no turn, and not for the lane."""
    client = ask("Review the conversation above and update the skill library.", tools=["skill_manage"])
    assert client == Client("hermes", "review")
    assert client.side not in clients.RECOGNISED
    assert not {"compaction", "mixture", "review"} & set(clients.RECOGNISED)


def test_the_tables():
    """Q2: only known words; openings are folded and well within what is read; no tool name stands in two boxes."""
    for tell in clients.TELLS:
        assert tell.kind in ("", *KINDS)
        assert tell.side in ("", *SIDES)
        assert tell.kind or tell.side
        assert tell.opening == " ".join(tell.opening.split())
        assert len(tell.opening) < clients.HEAD / 2
    for box in clients.TOOLBOXES:
        assert box.kind in KINDS
        assert box.least <= len(box.names) == len(set(box.names))
    for signature in clients.SIGNATURES:
        assert signature.kind in KINDS
        assert all(name == name.lower() and opening == opening.lower() for name, opening in signature.headers)
    owned = [name for box in clients.TOOLBOXES for name in box.names]
    assert len(owned) == len(set(owned))
    assert set(clients.RECOGNISED) <= set(SIDES)
    assert set(clients.NEVER_NOTED) <= set(KINDS)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
WORDS = st.sampled_from([tell.opening for tell in clients.TELLS])
CONTENT = JSON | WORDS | st.lists(JSON | st.fixed_dictionaries({"type": JSON, "text": JSON | WORDS}), max_size=3)
ROLE = st.sampled_from(["system", "developer", "user", "assistant", "tool"]) | JSON
MESSAGE = JSON | st.fixed_dictionaries({}, optional={"role": ROLE, "content": CONTENT})
TOOL = JSON | st.fixed_dictionaries({"function": JSON | st.fixed_dictionaries({"name": JSON})}) | st.just({"name": "x"})
BODY = st.dictionaries(st.text(max_size=8), JSON, max_size=2) | st.fixed_dictionaries(
    {},
    optional={
        "messages": JSON | st.lists(MESSAGE, max_size=4),
        "input": JSON | st.lists(MESSAGE, max_size=4),
        "system": CONTENT,
        "instructions": CONTENT,
        "tools": JSON | st.lists(TOOL, max_size=4),
        "ignore_eos": JSON,
    },
)
HEADERS = st.dictionaries(st.text(max_size=12) | st.sampled_from(["User-Agent", "X-Title"]), st.text(), max_size=4)


@given(BODY, HEADERS)
def test_any_body_has_an_answer(body, headers):
    """Q2: no body and no header makes it raise, and the answer is of the tables."""
    client = kind(body, headers)
    assert client.kind in KINDS
    assert client.side in ("", *SIDES)


@given(st.sampled_from(clients.TELLS), st.text(), st.text(), st.sampled_from(["\n", "  ", "\t\r\n"]))
def test_only_the_head_is_read(tell, first, second, blank):
    """Q2: what follows the head changes nothing, nor does how blanks are written."""
    opening = tell.opening.replace(" ", blank)
    role = "system" if tell.where == "system" else "user"
    filler = "x" * clients.HEAD

    def told(tail):
        text = opening + " " + filler + tail
        return kind({"messages": [{"role": role, "content": text}]}, {})

    assert told(first) == told(second)
    assert told(first).side == tell.side
    assert told(first).kind == (tell.kind or "other")


def test_client_reasoning():
    """Q2: the default's formats; a kind's own, else the star's, else the server's, which is tags where this holds."""
    table = reasoning_formats(clients.CLIENT_REASONING)
    assert table == {"*": "reasoning_content", "hermes": "tags"}
    assert format_for(Client("hermes", "title"), table) == "tags"
    assert format_for(Client("zed", ""), table) == "reasoning_content"
    assert format_for(Client("zed", ""), reasoning_formats("hermes=both")) == "tags"
    assert format_for(Client("hermes", ""), reasoning_formats(" hermes = both , *=tags,")) == "both"
    assert reasoning_formats("") == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hermès=tags", "There is no client kind hermès"),
        ("hermes=xml", "There is no reasoning format xml"),
        ("hermes", "hermes is not KIND=FORMAT"),
        ("hermes=", "There is no reasoning format"),
        ("zed=tags,zed=both", "zed has two formats"),
    ],
)
def test_client_reasoning_refused(text, said):
    """Q2: a wrong value is said in one sentence."""
    with pytest.raises(ValueError, match=said):
        reasoning_formats(text)


def test_progress_lines():
    """Q6: named kinds, each once; none by default; never the kinds of Q1, and no unknown one."""
    assert progress_kinds("none") == progress_kinds("") == ()
    assert progress_kinds("open-webui, zed,open-webui") == ("open-webui", "zed")
    for name in clients.NEVER_NOTED:
        with pytest.raises(ValueError, match=f"{name} never gets progress lines"):
            progress_kinds(f"zed,{name}")
    with pytest.raises(ValueError, match="There is no client kind star"):
        progress_kinds("star")


@given(st.dictionaries(st.sampled_from(["*", *KINDS]), st.sampled_from(clients.FORMATS)))
def test_client_reasoning_written_and_read(table):
    """Q2: a table written as the flag's value is read back."""
    assert reasoning_formats(",".join(f"{name}={form}" for name, form in table.items())) == table
