"""The Python SDK 1.x (mcp), legacy versions only: py-mcp1/bin/python py_mcp1.py '<plan JSON>', see README.md"""

from contextlib import asynccontextmanager
from datetime import timedelta
from types import SimpleNamespace

from driver import connected, run, timeout_seconds
from mcp import ClientSession, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client


@asynccontextmanager
async def connect(plan):
    async with create_mcp_http_client(headers=plan.get("headers")) as http_client:
        if "url" in plan:
            transport = streamable_http_client(plan["url"], http_client=http_client)
        else:
            transport = stdio_client(
                StdioServerParameters(command=plan["command"], args=plan.get("args", []), env=plan.get("env"))
            )
        timeout = timedelta(seconds=timeout_seconds(plan))
        async with transport as (read, write, *_), ClientSession(read, write, timeout) as session:
            about = await session.initialize()

            async def list_tools():
                return (await session.list_tools()).tools

            yield SimpleNamespace(
                connected=connected(about.protocolVersion, about.serverInfo, about.instructions),
                list=list_tools,
                call=session.call_tool,
            )


run("py-mcp1", "mcp", connect)
