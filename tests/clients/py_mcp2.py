"""The Python SDK 2.x (mcp): py-mcp2/bin/python py_mcp2.py '<plan JSON>', see README.md

With the mode "modern" it asks nothing to connect, so what is wrong shows in the first step.
"""

from contextlib import asynccontextmanager
from types import SimpleNamespace

from driver import MODES, connected, run, timeout_seconds
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client


@asynccontextmanager
async def connect(plan):
    async with create_mcp_http_client(headers=plan.get("headers")) as http_client:
        if "url" in plan:
            server = streamable_http_client(plan["url"], http_client=http_client)
        else:
            server = StdioServerParameters(command=plan["command"], args=plan.get("args", []), env=plan.get("env"))
        mode = MODES[plan.get("mode", "auto")]
        async with Client(server, mode=mode, read_timeout_seconds=timeout_seconds(plan)) as client:

            async def list_tools():
                return (await client.list_tools()).tools

            yield SimpleNamespace(
                connected=connected(client.protocol_version, client.server_info, client.instructions),
                list=list_tools,
                call=client.call_tool,
            )


run("py-mcp2", "mcp", connect)
