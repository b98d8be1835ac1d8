"""Forced tool calls on the embedded model: do they validate, and how many ramble to the limit (row D5).

Sixty prompts in ten scripts, some begging for prose. Each is asked once with ``required`` and all five tools offered,
and once for each tool by name, that one offered. Every call that ends must satisfy its tool's schema, judged by
``jsonschema``; the free strings of a small model may run to the limit (``length``), which is counted, and counted apart
for the two tools whose strings are all bounded. An interrupt prints what there is.

    python -m benchmarks.forced_calls [--prompts 60] [--model FILE]
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from typing import Any

import click
import httpx
import jsonschema
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.server import Server

MAX_TOKENS = 256


def _tool(tool: str, required: list[str], **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": "function", "function": {"name": tool, "description": f"{tool}.", "parameters": schema}}


WORD = {"type": "string", "maxLength": 24}
TOOLS: list[dict[str, Any]] = [
    _tool("get_weather", ["city", "days"], city=WORD, days={"type": "integer", "minimum": 1, "maximum": 14}),
    _tool(
        "set_timer", ["minutes", "loud", "unit"],
        minutes={"type": "number", "minimum": 0, "maximum": 600}, loud={"type": "boolean"},
        unit={"enum": ["minute", "second"]},
    ),
    _tool("write_file", ["path", "content"], path={"type": "string"}, content={"type": "string"}),
    _tool(
        "search", ["query", "limit"],
        query={"type": "string"}, limit={"type": "integer"}, tags={"type": "array", "items": {"type": "string"}},
    ),
    _tool(
        "book_table", ["guests", "name", "seat"],
        guests={"type": "integer", "minimum": 1, "maximum": 20}, name={"type": "string"},
        seat={"type": "object", "properties": {"inside": {"type": "boolean"}, "row": {"type": ["integer", "null"]}},
              "required": ["inside", "row"]},
    ),
]  # fmt: skip
BOUNDED = ("get_weather", "set_timer")
"""Tools whose strings are all bounded."""

SCRIPTS: dict[str, list[str]] = {
    "Latin": [
        "Hello, how are you?", "What is the weather in Lisbon for the next three days?",
        "Please do not call anything, just write me a poem about rivers.", "Set a timer for ten minutes.",
        "Explain in plain prose why the sky is blue. No tools!", "Book a table for four.",
    ],
    "Cyrillic": [
        "Привет, как дела?", "Какая погода в Москве?", "Пожалуйста, просто расскажи мне сказку, без вызовов.",
        "Поставь таймер на пять минут.", "Запиши файл с моим списком покупок.", "Найди книги о море.",
    ],
    "Greek": [
        "Γεια σου, τι κάνεις;", "Τι καιρό θα κάνει στην Αθήνα;", "Γράψε μου μόνο ένα ποίημα, σε παρακαλώ.",
        "Βάλε χρονόμετρο για δέκα λεπτά.", "Κλείσε τραπέζι για δύο.", "Ψάξε για βιβλία.",
    ],
    "Han": [
        "你好，你好吗？", "北京未来三天的天气怎么样？", "请不要调用任何工具，只写一首诗。", "设置十分钟的计时器。",
        "订一张四人桌。", "搜索关于大海的书。",
    ],
    "Kana": [
        "こんにちは、元気ですか？", "東京の天気を教えてください。", "ツールは使わず、物語だけ書いてください。",
        "タイマーを五分にセットして。", "四人でテーブルを予約して。", "海についての本を探して。",
    ],
    "Hangul": [
        "안녕하세요, 어떻게 지내세요?", "서울 날씨가 어때요?", "도구를 쓰지 말고 시를 써 주세요.",
        "타이머를 십 분으로 맞춰 주세요.", "네 명 자리를 예약해 주세요.", "바다에 관한 책을 찾아 주세요.",
    ],
    "Arabic": [
        "مرحبا، كيف حالك؟", "ما الطقس في القاهرة؟", "من فضلك اكتب لي قصة فقط دون أدوات.", "اضبط مؤقتا لعشر دقائق.",
        "احجز طاولة لأربعة.", "ابحث عن كتب عن البحر.",
    ],
    "Hebrew": [
        "שלום, מה שלומך?", "מה מזג האוויר בתל אביב?", "בבקשה רק כתוב לי שיר, בלי כלים.", "הפעל טיימר לעשר דקות.",
        "הזמן שולחן לארבעה.", "חפש ספרים על הים.",
    ],
    "Devanagari": [
        "नमस्ते, आप कैसे हैं?", "दिल्ली का मौसम कैसा है?", "कृपया केवल एक कविता लिखें।", "दस मिनट का टाइमर लगाओ।",
        "चार लोगों के लिए मेज़ बुक करो।", "समुद्र पर किताबें खोजो।",
    ],
    "Thai": [
        "สวัสดี สบายดีไหม", "อากาศที่กรุงเทพเป็นอย่างไร", "โปรดเขียนบทกวีเท่านั้น", "ตั้งเวลาสิบนาที",
        "จองโต๊ะสำหรับสี่คน", "ค้นหาหนังสือเกี่ยวกับทะเล",
    ],
}  # fmt: skip
PROMPTS = [prompt for prompts in zip(*SCRIPTS.values(), strict=True) for prompt in prompts]


def ask(http: httpx.Client, prompt: str, choice: Any, tools: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """One forced call: the choice of the answer."""
    body = {
        "messages": [{"role": "user", "content": prompt}], "tools": tools, "tool_choice": choice, "seed": seed,
        "max_tokens": MAX_TOKENS,
    }  # fmt: skip
    response = http.post("/v1/chat/completions", json=body)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()["choices"][0]
    return answer


def fault(answer: dict[str, Any], named: str) -> str:
    """What is wrong with an answer that ended; "" when it is right. ``named``: the tool that was asked for."""
    calls = answer["message"].get("tool_calls") or []
    if len(calls) != 1 or answer["finish_reason"] != "tool_calls":
        return f"{len(calls)} calls, finish {answer['finish_reason']}"
    function = calls[0]["function"]
    if named and function["name"] != named:
        return f"called {function['name']}, not {named}"
    schema = next(t["function"]["parameters"] for t in TOOLS if t["function"]["name"] == function["name"])
    try:
        jsonschema.validate(json.loads(function["arguments"]), schema)
    except (jsonschema.ValidationError, ValueError) as error:
        return f"{function['name']}: {type(error).__name__}"
    return ""


def measure(http: httpx.Client, prompts: list[str], show: bool = True) -> tuple[dict[str, Counter[str]], list[str]]:
    """Ask everything. By row of the table: how answers ended; and the faults, each in words."""
    counts: dict[str, Counter[str]] = {}
    faults: list[str] = []
    rows: list[tuple[str, Any, list[dict[str, Any]]]] = [("required", "required", TOOLS)]
    for tool in TOOLS:
        name = tool["function"]["name"]
        rows.append((name, {"type": "function", "function": {"name": name}}, [tool]))
    jobs = [(seed, prompt, row) for seed, prompt in enumerate(prompts) for row in rows]
    with contextlib.suppress(KeyboardInterrupt, httpx.TransportError):  # what was measured is worth printing
        for seed, prompt, (label, choice, tools) in track(jobs, "asking", disable=not show):
            answer = ask(http, prompt, choice, tools, seed)
            named = "" if choice == "required" else label
            ended = "length" if answer["finish_reason"] == "length" else "valid"
            wrong = "" if ended == "length" else fault(answer, named)
            if wrong:
                ended = "invalid"
                faults.append(f"{label}, prompt {seed}: {wrong}")
            counts.setdefault(label, Counter())[ended] += 1
    return counts, faults


@click.command()
@click.option("--prompts", default=len(PROMPTS), show_default=True, help="How many of the prompts.")
@click.option("--threads", default=0, show_default=True, help="Of the engine; 0: all processors.")
@click.option("--model", default="", help="GGUF file or folder; default: the embedded model.")
def main(prompts: int, threads: int, model: str) -> None:
    """Ask for forced calls and count how they end."""
    console = Console()
    with Server("--threads", str(threads), *(["--model", model] if model else [])) as server:
        server.ready()
        counts, faults = measure(server.http, PROMPTS[:prompts])
        engine = server.state()["engine"]
    table = Table("asked for", "valid", "invalid", "length", title=f"forced calls, max_tokens {MAX_TOKENS}")
    for label, count in counts.items():
        bound = " (bounded strings)" if label in BOUNDED else ""
        table.add_row(label + bound, *(str(count[word]) for word in ("valid", "invalid", "length")))
    console.print(table)
    console.print(f"engine: {engine.get('device', '?')}, {engine.get('threads', '?')} threads")
    bounded = sum((counts[name] for name in BOUNDED), Counter[str]())
    share = bounded["length"] / max(1, bounded.total())
    console.print(f"bounded strings: {bounded['length']} of {bounded.total()} at the limit ({share:.1%})")
    for line in faults:
        console.print(line, markup=False)
    sys.exit(1 if faults or share > 0.05 else 0)


if __name__ == "__main__":
    main()
