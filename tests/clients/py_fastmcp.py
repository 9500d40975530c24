"""FastMCP's client: py-fastmcp/bin/python py_fastmcp.py '<plan JSON>', see README.md

With the mode "modern" it asks nothing to connect, so what is wrong shows in the first step.
"""

from contextlib import asynccontextmanager
from types import SimpleNamespace

from driver import MODES, connected, run, timeout_seconds
from fastmcp import Client
from fastmcp.client.transports import StdioTransport, StreamableHttpTransport


@asynccontextmanager
async def connect(plan):
    if "url" in plan:
        transport = StreamableHttpTransport(plan["url"], headers=plan.get("headers"))
    else:
        transport = StdioTransport(plan["command"], plan.get("args", []), env=plan.get("env"), keep_alive=False)
    async with Client(transport, mode=MODES[plan.get("mode", "auto")], timeout=timeout_seconds(plan)) as client:
        yield SimpleNamespace(
            connected=connected(client.protocol_version, client.server_info, client.instructions),
            list=client.list_tools,
            # Not call_tool, which raises when the tool says isError.
            call=client.call_tool_mcp,
        )


run("py-fastmcp", "fastmcp", connect)
