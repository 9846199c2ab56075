"""Short chat templates in the documented forms of the families, for tests."""

from __future__ import annotations

# ChatML with tools between tags, calls as JSON between tags, and a switch for thinking.
QWEN = (
    "{%- if tools %}{{ '<|im_start|>system\n' }}"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n' }}{% endif %}"
    "<tools>{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}{{ '\n</tools>' }}"
    "Answer calls in <tool_call></tool_call><|im_end|>\n"
    "{%- elif messages[0].role == 'system' %}"
    "{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' + m.content }}"
    "{%- for call in m.tool_calls or [] %}"
    '{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}"
    "{%- endfor %}{{ '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{%- endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)

# Arguments are joined as text, thinking is opened by the prompt.
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}{{ '<\uff5cUser\uff5c>' + m.content }}"
    "{% elif m.role == 'tool' %}{{ '<\uff5ctool\u2581output\u2581begin\uff5c>' + m.content }}"
    "{% elif m.tool_calls %}{{ '<\uff5cAssistant\uff5c><\uff5ctool\u2581calls\u2581begin\uff5c>' }}"
    "{% for call in m.tool_calls %}"
    "{{ '<\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>' }}"
    "{{ call.function.name + '\n```json\n' + call.function.arguments + '\n```' }}"
    "{% endfor %}"
    "{% else %}{{ '<\uff5cAssistant\uff5c>' + m.content.split('</think>')[-1] }}{% endif %}"
    "{% endfor %}{% if tools %}{{ tools | length }} tools{% endif %}"
    "{% if add_generation_prompt %}{{ '<\uff5cAssistant\uff5c><think>\n' }}{% endif %}"
)

# Header marks, tools in the first user turn, calls as plain objects.
LLAMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role)"
    " + '<|end_header_id|>\n\n' }}"
    "{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}"
    '{{ \'{"name": "\' + call.name + \'", "parameters": \' }}{{ call.arguments | tojson }}}'
    "{% else %}{% if tools and m.role == 'user' and loop.last %}"
    "{% for tool in tools %}{{ tool | tojson(indent=4) }}\n{% endfor %}{% endif %}"
    "{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)

# Ids of nine letters, roles that take turns, tools before the last user turn.
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}{% if tools and loop.last %}"
    "{{ '[AVAILABLE_TOOLS]' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}"
    "{% elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for call in m.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
    "{{ call.function | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% else %}{{ raise_exception('roles are user, assistant and tool') }}{% endif %}{% endfor %}"
)

# Content is a list of parts and nothing else.
PARTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
