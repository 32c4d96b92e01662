"""Chat templates in the public formats of four families: their structure, in words of our own.

What matters to who reads answers is as the families publish it: the marks around turns, how tools are listed, how an
assistant's calls are written back, where results stand, and what is left of the reasoning.
"""

from __future__ import annotations

_QWEN_TOOLS = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}"
    "{{- 'These functions may be called:\\n<tools>' }}"
    "{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}"
    '{{- \'\\n</tools>\\nA call is written as\\n<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call>'
    "<|im_end|>\\n' }}"
    "{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
    "{%- endif %}"
)
_QWEN_CALLS = (
    "{%- for call in message.tool_calls or [] %}{%- if call.function %}{%- set call = call.function %}{%- endif %}"
    "{{- '\\n' if content or not loop.first }}"
    '{{- \'<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' + (call.arguments | tojson) }}'
    "{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}"
)
# Results of one round of calls share a user's turn.
_QWEN_RESULT = (
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"
)

QWEN_2_5 = (
    _QWEN_TOOLS + "{%- for message in messages %}{%- set content = message.content or '' %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}"
    "{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\\n' + content }}" + _QWEN_CALLS + ""
    "{%- elif message.role == 'tool' %}" + _QWEN_RESULT + "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

# Reasoning is written back only behind the last question of a user: within a round of calls, not from turns before it.
QWEN_3 = (
    _QWEN_TOOLS + "{%- set ns = namespace(last=0) %}"
    "{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}"
    "{%- endfor %}"
    "{%- for message in messages %}{%- set content = message.content or '' %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}"
    "{%- elif message.role == 'assistant' %}{%- set thought = message.reasoning_content or '' %}"
    "{%- if '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{%- set content = content.split('</think>')[-1].strip() %}{%- endif %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if thought and loop.index0 > ns.last %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}"
    "{{- content }}" + _QWEN_CALLS + ""
    "{%- elif message.role == 'tool' %}" + _QWEN_RESULT + "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)

# Tools stand in the first user's turn, a message has one call, and results are of the role ipython.
LLAMA_3 = (
    "{{- '<|begin_of_text|>' }}{%- set ns = namespace(listed=false) %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}"
    "{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}"
    "{%- elif message.tool_calls %}"
    "{%- if message.tool_calls | length != 1 %}{{- raise_exception('one call in a message') }}{%- endif %}"
    "{%- set call = message.tool_calls[0].function %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    "{{- '{\"name\": \"' + call.name + '\", \"parameters\": ' + (call.arguments | tojson) + '}<|eot_id|>' }}"
    "{%- else %}"
    "{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}"
    "{%- if tools and message.role == 'user' and not ns.listed %}{%- set ns.listed = true %}"
    '{{- \'A call is written as {"name": <name>, "parameters": <object>}, of these functions:\\n\\n\' }}'
    "{%- for tool in tools %}{{- (tool | tojson(indent=4)) + '\\n\\n' }}{%- endfor %}{%- endif %}"
    "{{- message.content | trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)

# Tools stand before the last user's turn; calls are a list with ids of nine characters, results name theirs.
MISTRAL_V3 = (
    "{{- '<s>' }}{%- set ns = namespace(last=0) %}"
    "{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}"
    "{%- endfor %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}"
    "{%- if tools and loop.index0 == ns.last %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}"
    "{%- endif %}{{- '[INST] ' + message.content + '[/INST]' }}"
    "{%- elif message.tool_calls %}{{- '[TOOL_CALLS] [' }}"
    "{%- for call in message.tool_calls %}"
    "{%- if call.id | length != 9 %}{{- raise_exception('ids have nine characters') }}{%- endif %}"
    '{{- \'{"name": "\' + call.function.name + \'", "arguments": \' + (call.function.arguments | tojson) }}'
    "{{- ', \"id\": \"' + call.id + '\"}' }}{{- ', ' if not loop.last }}{%- endfor %}{{- ']</s>' }}"
    "{%- elif message.role == 'tool' %}"
    '{{- \'[TOOL_RESULTS] {"content": \' + (message.content | tojson) + \', "call_id": "\' }}'
    "{{- message.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
    "{%- elif message.role == 'assistant' %}{{- ' ' + message.content + '</s>' }}{%- endif %}{%- endfor %}"
)
