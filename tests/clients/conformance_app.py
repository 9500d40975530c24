"""The app that MCP's conformance suite tests through the bridge: py-mcp2/bin/python conformance_app.py

It registers the tools that the suite calls, connects its bridge and prints one line when it is ready,
{"session_id": "…", "mcp_url": "…"}. It lends its tools until it is killed or its stdin ends.
"""

import argparse
import asyncio
import base64
import hashlib
import hmac
import json
import os
import secrets
import struct
import sys
import threading
import urllib.request
import wave
import zlib
from contextlib import suppress
from io import BytesIO

from websockets.asyncio.client import connect

FEATURES = ["progress", "context", "tools", "cancel"]
NO_ARGUMENTS = {"type": "object", "properties": {}}
INVALID_PARAMS = -32602
MISSING_CAPABILITY = -32021

# What the suite looks for in the list of tools, key by key.
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
REGION_IN_HEADER = {
    "type": "object",
    "properties": {"region": {"type": "string", "x-mcp-header": "Region"}},
    "required": ["region"],
}


class RpcError(Exception):
    """Ends a call with a JSON-RPC error."""

    def __init__(self, code, message, data=None):
        super().__init__(message)
        self.error = {"code": code, "message": message} | ({} if data is None else {"data": data})


class Call:
    """One invoke_tool frame, and what a tool can do while it runs."""

    def __init__(self, app, frame):
        self.app = app
        self.frame = frame
        self.tool = frame["tool_name"]
        self.arguments = frame["arguments"]
        self.capabilities = frame.get("client_capabilities") or {}
        responses = frame.get("input_responses")
        self.responses = responses if isinstance(responses, dict) else {}

    async def reply(self, kind, **members):
        await self.app.send(type=kind, request_id=self.frame["request_id"], **members)

    async def progress(self, progress, total):
        if self.frame.get("progress"):
            await self.reply("tool_progress", progress=progress, total=total)

    def state(self):
        """What this tool packed into the state that the client brought back; None if it brought none."""
        packed = self.frame.get("request_state")
        return None if packed is None else self.app.unpack_state(self.tool, packed)

    def ask(self, state=None, **questions):
        """The result that asks the client these questions; it must be able to answer their kinds."""
        missing = {QUESTIONS[q["method"]]: {} for q in questions.values()}
        missing = {name: {} for name in missing if name not in self.capabilities}
        if missing:
            raise RpcError(MISSING_CAPABILITY, "The client lacks a capability.", {"requiredCapabilities": missing})
        result = {"resultType": "input_required", "inputRequests": questions}
        return result if state is None else result | {"requestState": self.app.pack_state(self.tool, state)}

    def answers(self, **questions):
        """The client's answers, or None if one of them is missing or does not fit. Other ones are ignored."""
        answers = {key: answer(question, self.responses.get(key)) for key, question in questions.items()}
        return None if None in answers.values() else answers


# The questions of multi round-trip requests, and the client capability that each kind needs.
QUESTIONS = {"elicitation/create": "elicitation", "sampling/createMessage": "sampling", "roots/list": "roots"}
ROOTS = {"method": "roots/list", "params": {}}


def form(message, name, kind="string"):
    schema = {"type": "object", "properties": {name: {"type": kind}}, "required": [name]}
    return {"method": "elicitation/create", "params": {"message": message, "requestedSchema": schema}}


def prompt(text):
    message = {"role": "user", "content": {"type": "text", "text": text}}
    return {"method": "sampling/createMessage", "params": {"messages": [message], "maxTokens": 100}}


def answer(question, response):
    """What the response says, or None if it is no answer to this question."""
    with suppress(KeyError, TypeError, AttributeError):
        if question["method"] == "roots/list":
            return [root["uri"] for root in response["roots"]]
        if question["method"] == "sampling/createMessage":
            return response["content"]["text"]
        ((name, schema),) = question["params"]["requestedSchema"]["properties"].items()
        value = response["content"][name]
        if response["action"] == "accept" and isinstance(value, bool if schema["type"] == "boolean" else str):
            return value
    return None


def result(*content, **members):
    return {"content": list(content), **members}


def text(text):
    return {"type": "text", "text": text}


