"""Chat templates for tests, each short and of our own writing, in the ways the field's templates differ."""

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Renders roles and contents, nothing else: no tools, no calls."""

AGENT = """{%- if tools %}
{{- '<|im_start|>system\n' + (messages[0].content + '\n\n' if messages[0].role == 'system' else '') }}
{{- 'Tools:' }}{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}
{%- endif %}
{%- for message in (messages[1:] if tools and messages[0].role == 'system' else messages) %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}
{%- if message.reasoning_content %}{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}
{{- message.content.split('</think>')[-1].lstrip('\n') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for name, value in call.function.arguments | items %}
{{- '<parameter=' + name + '>\n' + (value if value is string else value | tojson) + '\n</parameter>\n' }}
{%- endfor %}{{ '</function>\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- if opens or (enable_thinking is defined and enable_thinking) %}{{ '<think>\n' }}{% endif %}
{%- if reasoning_effort %}{{ 'effort ' + reasoning_effort }}{% endif %}
{%- endif %}"""
"""Tools, calls walked as objects, results, and the thinking switch; by itself it leaves the block to the model."""

OPENING = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
"""Opens a thinking block whatever it is told."""

STRICT = (
    "{% for message in messages %}"
    "{% if message.role not in ('user', 'assistant') %}{{ raise_exception('Unknown role') }}{% endif %}"
    "{% if (message.role == 'user') == (loop.index0 % 2 == 1) %}{{ raise_exception('Must alternate') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Turn by turn of user and assistant, nothing else; raises on the rest."""

TEXTUAL = CHATML.replace(
    "{{ message.content }}",
    "{{ message.content }}{% for call in message.tool_calls or [] %}"
    "[{{ call.function.name + ' ' + call.function.arguments }}]{% endfor %}",
)
"""Writes a call's arguments as the text they were sent as."""

DEMANDING = (
    "{% for tool in tools %}{{ tool.function.name + ': ' + tool.function.description }}"
    "{{ tool.function.parameters.properties | tojson }}\n{% endfor %}"
    "{% for message in messages %}"
    "{% for call in message.tool_calls or [] %}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids have nine letters and digits') }}{% endif %}"
    "[{{ call.id }} {{ call.function.name }} {{ call.function.arguments | tojson }}]"
    "{% endfor %}"
    "{% if message.role == 'tool' %}"
    "{% if message.tool_call_id | length != 9 %}{{ raise_exception('ids have nine letters and digits') }}{% endif %}"
    "({{ message.tool_call_id }}) "
    "{% endif %}{{ message.role }}: {{ message.content }}\n"
    "{% endfor %}"
)
"""Walks the tools even where there are none, reads all of each, and takes ids of one length alone."""
