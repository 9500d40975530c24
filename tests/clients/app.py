"""An app that lends one tool. Needs: pip install websockets"""
import asyncio, json, os, urllib.error, urllib.request
from websockets import connect

PROXY = os.environ.get("OPENCLAW_PROXY_SERVER_URL", "http://127.0.0.1:8000")
AUTH = {"Authorization": "Bearer " + os.environ.get("OPENCLAW_PROXY_APP_TOKEN", "")}
NUMBER = {"type": "number"}
SCHEMA = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
TOOLS = {"add": lambda arguments: {"sum": arguments["a"] + arguments["b"]}}

def register():
    body = {"device_id": "my-desktop", "tools": [{"name": "add", "description": "Add two numbers.", "input_schema": SCHEMA}]}
    headers = {**AUTH, "Content-Type": "application/json"}
    request = urllib.request.Request(PROXY + "/v1/chat/sessions", json.dumps(body).encode(), headers)
    try:
        return json.load(urllib.request.urlopen(request))
    except urllib.error.HTTPError as error:
        raise SystemExit(error.read().decode())

async def main():
    session = register()
    print(session["mcp_url"], flush=True)
    async with connect(session["bridge_url"], additional_headers=AUTH, max_size=None) as bridge:
        async for text in bridge:
            frame = json.loads(text)
            if frame["type"] == "ping":
                await bridge.send('{"type": "pong"}')
            elif frame["type"] == "invoke_tool":
                answer = {"type": "invoke_result", "mcpSessionId": frame["mcpSessionId"], "request_id": frame["request_id"]}
                try:
                    answer |= {"ok": True, "content": TOOLS[frame["tool_name"]](frame["arguments"])}
                except Exception as error:
                    answer |= {"ok": False, "error": f"{type(error).__name__}: {error}"}
                await bridge.send(json.dumps(answer))

asyncio.run(main())
