"""An app that lends tools and copes with what networks do. Needs: Python 3.11, pip install websockets

Its calls outlive a dropped socket, run at most once, tell how far they are, and stop when nobody wants them any more.
An app that is started again goes on with the session that it had: resuming_app.py <its bridge URL>
"""
import asyncio, contextlib, http.client, json, os, random, sys, time, urllib.error, urllib.request
from websockets import ConnectionClosed, WebSocketException, connect

PROXY = os.environ.get("OPENCLAW_PROXY_SERVER_URL", "http://127.0.0.1:8000")
AUTH = {"Authorization": "Bearer " + os.environ.get("OPENCLAW_PROXY_APP_TOKEN", "")}
SHORTEST, LONGEST = 0.5, 30  # What bounds the pause before it connects again, in seconds.
SILENCE = 45  # After so many seconds without a frame, more than two pings of the proxy, a socket is dead.
KEPT = 256  # The most results it keeps: the proxy has no more calls under way, so older ones have arrived.

async def add(progress, a, b):
    return {"sum": a + b}

async def sleep(progress, ms):
    for step in range(10):
        await progress(step, 10)
        await asyncio.sleep(ms / 10_000)
    return {"slept_ms": ms}

def schema(**properties):
    return {"type": "object", "properties": properties, "required": [*properties]}

TOOLS = {
    "add": (add, "Add two numbers.", schema(a={"type": "number"}, b={"type": "number"})),
    "sleep": (sleep, "Wait, and tell how far it is.", schema(ms={"type": "integer"})),
}
running = {}  # request_id: the task that works on the call
results = {}  # request_id: its invoke_result, until a hello shows that the proxy has it
knows_all = False  # Whether no earlier process of this app can have run a call.
socket = None

def register():
    tools = [{"name": name, "description": text, "input_schema": schema} for name, (_, text, schema) in TOOLS.items()]
    body = {"device_id": "my-desktop", "tools": tools, "bridge_features": ["resume", "cancel", "deadline", "progress"]}
    headers = {**AUTH, "Content-Type": "application/json"}
    request = urllib.request.Request(PROXY + "/v1/chat/sessions", json.dumps(body).encode(), headers)
    try:
        session = json.load(urllib.request.urlopen(request, timeout=30))
    except urllib.error.HTTPError as error:
        if error.code not in (401, 403, 422):
            raise
        sys.exit("The proxy does not let this app register: " + error.read().decode())
    print(session["mcp_url"], flush=True)
    return session["bridge_url"]

def message(kind, request_id, **members):
    return json.dumps({"type": kind, "mcpSessionId": request_id.partition(":")[0], "request_id": request_id, **members})

async def send(text):
    with contextlib.suppress(ConnectionClosed):  # What is lost here is asked for in the next hello.
        await socket.send(text)

async def settle(pending):
    """Of all calls that earlier sockets carried, the proxy still wants those that are pending."""
    global knows_all
    for request_id in running.keys() - pending:
        running.pop(request_id).cancel()
    for request_id in results.keys() - pending:
        del results[request_id]
    for request_id in [request_id for request_id in pending if request_id not in running]:
        if request_id not in results and not knows_all:
            results[request_id] = message("invoke_result", request_id, ok=False, error="The tool may have run.")
        never_seen = message("invoke_result", request_id, ok=False, error={"code": "unknown_request"})
        await send(results.get(request_id, never_seen))
    knows_all = True

async def run(request_id, frame):
    async def progress(done, total):
        if frame.get("progress"):
            await send(message("tool_progress", request_id, progress=done, total=total))

    try:
        work = TOOLS[frame["tool_name"]][0](progress, **frame["arguments"])
        content = await asyncio.wait_for(work, frame["timeout_ms"] / 1000)
        result = message("invoke_result", request_id, ok=True, content=content)
    except Exception as error:
        result = message("invoke_result", request_id, ok=False, error=f"{type(error).__name__}: {error}")
    del running[request_id]
    results[request_id] = result
    if len(results) > KEPT:
        del results[next(iter(results))]
    await send(result)

async def lend(bridge_url):
    """Serves calls until the socket goes, and gives the code and the reason."""
    global socket
    async with connect(bridge_url, additional_headers=AUTH, max_size=None, ping_interval=None, close_timeout=1) as socket:
        with contextlib.suppress(ConnectionClosed):
            while True:
                frame = json.loads(await asyncio.wait_for(socket.recv(), SILENCE))
                kind, request_id = frame["type"], frame.get("request_id")
                if kind == "ping":
                    await send('{"type": "pong"}')
                elif kind == "hello":
                    await settle(frame["pending"])
                elif kind == "invoke_tool" and request_id not in running and request_id not in results:
                    running[request_id] = asyncio.create_task(run(request_id, frame))
                elif kind == "cancel_tool" and request_id in running:
                    running.pop(request_id).cancel()
    return socket.close_code, socket.close_reason

async def main(bridge_url=None):
    bound = SHORTEST
    while True:
        began = time.monotonic()
        try:
            bridge_url = bridge_url or await asyncio.to_thread(register)
            code, reason = await lend(bridge_url)
            if code in (1000, 4401, 4409):  # Deleted; the token is wrong; another one is connected.
                return reason
            if code == 4404:
                bridge_url = None
        except (OSError, http.client.HTTPException, WebSocketException) as error:
            reason = error
        if time.monotonic() - began > LONGEST:
            bound = SHORTEST
        # The pause is random, so that the apps of a proxy that restarts do not all come at once.
        pause = random.uniform(0, bound)
        bound = min(2 * bound, LONGEST)
        print(f"Not connected: {reason or 'no answer'}; again in {pause:.1f} s", file=sys.stderr)
        await asyncio.sleep(pause)

sys.exit(asyncio.run(main(*sys.argv[1:])))
