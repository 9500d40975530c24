"""The app that MCP's conformance suite tests through the bridge: py-mcp2/bin/python conformance_app.py --help

It registers the tools that the suite calls, connects its bridge and prints one line when it is ready,
{"session_id": "…", "mcp_url": "…"}. It lends its tools until it is killed, or its stdin or the bridge ends.
"""

import argparse
import asyncio
import base64
import hashlib
import hmac
import json
import os
import secrets
import sys
import threading
import urllib.request
from contextlib import suppress

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

FEATURES = ["progress", "context", "tools", "cancel"]
INVALID_PARAMS = -32602
MISSING_CAPABILITY = -32021

NO_ARGUMENTS = {"type": "object", "properties": {}}
REGION_IN_HEADER = {
    "type": "object",
    "properties": {"region": {"type": "string", "x-mcp-header": "Region"}},
    "required": ["region"],
}
# The suite looks for these keywords in the list of tools.
SCHEMA_2020_12 = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}

# ---- What tools answer ----

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
SILENCE = "UklGRigAAABXQVZFZm10IBAAAAABAAEAQB8AAEAfAAABAAgAZGF0YQQAAACAgICA"
IMAGE = {"type": "image", "mimeType": "image/png", "data": PIXEL}
AUDIO = {"type": "audio", "mimeType": "audio/wav", "data": SILENCE}


def text(text):
    return {"type": "text", "text": text}


def resource(uri, mime_type, text):
    return {"type": "resource", "resource": {"uri": uri, "mimeType": mime_type, "text": text}}


def result(*content, **members):
    return {"content": list(content), **members}


class RpcError(Exception):
    """Ends a call with a JSON-RPC error."""

    def __init__(self, code, message, **data):
        super().__init__(message)
        self.error = {"code": code, "message": message, "data": data}


# ---- What tools ask the client, in the result of a call that the client then repeats with its answers ----

# The methods of questions, and the client capability that each needs.
QUESTIONS = {"elicitation/create": "elicitation", "sampling/createMessage": "sampling", "roots/list": "roots"}
ROOTS = {"method": "roots/list", "params": {}}


def form(message, name, kind="string"):
    schema = {"type": "object", "properties": {name: {"type": kind}}, "required": [name]}
    return {"method": "elicitation/create", "params": {"message": message, "requestedSchema": schema}}


def prompt(message):
    messages = [{"role": "user", "content": text(message)}]
    return {"method": "sampling/createMessage", "params": {"messages": messages, "maxTokens": 100}}


def answer(question, response):
    """What a response says, or None if it is no answer to the question."""
    with suppress(KeyError, TypeError):
        match question["method"]:
            case "roots/list":
                return [root["uri"] for root in response["roots"]]
            case "sampling/createMessage":
                return response["content"]["text"]
        ((name, schema),) = question["params"]["requestedSchema"]["properties"].items()
        value = response["content"][name]
        if response["action"] == "accept" and isinstance(value, {"string": str, "boolean": bool}[schema["type"]]):
            return value
    return None


class Call:
    """An invoke_tool frame, and what its tool can do while it runs."""

    def __init__(self, app, frame):
        self.app = app
        self.frame = frame
        self.tool = frame["tool_name"]
        self.arguments = frame["arguments"]
        self.capabilities = frame.get("client_capabilities") or {}

    async def reply(self, kind, **members):
        await self.app.send(type=kind, request_id=self.frame["request_id"], **members)

    async def progress(self, progress, total):
        if self.frame.get("progress"):
            await self.reply("tool_progress", progress=progress, total=total)

    def ask(self, state=None, **questions):
        """The result that asks these questions, if the client can answer such. The client brings the state back."""
        missing = {QUESTIONS[question["method"]] for question in questions.values()} - self.capabilities.keys()
        if missing:
            message = "The client cannot answer what this tool asks."
            raise RpcError(MISSING_CAPABILITY, message, requiredCapabilities={name: {} for name in missing})
        asked = {"resultType": "input_required", "inputRequests": questions}
        return asked if state is None else asked | {"requestState": self.app.pack_state(self.tool, state)}

    def answers(self, **questions):
        """The client's answers; None if one of them is missing or does not fit. Others are ignored."""
        responses = self.frame.get("input_responses")
        responses = responses if isinstance(responses, dict) else {}
        answers = {key: answer(question, responses.get(key)) for key, question in questions.items()}
        return None if None in answers.values() else answers

    def state(self):
        """The state that the client brings back; None if it brings none."""
        packed = self.frame.get("request_state")
        return None if packed is None else self.app.unpack_state(self.tool, packed)