def resource(uri, mime_type, text):
    return {"type": "resource", "resource": {"uri": uri, "mimeType": mime_type, "text": text}}


def red_dot():
    """An image of one pixel, as PNG."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0\xff\0\0")) + chunk(b"IEND", b"")
    return {"type": "image", "mimeType": "image/png", "data": base64.b64encode(png).decode()}


def silence():
    """A hundredth of a second of silence, as WAV."""
    file = BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 1, 8000, 80, "NONE", None))
        out.writeframes(b"\x80" * 80)
    return {"type": "audio", "mimeType": "audio/wav", "data": base64.b64encode(file.getvalue()).decode()}


TOOLS = {}


def tool(description, input_schema=NO_ARGUMENTS):
    def register(run):
        definition = {"name": run.__name__, "description": description, "input_schema": input_schema}
        TOOLS[run.__name__] = (definition, run)
        return run

    return register


@tool("Gives a text.")
async def test_simple_text(call):
    return result(text("This is a simple text response for testing."))


@tool("Gives an image.")
async def test_image_content(call):
    return result(red_dot())


@tool("Gives a sound.")
async def test_audio_content(call):
    return result(silence())


@tool("Gives a resource.")
async def test_embedded_resource(call):
    return result(resource("test://embedded-resource", "text/plain", "This is an embedded resource content."))


@tool("Gives a text, an image and a resource.")
async def test_multiple_content_types(call):
    mixed = resource("test://mixed-content-resource", "application/json", '{"test":"data","value":123}')
    return result(text("Multiple content types test:"), red_dot(), mixed)


@tool("Fails.")
async def test_error_handling(call):
    return result(text("This tool intentionally returns an error for testing"), isError=True)


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


@tool("Could log, and does not, for it was not asked to.")
async def test_logging_tool(call):
    return result(text("Nothing was logged."))


@tool("Adds a tool to the app's tools, or takes it away.")
async def test_trigger_tool_change(call):
    call.app.has_extra_tool = not call.app.has_extra_tool
    await call.app.send(type="update_tools", tools=call.app.tools())
    return result(text("The tools have changed."))


@tool("Asks the client's model, whether it has one or not.")
async def test_missing_capability(call):
    return call.ask(question=prompt("Is anybody there?"))


@tool("Asks the user for a name.")
async def test_streaming_elicitation(call):
    return call.ask(user_name=form("What is your name?", "name"))


def one_question(name, description, key, question):
    """Registers a tool that asks one question and tells the answer."""

    async def run(call):
        answers = call.answers(**{key: question})
        return result(text(f"The answer is {answers[key]}.")) if answers else call.ask(**{key: question})

    run.__name__ = name
    tool(description)(run)


NAME = form("What is your name?", "name")
CAPITAL = prompt("What is the capital of France?")
one_question("test_input_required_result_elicitation", "Asks the user for a name.", "user_name", NAME)
one_question("test_input_required_result_sampling", "Asks the client's model.", "capital_question", CAPITAL)
one_question("test_input_required_result_list_roots", "Asks for the client's roots.", "client_roots", ROOTS)


@tool("Asks for a confirmation and recognises its own state.")
async def test_input_required_result_request_state(call):
    confirm = form("Please confirm.", "ok", "boolean")
    if call.state() == "asked" and call.answers(confirm=confirm):
        return result(text("state-ok"))
    return call.ask("asked", confirm=confirm)


@tool("The same, for a client that meddles with the state.")
async def test_input_required_result_tampered_state(call):
    return await test_input_required_result_request_state(call)


@tool("Asks three questions at once.")
async def test_input_required_result_multiple_inputs(call):
    questions = {"user_name": NAME, "greeting": prompt("Generate a greeting."), "client_roots": ROOTS}
    answers = call.state() == "asked" and call.answers(**questions)
    return result(text(json.dumps(answers))) if answers else call.ask("asked", **questions)


@tool("Asks two questions, one after the other.")
async def test_input_required_result_multi_round(call):
    step1 = form("Step 1: What is your name?", "name")
    step2 = form("Step 2: What is your favorite color?", "color")
    state = call.state() or {}
    if "name" in state:
        answers = call.answers(step2=step2)
        return result(text(f"{state['name']} likes {answers['step2']}.")) if answers else call.ask(state, step2=step2)
    answers = call.answers(step1=step1)
    return call.ask({"name": answers["step1"]}, step2=step2) if answers else call.ask({}, step1=step1)


@tool("Asks only what the client is able to answer.")
async def test_input_required_result_capabilities(call):
    questions = {"user_name": NAME, "capital_question": CAPITAL, "client_roots": ROOTS}
    questions = {key: q for key, q in questions.items() if QUESTIONS[q["method"]] in call.capabilities}
    answers = call.answers(**questions)
    return result(text(json.dumps(answers))) if answers is not None else call.ask(**questions)


class App:
    """One session and its bridge."""

    def __init__(self, bridge, session_id):
        self.bridge = bridge
        self.session_id = session_id
        self.has_extra_tool = False
        self.key = secrets.token_bytes(32)

    def tools(self):
        extra = {"name": "extra_tool", "description": "Comes and goes.", "input_schema": NO_ARGUMENTS}
        return [definition for definition, _ in TOOLS.values()] + [extra] * self.has_extra_tool

    # Clients keep the state between two rounds, so it is signed, for the tool that it belongs to.

    def pack_state(self, tool, state):
        payload = base64.urlsafe_b64encode(json.dumps(state).encode()).decode()
        return f"{payload}.{self.mac(tool, payload)}"

    def unpack_state(self, tool, packed):
        payload, _, mac = packed.partition(".")
        if not hmac.compare_digest(mac.encode(), self.mac(tool, payload).encode()):
            raise RpcError(INVALID_PARAMS, "The requestState is not one that this tool gave.")
        return json.loads(base64.urlsafe_b64decode(payload))

    def mac(self, tool, payload):
        return hmac.new(self.key, f"{tool} {payload}".encode(), hashlib.sha256).hexdigest()

    async def send(self, **frame):
        await self.bridge.send(json.dumps(frame | {"mcpSessionId": self.session_id}))

    async def invoke(self, frame):
        call = Call(self, frame)
        try:
            # Nobody calls the tool that comes and goes.
            _, run = TOOLS[call.tool]
            await call.reply("invoke_result", ok=True, result=await run(call))
        except RpcError as refused:
            await call.reply("invoke_result", ok=False, error=refused.error)

    async def run(self):
        calls = {}
        async with asyncio.TaskGroup() as group:
            async for message in self.bridge:
                frame = json.loads(message)
                match frame["type"]:
                    case "ping":
                        await self.send(type="pong")
                    case "invoke_tool":
                        request_id = frame["request_id"]
                        calls[request_id] = group.create_task(self.invoke(frame))
                        calls[request_id].add_done_callback(lambda _, id=request_id: calls.pop(id))
                    case "cancel_tool":
                        if call := calls.get(frame["request_id"]):
                            call.cancel()
                    case "error":
                        print(frame["message"], file=sys.stderr)


def stdin_ended():
    """An event that is set once stdin has ended; any kind of stdin will do."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def wait():
        while os.read(0, 4096):
            pass
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=wait, daemon=True).start()
    return ended


async def main(base_url, app_token):
    headers = {"Authorization": f"Bearer {app_token}"} if app_token else {}
    registration = {"device_id": "conformance", "device_name": "Conformance app", "bridge_features": FEATURES}
    registration["tools"] = [definition for definition, _ in TOOLS.values()]
    body = json.dumps(registration).encode()
    headers_of_json = headers | {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/v1/chat/sessions", body, headers_of_json)
    with urllib.request.urlopen(request, timeout=10) as response:
        session = json.load(response)
    async with connect(session["bridge_url"], additional_headers=headers, proxy=None) as bridge:
        app = App(bridge, session["mcpSessionId"])
        print(json.dumps({"session_id": app.session_id, "mcp_url": session["mcp_url"]}), flush=True)
        tasks = [asyncio.create_task(app.run()), asyncio.create_task(stdin_ended().wait())]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        for task in done:
            task.result()


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--base-url", required=True, help="the proxy, such as http://127.0.0.1:8000")
parser.add_argument("--app-token", default="", help="its app token, if it asks for one")
asyncio.run(main(**vars(parser.parse_args())))
