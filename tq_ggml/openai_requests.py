"""Requests of OpenAI clients in the words of `llama_cpp.server`, whose request types are older than the clients."""

from __future__ import annotations

from typing import Any

Request = dict[str, Any]


def adapt(request: Request) -> Request:
    """A copy of a request to ``/v1/chat/completions`` or ``/v1/completions`` that `llama_cpp.server` understands.

    - ``max_completion_tokens`` is ``max_tokens``,
    - ``response_format`` of type ``json_schema`` is a ``json_object`` with a ``schema``,
    - role ``developer`` is ``system``, a content of text parts is their lines, and no content is an empty one,
    - ``tool_choice: "required"`` with one tool is that tool.

    Anything of a wrong type is left for the request types to refuse.

    Raises:
        ValueError: what no model here can do: parts that are not text, several prompts at once, ``"required"`` with
            several tools.
    """
    request = dict(request)
    limit = request.pop("max_completion_tokens", None)
    if limit is not None:
        request["max_tokens"] = limit
    if isinstance(request.get("response_format"), dict):
        request["response_format"] = _response_format(request["response_format"])
    if isinstance(request.get("messages"), list):
        request["messages"] = [_message(m) if isinstance(m, dict) else m for m in request["messages"]]
    if isinstance(request.get("prompt"), list) and len(request["prompt"]) != 1:
        raise ValueError(f"{len(request['prompt'])} prompts in one request; send one at a time")
    if request.get("tool_choice") == "required":
        request["tool_choice"] = _only_tool(request.get("tools"))
    return request


def _response_format(wanted: dict[str, Any]) -> dict[str, Any]:
    if wanted.get("type") != "json_schema" or not isinstance(wanted.get("json_schema"), dict):
        return wanted
    return {"type": "json_object", "schema": wanted["json_schema"].get("schema") or {}}


def _message(message: dict[str, Any]) -> dict[str, Any]:
    # Clients send back what they were sent, with null for each field that was not there.
    message = {key: value for key, value in message.items() if value is not None}
    if message.get("role") == "developer":
        message["role"] = "system"
    message["content"] = _text(message.get("content", ""))
    return message


def _text(content: Any) -> Any:
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return content
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"this server takes text only, and a message has a part of type {part.get('type')!r}")
    return "\n".join(part["text"] for part in content)


def _only_tool(tools: Any) -> dict[str, Any]:
    try:
        (tool,) = tools
        return {"type": "function", "function": {"name": tool["function"]["name"]}}
    except (TypeError, ValueError, KeyError):
        raise ValueError('tool_choice "required" goes with exactly one tool here; name one of them instead') from None