# ---- The tools ----

TOOLS = {}


def tool(description, input_schema=NO_ARGUMENTS):
    def register(run):
        definition = {"name": run.__name__, "description": description, "input_schema": input_schema}
        TOOLS[run.__name__] = (definition, run)
        return run

    return register


def tool_with(name, description, *content, **members):
    """A tool that always gives this result."""

    async def run(call):
        return result(*content, **members)

    run.__name__ = name
    tool(description)(run)


EMBEDDED = resource("test://embedded-resource", "text/plain", "This is an embedded resource content.")
MIXED = resource("test://mixed-content-resource", "application/json", '{"test":"data","value":123}')
tool_with("test_simple_text", "Gives a text.", text("This is a simple text response for testing."))
tool_with("test_image_content", "Gives an image.", IMAGE)
tool_with("test_audio_content", "Gives a sound.", AUDIO)
tool_with("test_embedded_resource", "Gives a resource.", EMBEDDED)
tool_with("test_multiple_content_types", "Gives one of each.", text("A text, an image and a resource."), IMAGE, MIXED)
tool_with("test_error_handling", "Fails.", text("This tool always fails."), isError=True)
tool_with("test_logging_tool", "Could log, and was not asked to.", text("Nothing was logged."))


@tool("Tells how far it has got.")
async def test_tool_with_progress(call):
    for progress in (0, 50, 100):
        await call.progress(progress, total=100)
        await asyncio.sleep(0.05)
    return result(text("Done."))


@tool("Has a schema with much of JSON Schema 2020-12 in it.", SCHEMA_2020_12)
async def json_schema_2020_12_tool(call):
    return result(text(json.dumps(call.arguments)))


@tool("Has an argument that clients repeat in a header.", REGION_IN_HEADER)
async def test_x_mcp_header(call):
    return result(text(f"The region is {call.arguments['region']}."))


@tool("Adds a tool to the app's tools, or takes it away.")
async def test_trigger_tool_change(call):
    await call.app.toggle_extra_tool()
    return result(text("The tools have changed."))


@tool("Comes and goes.")
async def extra_tool(call):
    return result(text("It is here."))


@tool("Asks the client's model, whether it has one or not.")
async def test_missing_capability(call):
    return call.ask(question=prompt("Is anybody there?"))


@tool("Asks the user for a name.")
async def test_streaming_elicitation(call):
    return call.ask(user_name=NAME)


def tool_that_asks(name, description, key, question):
    """A tool that asks one question and tells the answer."""

    async def run(call):
        answers = call.answers(**{key: question})
        return result(text(f"The answer is {answers[key]}.")) if answers else call.ask(**{key: question})

    run.__name__ = name
    tool(description)(run)


NAME = form("What is your name?", "name")
CAPITAL = prompt("What is the capital of France?")
tool_that_asks("test_input_required_result_elicitation", "Asks the user for a name.", "user_name", NAME)
tool_that_asks("test_input_required_result_sampling", "Asks the client's model.", "capital_question", CAPITAL)
tool_that_asks("test_input_required_result_list_roots", "Asks for the client's roots.", "client_roots", ROOTS)


@tool("Asks the user to confirm, and knows its own state again.")
async def test_input_required_result_request_state(call):
    confirm = form("Please confirm.", "ok", "boolean")
    confirmed = call.state() == "asked" and call.answers(confirm=confirm)
    return result(text("state-ok")) if confirmed else call.ask("asked", confirm=confirm)


@tool("The same, for a client that changes the state.")
async def test_input_required_result_tampered_state(call):
    return await test_input_required_result_request_state(call)


@tool("Asks three questions at once.")
async def test_input_required_result_multiple_inputs(call):
    questions = {"user_name": NAME, "greeting": prompt("Generate a greeting."), "client_roots": ROOTS}
    answers = call.state() == "asked" and call.answers(**questions)
    return result(text(json.dumps(answers))) if answers else call.ask("asked", **questions)


@tool("Asks two questions, one after the other.")
async def test_input_required_result_multi_round(call):
    step1, step2 = form("What is your name?", "name"), form("What is your favorite color?", "color")
    name = call.state()
    if name is None:
        return call.ask("", step1=step1)
    if name == "":
        first = call.answers(step1=step1)
        return call.ask(first["step1"], step2=step2) if first else call.ask("", step1=step1)
    second = call.answers(step2=step2)
    return result(text(f"{name} likes {second['step2']}.")) if second else call.ask(name, step2=step2)


@tool("Asks only what the client can answer.")
async def test_input_required_result_capabilities(call):
    questions = {"user_name": NAME, "capital_question": CAPITAL, "client_roots": ROOTS}
    questions = {key: q for key, q in questions.items() if QUESTIONS[q["method"]] in call.capabilities}
    answers = call.answers(**questions)
    return call.ask(**questions) if answers is None else result(text(json.dumps(answers)))


# ---- The bridge ----


class App:
    """A session and its bridge."""

    def __init__(self, bridge, session_id):
        self.bridge = bridge
        self.session_id = session_id
        self.has_extra_tool = False
        self.key = secrets.token_bytes(32)

    async def toggle_extra_tool(self):
        self.has_extra_tool = not self.has_extra_tool
        await self.send(type="update_tools", tools=definitions(self.has_extra_tool))

    # Whoever calls a tool holds its state meanwhile and could change it, so it is signed for that tool.

    def pack_state(self, tool, state):
        payload = base64.urlsafe_b64encode(json.dumps(state).encode()).decode()
        return f"{payload}.{self.sign(tool, payload)}"

    def unpack_state(self, tool, packed):
        payload, _, signature = packed.partition(".")
        if not hmac.compare_digest(signature.encode(), self.sign(tool, payload).encode()):
            raise RpcError(INVALID_PARAMS, "The requestState is not one that this tool gave.")
        return json.loads(base64.urlsafe_b64decode(payload))

    def sign(self, tool, payload):
        return hmac.new(self.key, f"{tool} {payload}".encode(), hashlib.sha256).hexdigest()

    async def send(self, **frame):
        await self.bridge.send(json.dumps(frame | {"mcpSessionId": self.session_id}))

    async def invoke(self, frame):
        call = Call(self, frame)
        _, run = TOOLS[call.tool]
        try:
            answered = {"ok": True, "result": await run(call)}
        except RpcError as refusal:
            answered = {"ok": False, "error": refusal.error}
        except Exception as bug:
            answered = {"ok": False, "error": repr(bug)}
        await call.reply("invoke_result", **answered)

    async def run(self):
        calls = {}
        async for message in self.bridge:
            frame = json.loads(message)
            match frame["type"]:
                case "ping":
                    await self.send(type="pong")
                case "invoke_tool":
                    request_id = frame["request_id"]
                    calls[request_id] = asyncio.create_task(self.invoke(frame))
                    calls[request_id].add_done_callback(lambda _, request_id=request_id: calls.pop(request_id))
                case "cancel_tool" if frame["request_id"] in calls:
                    calls[frame["request_id"]].cancel()
                case "error":
                    print(frame["message"], file=sys.stderr)


def definitions(with_extra_tool):
    return [definition for name, (definition, _) in TOOLS.items() if with_extra_tool or name != "extra_tool"]


def register(base_url, headers):
    registration = {"device_id": "conformance", "bridge_features": FEATURES, "tools": definitions(False)}
    headers = headers | {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/v1/chat/sessions", json.dumps(registration).encode(), headers)
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.load(response)


async def stdin_end():
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def wait():
        while os.read(0, 4096):
            pass
        loop.call_soon_threadsafe(ended.set)

    # asyncio's own readers do not take every kind of stdin.
    threading.Thread(target=wait, daemon=True).start()
    await ended.wait()


async def main(base_url, app_token):
    headers = {"Authorization": f"Bearer {app_token}"} if app_token else {}
    session = register(base_url, headers)
    async with connect(session["bridge_url"], additional_headers=headers, proxy=None) as bridge:
        app = App(bridge, session["mcpSessionId"])
        print(json.dumps({"session_id": app.session_id, "mcp_url": session["mcp_url"]}), flush=True)
        tasks = [asyncio.create_task(app.run()), asyncio.create_task(stdin_end())]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


parser = argparse.ArgumentParser(description="Lends the tools that MCP's conformance suite calls.")
parser.add_argument("--base-url", required=True, help="the proxy, such as http://127.0.0.1:8000")
parser.add_argument("--app-token", default="", help="its app token, if it asks for one")
try:
    asyncio.run(main(**vars(parser.parse_args())))
except ConnectionClosed as closed:
    sys.exit(f"conformance_app.py: {closed}")
